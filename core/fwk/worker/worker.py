"""A worker in this process: chooses its plugins, loads the model, runs steps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from fwk.config import Config, EngineOptions
from fwk.errors import ConfigError, FwkError, ModelLoadError
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from fwk.interfaces.executor import Worker, WorkerInfo
from fwk.interfaces.lora import LoRABackend, LoRAContext, LoRASource, LoRASourceContext
from fwk.interfaces.model import Encoder, Model, ModelContext
from fwk.interfaces.moe import MoEContext, MoERunner
from fwk.interfaces.operators import OperatorContext, Operators
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.quant import QuantContext, QuantMethod
from fwk.interfaces.sampling import LogitsProcessor, LogitsProcessorSpec, SamplerSpec, SamplingContext
from fwk.interfaces.speculative import SpeculativeContext, SpeculativeDecoder
from fwk.native.thread_pool import ThreadPool
from fwk.plugins import PluginSet, Registered, build, choose, find, taking_part
from fwk.plugins.selection import plugin_options
from fwk.process.threads import half_of_torchs_threads
from fwk.setup.checkpoint import OpenedModel, open_model
from fwk.setup.resolve import ModelSetup, check_layers, check_quantizers
from fwk.text import ModelText
from fwk.text.grammars import Grammars
from fwk.types import Batch, StepResult
from fwk.worker import kv_cache
from fwk.worker.adapters import AdapterStore, NoAdapters
from fwk.worker.cpu_graph import TapeCapture
from fwk.worker.drafting import Drafting, NoDrafting
from fwk.worker.grammar import GrammarMasks, GrammarStore
from fwk.worker.graphs import CapturedStepModel, StepModel, StepSize
from fwk.worker.inputs import InputBuffers
from fwk.worker.model_runner import ModelRunner
from fwk.worker.pooling import PoolingRunner
from fwk.worker.quantization import AUTO, UNQUANTISED, ChosenQuantization
from fwk.worker.sampling import Place, SamplingPipeline
from fwk.worker.sequence_table import SequenceTable
from fwk.worker.transfer import BlockStore, open_store
from fwk.worker.weights import TrackedWeights

log = logging.getLogger(__name__)

SECOND_MODEL_OPTIONS = {
    "revision": None,
    "task": "auto",
    "load_format": "auto",
    "tokenizer_path": None,
    "chat_template": None,
    "context_length": None,
    "json_model_override_args": "{}",
}
"""The served model's own options, which mean nothing for another model."""


def device_of(kind: str, group: ParallelGroup, replica: int) -> torch.device:
    """The device of a rank. Ranks on a CPU share it; each has a GPU of its own, those of replica 0 first."""
    if kind != "cuda":
        return torch.device(kind)
    index = replica * group.size + group.rank
    if index >= torch.cuda.device_count():
        raise ConfigError(
            f"rank {group.rank} of engine {replica} needs a GPU of its own, but {torch.cuda.device_count()} can be "
            "seen; lower --tensor-parallel-size or --data-parallel-size, or look at CUDA_VISIBLE_DEVICES"
        )
    return torch.device(kind, index)


def _place(item: Registered) -> Place:
    """Where a logits processor stands."""
    assert isinstance(item.declaration, LogitsProcessorSpec)
    return Place(item.declaration.order, item.name)


class LocalWorker(Worker):
    """Owns one device."""

    def __init__(
        self, config: Config, plugins: PluginSet, setup: ModelSetup, group: ParallelGroup, replica: int = 0
    ) -> None:
        self._config = config
        self._plugins = plugins
        self._setup = setup
        self._device = device_of(setup.facts.host.device, group, replica)
        self._dtype: torch.dtype = getattr(torch, setup.facts.dtype)
        self._tp = group
        if config.engine.cpu_threads is not None:
            torch.set_num_threads(config.engine.cpu_threads)
        self._threads = ThreadPool(torch.get_num_threads())
        self._runner: ModelRunner | PoolingRunner | None = None
        self._moe: Registered | None = None
        self._store: BlockStore | None = None
        self._pipeline: SamplingPipeline | None = None
        self._chosen = setup.resolution.chosen
        self._reasons: list[str] = []
        self._facts = setup.facts
        self._compiler = self._grammar_compiler()
        self._grammars = GrammarStore(self._compiler.compile)
        self._operations: dict[str, Callable[..., Any]] = {
            "find_blocks": self._find_blocks,
            "load_blocks": self._load_blocks,
            "prepare_grammar": self._grammars.prepare,
            "grammars_ready": self._grammars.ready,
            "release_grammar": self._grammars.release,
        }

    @torch.inference_mode()
    def load(self) -> WorkerInfo:
        with half_of_torchs_threads():
            return self._load()

    def _load(self) -> WorkerInfo:
        options = self._config.engine
        opened = self._setup.opened
        settled = self._setup.resolution
        model_item, attention_item = settled.item("models"), settled.item("attention")
        attention = self._attention(attention_item)
        context = self._model_context(opened, model_item, attention, [], options)
        context.lora = self._lora_backend()
        context.is_greedy = is_greedy = torch.zeros(1, dtype=torch.int64, device=self._device)
        model: Model | Encoder = build(model_item, context)
        self._report(context)
        self._check_all_read(opened, model_item, context.weights)
        if self._moe is None:
            self._chosen.pop("moe", None)
        if self._moe is None and options.moe_runner_backend != "auto":
            raise ConfigError(f"--moe-runner-backend {options.moe_runner_backend}: this model has no layers of experts")
        layers = context.attention_layers
        check_layers(layers, attention_item, self._facts)
        decoder = self._decoder(context, attention_item)
        num_blocks = kv_cache.count_blocks(
            max_total_tokens=options.max_total_tokens,
            fraction=options.mem_fraction_static,
            block_size=options.page_size,
            bytes_per_block=kv_cache.block_bytes(attention, layers),
            device=self._device,
            num_sharers=self._tp.size * options.data_parallel_size,
            most=options.max_running_requests * -(-opened.max_model_len // options.page_size),
        )
        num_blocks = kv_cache.agree(num_blocks, self._tp, self._device)
        memory = kv_cache.allocate(attention, layers, num_blocks, self._device)
        self._store = open_store(
            self._config, self._plugins, self._setup, self._chosen, layers, self._tp, num_blocks=num_blocks
        )
        table = SequenceTable(options.max_running_requests, opened.max_model_len, options.page_size)
        prunes_last_layer = isinstance(model, Model) and model.prunes_last_layer
        inputs = InputBuffers(
            table,
            self._setup.max_step_tokens,
            options.max_running_requests,
            self._device,
            prunes_last_layer=prunes_last_layer,
        )
        if opened.runner == "pool":
            assert isinstance(model, Encoder), "ModelSpec.runner is pool: load names an Encoder"
            self._runner = PoolingRunner(model=model, pooling=opened.pooling, table=table, inputs=inputs)
            return WorkerInfo(num_blocks, opened.config.vocab_size, self._chosen, tuple(self._reasons))
        assert isinstance(model, Model), "ModelSpec.runner is generate: load names a Model"
        sampling = self._sampling(table)
        drafting = Drafting(decoder, table, inputs, attention, layers, sampling) if decoder else NoDrafting()
        runner = self._runner = ModelRunner(
            model=self._step_model(model, is_greedy, inputs.max_tokens, drafting.max_drafts),
            attention=attention,
            layers=layers,
            table=table,
            inputs=inputs,
            sampling=sampling,
            drafting=drafting,
            adapters=self._adapters(context.lora),
        )
        with kv_cache.unused(memory, layers):
            runner.warm_up()
        self._chosen["step"] = self._how_steps_run(runner.model)
        self._grammars.begin(self._compiler.build)
        return WorkerInfo(num_blocks, opened.config.vocab_size, self._chosen, tuple(self._reasons), drafting.max_drafts)

    def execute(self, batch: Batch) -> StepResult:
        assert self._runner is not None, "load comes first"
        if batch.saves is None or self._store is None:
            return self._runner.execute(batch)
        self._store.save(batch.saves.before)
        result = self._runner.execute(batch)
        self._store.save(batch.saves.after)
        return result

    def call(self, name: str, *args: Any) -> Any:
        operation = self._operations.get(name)
        if operation is None:
            raise FwkError(f"unknown worker operation {name!r}; there are {', '.join(self._operations)}")
        return operation(*args)

    def close(self) -> None:
        self._grammars.close()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._store is not None:
            self._store.close()

    def _find_blocks(self, saves: list[tuple[bytes, int]], keys: list[bytes]) -> int:
        assert self._store is not None, "this run has no cache tiers"
        self._store.save(saves)
        return self._store.find(keys)

    def _load_blocks(self, saves: list[tuple[bytes, int]], keys: list[bytes], block_ids: list[int]) -> int:
        assert self._store is not None, "this run has no cache tiers"
        self._store.save(saves)
        return self._store.load(keys, block_ids)

    def _options(self, item: Registered) -> Any:
        return plugin_options(item, self._config.plugin_options)

    def _lora_backend(self) -> LoRABackend | None:
        options = self._config.engine
        if not options.enable_lora:
            return None
        item = self._setup.resolution.item("lora")
        context = LoRAContext(
            device=self._device,
            dtype=self._dtype,
            max_adapters=options.max_loras_per_batch,
            max_rank=options.max_lora_rank,
            options=self._options(item),
        )
        return build(item, context)

    def _adapters(self, backend: LoRABackend | None) -> AdapterStore | NoAdapters:
        if backend is None:
            return NoAdapters()
        sources: list[LoRASource] = [
            build(item, LoRASourceContext(own))
            for item, own in taking_part(self._plugins, "lora_sources", self._config.plugin_options)
        ]
        store = AdapterStore(backend, sources)
        self._operations |= {"load_adapter": store.load, "unload_adapter": store.unload}
        return store

    def _attention(self, item: Registered) -> AttentionBackend:
        context = AttentionContext(
            device=self._device,
            dtype=self._dtype,
            kv_dtype=self._setup.facts.kv_dtype,
            block_size=self._config.engine.page_size,
            options=self._options(item),
            threads=self._threads,
        )
        return build(item, context)

    @cached_property
    def _operators(self) -> Operators:
        item = self._setup.resolution.item("operators")
        return build(item, OperatorContext(self._device, self._dtype, self._options(item), self._threads))

    def _model_context(
        self,
        opened: OpenedModel,
        item: Registered,
        attention: AttentionBackend,
        layers: list[AttentionLayer],
        options: EngineOptions,
    ) -> ModelContext:
        def build_method(item: Registered) -> QuantMethod:
            return self._quant(item, opened)

        weights = TrackedWeights(opened.checkpoint.weights())
        plain = build_method(find(self._plugins, "quant", UNQUANTISED))
        return ModelContext(
            config=opened.config,
            weights=weights,
            dtype=self._dtype,
            device=self._device,
            quant=ChosenQuantization(options, self._plugins, self._facts, weights, plain, build_method),
            plain=plain,
            attention=attention,
            tp=self._tp,
            max_model_len=self._setup.max_model_len,
            attention_layers=layers,
            moe_runner=self._moe_runner,
            options=self._options(item),
            operators=self._operators,
        )

    def _moe_runner(self, context: MoEContext) -> MoERunner:
        """A runner for one layer. Of a model whose config names no experts, the plugin is chosen with the first."""
        if self._moe is None:
            settled = self._setup.resolution.selections.get("moe")
            selection = settled or choose(self._plugins, "moe", AUTO, self._facts)
            assert selection.chosen is not None
            self._moe = selection.chosen
            self._chosen["moe"] = self._moe.name
            if settled is None:
                self._reasons.extend(selection.reasons())
        return build(self._moe, replace(context, options=self._options(self._moe)))

    def _quant(self, item: Registered, opened: OpenedModel) -> QuantMethod:
        config = opened.config.raw.get("quantization_config") or {}
        return build(item, QuantContext(self._device, self._dtype, config, self._options(item), self._threads))

    def _report(self, context: ModelContext) -> None:
        """Say how the layers were quantised in the end."""
        assert isinstance(context.quant, ChosenQuantization)
        self._chosen["quant"] = context.quant.chosen()
        settled = self._setup.resolution
        check_quantizers([name for name in context.quant.used() if name != UNQUANTISED], settled)
        self._reasons.extend(context.quant.reasons(settled.selections["quant"].missed()))

    def _check_all_read(self, opened: OpenedModel, item: Registered, weights: Any) -> None:
        left = weights.unread(opened.config.tie_word_embeddings)
        if left:
            some = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
            raise ModelLoadError(
                f"{opened.path}: {len(left)} tensors belong to no layer of {item.name} "
                f"({some}): this checkpoint is of another architecture than its config says"
            )

    def _sampling(self, table: SequenceTable) -> SamplingPipeline:
        opened = self._setup.opened
        num_slots, vocab_size = self._config.engine.max_running_requests, opened.config.vocab_size

        @cache
        def token_bytes() -> list[bytes]:
            return ModelText(opened.checkpoint, self._config.model, vocab_size).vocabulary.all_bytes(vocab_size)

        def context(options: Any) -> SamplingContext:
            return SamplingContext(
                vocab_size,
                num_slots,
                self._device,
                opened.eos_token_ids,
                options,
                self._threads,
                token_bytes,
            )

        sampler = self._setup.resolution.item("samplers")
        items = taking_part(self._plugins, "logits_processors", self._config.plugin_options, host=None)
        processors: dict[Place, LogitsProcessor] = {Place(-1, ""): GrammarMasks(context(None), self._grammars, table)}
        processors |= {_place(item): build(item, context(options)) for item, options in items}
        assert isinstance(sampler.declaration, SamplerSpec)
        chosen = build(sampler, context(self._options(sampler)))
        pipeline = SamplingPipeline(processors, chosen, table, sampler.declaration.finishes)

        prepared: list[tuple[Place, LogitsProcessor | None]] = []

        def prepare(name: str, values: dict[str, object], is_on: bool) -> str | None:
            item = find(self._plugins, "logits_processors", name)
            prepared.clear()
            try:
                options = plugin_options(item, {item.key: values})
                prepared.append((_place(item), build(item, context(options)) if is_on else None))
            except FwkError as error:
                return str(error)
            return None

        # In two parts: no rank uses another processor before every rank has it.
        self._operations["prepare_processor"] = prepare
        self._operations["use_processor"] = lambda: pipeline.switch(*prepared.pop())
        self._pipeline = pipeline
        return pipeline

    def _step_model(self, model: Model, is_greedy: Tensor, max_tokens: int, max_drafts: int) -> StepModel:
        if self._why_not_captured():
            return StepModel(model, is_greedy)
        max_seqs = self._config.engine.cuda_graph_max_bs
        most = StepSize(max_tokens, max_tokens, min(max_tokens, max_seqs * (1 + max_drafts)), max_seqs)
        return CapturedStepModel(model, is_greedy, self._operators, TapeCapture(self._threads), most)

    def _why_not_captured(self) -> str:
        """Why steps are not even tried to be captured; empty when they are."""
        if self._config.engine.disable_cuda_graph:
            return "--disable-cuda-graph"
        if self._device.type != "cpu":
            return "steps are captured on CPUs only so far"
        if self._tp.size > 1:
            return "ranks add up their parts through torch.distributed"
        return ""

    def _how_steps_run(self, model: StepModel) -> str:
        """How steps run, for those who look: ``captured``, or ``eager`` and why."""
        refusal = model.refusal if isinstance(model, CapturedStepModel) else self._why_not_captured()
        return f"eager ({refusal})" if refusal else "captured"

    def _grammar_compiler(self) -> Grammars:
        opened, model = self._setup.opened, self._config.model

        def text() -> ModelText:
            return ModelText(opened.checkpoint, model, opened.config.vocab_size)

        grammars = Grammars(self._config, self._plugins, text, opened.config.vocab_size, opened.eos_token_ids)
        grammars.use(self._chosen.setdefault("grammar", "none"))
        return grammars

    def _decoder(self, target: ModelContext, attention_item: Registered) -> SpeculativeDecoder | None:
        if "speculative" not in self._setup.resolution.selections:
            return None
        item = self._setup.resolution.item("speculative")
        context = SpeculativeContext(
            num_slots=self._config.engine.max_running_requests,
            max_model_len=self._setup.max_model_len,
            vocab_size=target.config.vocab_size,
            load_model=lambda name: self._second_model(name, target, attention_item),
            options=self._options(item),
        )
        return build(item, context)

    def _second_model(self, name: str, target: ModelContext, attention_item: Registered) -> Model:
        """Open and build a model that drafts for ``target``, its layers beside the target's in the KV cache."""
        own = self._config.model.model_copy(update={**SECOND_MODEL_OPTIONS, "model": name})
        opened = open_model(replace(self._config, model=own), self._plugins, log.info)
        if opened.runner != "generate":
            raise ConfigError(f"the draft model {name} is for {opened.task}: give one that generates text")
        if opened.config.vocab_size != target.config.vocab_size:
            raise ConfigError(
                f"the draft model {name} has a vocabulary of {opened.config.vocab_size} tokens, the served model "
                f"{target.config.vocab_size}: they must be the same"
            )
        if opened.max_model_len < self._setup.max_model_len:
            raise ConfigError(
                f"the draft model {name} reaches {opened.max_model_len} tokens, the served model "
                f"{self._setup.max_model_len}: set --context-length {opened.max_model_len}"
            )
        facts = replace(self._facts, architecture=opened.config.architecture, model=opened.config, features=frozenset())
        selection = choose(self._plugins, "models", AUTO, facts)
        model_item = selection.chosen
        assert model_item is not None
        self._reasons.extend(f"for the draft model {name}, {reason}" for reason in selection.reasons())
        refusal = attention_item.declaration.refusal(model_item.declaration.facts_with(facts, None))
        if refusal is not None:
            raise ConfigError(
                f"attention backend {attention_item.name!r} cannot serve the draft model {name}: it {refusal}"
            )
        # How the served model is quantised says nothing of this one, which is computed as it is stored.
        as_stored = self._config.engine.model_copy(
            update={"quantization": AUTO, "quantization_exclude": (), "quantization_layers": ()}
        )
        context = self._model_context(opened, model_item, target.attention, target.attention_layers, as_stored)
        model: Model = build(model_item, context)
        self._check_all_read(opened, model_item, context.weights)
        return model
