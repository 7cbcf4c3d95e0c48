"""Build a worker's parts: the models, the KV cache they share, and the runner that executes steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fwk.config import Config
from fwk.errors import ConfigError
from fwk.features.declared import states_kept
from fwk.features.worker import PartPlugins, WorkerFeatures, build_worker_features
from fwk.interfaces.attention import AttentionLayer
from fwk.interfaces.device import CacheMemory, Device, MemoryInfo
from fwk.interfaces.drafting import Drafting
from fwk.interfaces.executor import WorkerInfo
from fwk.interfaces.feature import LoadedModel, WorkerPartContext
from fwk.interfaces.model import Encoder, Model
from fwk.interfaces.observer import WorkerObserverContext
from fwk.interfaces.parallel import ParallelGroup
from fwk.plugins.pools import num_engines
from fwk.setup.devices import take_device
from fwk.setup.resolve import ModelSetup
from fwk.types import ForwardBatch
from fwk.worker.drafts import DraftsBuilder
from fwk.worker.graphs.capturing import Capturing
from fwk.worker.graphs.step_graphs import StepModel
from fwk.worker.kv import kv_cache
from fwk.worker.kv.cache_sizing import CacheSizing
from fwk.worker.kv.layout import KVLayout
from fwk.worker.kv.states import StateStore
from fwk.worker.loading.model_builder import ModelBuilder
from fwk.worker.loading.rebuilding import Rebuilding
from fwk.worker.runner.in_flight import InFlight, Settled
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.model_runner import ModelRunner
from fwk.worker.runner.observing import WorkerObservers
from fwk.worker.runner.packed import PackedRing
from fwk.worker.runner.prompt_runner import PromptRunner
from fwk.worker.runner.rehearsal import LargestStep
from fwk.worker.runner.sequence_table import SequenceTable
from fwk.worker.runner.staging import StagingRing
from fwk.worker.runner.uploads import Uploads
from fwk.worker.sampling.pipeline import SamplingPipeline
from fwk.worker.sampling.sampling_builder import SamplingBuilder
from fwk.worker.sampling.step_sampler import StepSampler
from fwk_native.thread_pool import ThreadPool

MAX_IN_FLIGHT = 2
"""Steps that a device may be given before the first of them is collected."""


@dataclass(slots=True)
class WorkerParts:
    """What a worker works with. The builder fills it in, so ``close`` also ends what a failed load has begun.

    operations: what the engine can call, by name.
    """

    operations: dict[str, Callable[..., Any]] = field(default_factory=dict[str, Callable[..., Any]])
    runner: ModelRunner | PromptRunner | None = None
    pipeline: SamplingPipeline | None = None
    observers: WorkerObservers | None = None
    features: WorkerFeatures | None = None
    troubles: list[str] = field(default_factory=list[str])  # ``StepResult.troubles``

    def close(self) -> None:
        if self.pipeline is not None:
            self.pipeline.close()
        if self.observers is not None:
            self.observers.close()
        if self.features is not None:
            self.features.close()


class WorkerBuilder:
    """Builds the worker of one rank: models first, then the KV cache for their layers, then the runner."""

    def __init__(self, config: Config, setup: ModelSetup, group: ParallelGroup, engine_index: int) -> None:
        self._config = config
        self._setup = setup
        self._factory = setup.factory
        self._group = group
        self._engine_index = engine_index
        self._device = take_device(setup.device, setup.chosen_device.name, group, engine_index)
        if config.engine.cpu_threads is not None:
            torch.set_num_threads(config.engine.cpu_threads)
        self.threads = ThreadPool(torch.get_num_threads())
        self._chosen = setup.resolution.chosen
        self._chosen["devices"] = setup.chosen_device.name
        self._reasons: list[str] = []
        self._rings: list[StagingRing] = []
        self._uploads = Uploads(setup.device, self._device, MAX_IN_FLIGHT + 1)
        self._models = ModelBuilder(
            config,
            setup,
            group,
            self._device,
            self.threads,
            self._chosen,
            self._reasons,
            None if setup.device.is_host else self._staging,
            self._uploads.send,
        )
        self._kv = KVLayout(config, setup, group, self._models, self._chosen, self._reasons)
        self._capturing = Capturing(config, setup, self._models, group)
        self._rebuild = Rebuilding(config, setup, self._models)
        send, chosen, reasons = self._uploads.send, self._chosen, self._reasons
        self._sampling = SamplingBuilder(config, setup, self._device, self.threads, send, chosen)
        self.parts = WorkerParts()
        self.parts.operations["weights_identity"] = setup.opened.checkpoint.weights_identity
        self._drafts = DraftsBuilder(
            config, setup, self._models, self._plan_attention, self._rings, chosen, reasons, self.parts.troubles
        )

    def build(self) -> WorkerInfo:
        """Load the model and fill in ``parts``. Raises ``FwkError``."""
        others = self._memory_before()
        observers, features = self._observers(), self._features()
        self._models.features = features
        self._drafts.algorithm()  # is refused before any weight is read
        if self._setup.opened.runner == "generate":
            self._sampling.settle_grammars(features)
        self._capturing.reader = observers.reader
        options, opened = self._config.engine, self._setup.opened
        is_greedy = self._rebuild.is_greedy = torch.zeros(1, dtype=torch.int64) if self._setup.device.is_host else None
        model = self._models.build_served(is_greedy)
        num_own_layers = len(self._models.layers)
        if (stages := self._group.stage.count) > 1:
            self._chosen["stages"] = f"{stages} (the last one has {num_own_layers} layers)"
        drafts = self._capturing.drafting = self._drafts.maker(model)
        states = self._states(0 if drafts is None else drafts.num_slots)
        groups = self._kv.groups(num_own_layers)
        window = max((layer.sliding_window or 0 for group in groups[1:] for layer in group), default=0)
        num_captured = self._capturing.num_rows if opened.runner == "generate" else 0
        num_null = 1 if num_captured else 0  # blocks that no sequence holds
        table = SequenceTable(
            options.max_running_requests,
            self._setup.max_sequence_len,
            options.page_size,
            len(groups),
            has_states=states is not None,
        )
        table.parts = features
        inputs = InputBuffers(
            table,
            self._setup.max_step_tokens,
            max(options.max_running_requests, num_captured),
            self._staging(StagingRing if self._setup.device.is_host else PackedRing),
            prunes_last_layer=opened.runner == "generate"
            and isinstance(model, Model)
            and model.prunes_last_layer
            and not (drafts is not None and drafts.reads_hidden),
            has_states=states is not None,
            has_encoder=opened.served.encoder is not None,
        )
        inputs.send = self._uploads.send
        info = partial(
            WorkerInfo,
            vocab_size=opened.config.vocab_size,
            chosen=self._chosen,
            num_window_groups=len(groups) - 1,
            window=window,
            num_state_places=None if states is None else states.num_places,
            max_running=None if states is None else states.num_slots,
        )
        self._loaded(model)
        if opened.runner == "pool":
            self.parts.runner = PromptRunner(
                model=model,
                plan_attention=self._plan_attention,
                states=states,
                table=table,
                inputs=inputs,
                wait=self._wait,
            )
            self._chosen["step"] = "eager (the model does not generate)"
            cache = self._sizing(groups, others, num_null).size(self.parts.runner, self._largest(groups, 0), features)
            features.cache_allocated(self._kv.cache(cache.num_blocks))
            self._operators_ready()
            self._warmed_up(model)
            self._rebuild.run = partial(self._serve_prompts, self.parts.runner)
            return info(cache.num_blocks, reasons=tuple(self._reasons), memory=cache.memory)
        assert isinstance(model, Model), "ModelSpec.runner is generate: load names a Model"
        sampling = self.parts.pipeline = self._sampling.build(table, features)
        drafting = self._drafts.build(drafts, table, inputs, sampling)
        runner = self.parts.runner = ModelRunner(
            model=self._capturing.step_model(model, is_greedy, inputs.max_tokens, drafting.max_drafts),
            plan_attention=self._plan_attention,
            states=states,
            table=table,
            inputs=inputs,
            sampling=sampling,
            drafting=drafting,
            in_flight=self._in_flight(table, inputs.max_tokens),
            uploads=self._uploads,
            num_captured=num_captured,
            stage=self._group.stage if self._group.stage.count > 1 else None,
        )
        cache = self._sizing(groups, others, num_null).size(
            runner,
            self._largest(groups, drafting.max_drafts),
            features,
            partial(self._capturing.prepare, inputs),
            partial(self._capturing.on_trial, model, is_greedy),
            partial(self._capturing.pieces_on_trial, model, is_greedy),
        )
        features.cache_allocated(self._kv.cache(cache.num_blocks))
        self._capturing.prepare(inputs, cache.num_blocks + num_null, cache.num_blocks)
        with kv_cache.scratch_kv_cache(cache.tensors, self._models.layers):
            self._warm_up(runner, self._largest(groups, drafting.max_drafts))
        self._chosen["step"] = self._capturing.how(runner.model)
        self._warmed_up(model)
        step_model = partial(
            self._capturing.step_model,
            is_greedy=is_greedy,
            max_tokens=inputs.max_tokens,
            max_drafts=drafting.max_drafts,
        )
        self._rebuild.run = partial(self._serve, runner, step_model, cache.tensors)
        return info(
            cache.num_blocks,
            reasons=tuple(self._reasons),
            num_lookahead=drafting.max_drafts,
            depth=runner.depth,
            memory=cache.memory,
        )

    def build_encoder(self, feature: str) -> None:
        """Load the model without its layers, for one feature's part alone. Raises ``FwkError``."""
        features = self._features(feature)
        features.model_loaded(LoadedModel(self._models.build_encoder(), {}))

    def _serve(
        self,
        runner: ModelRunner,
        step_model: Callable[[Model], StepModel],
        memory: CacheMemory | None,
        model: Model | Encoder,
    ) -> None:
        """Run steps with a model that was built anew; captured ones read the weights they were captured with."""
        assert isinstance(model, Model)
        runner.model = step_model(model)
        self._loaded(model)
        with kv_cache.scratch_kv_cache(memory, self._models.layers):
            runner.captures.warm_up()
        self._warmed_up(model)

    def _serve_prompts(self, runner: PromptRunner, model: Model | Encoder) -> None:
        runner.model = model
        self._loaded(model)
        self._warmed_up(model)

    def _loaded(self, model: Model | Encoder) -> None:
        """The model is there."""
        if self.parts.features is not None:
            self.parts.features.model_loaded(LoadedModel(model, self._models.taps, self._models.made))

    def _warmed_up(self, model: Model | Encoder) -> None:
        """The model is to serve."""
        if self.parts.observers is not None:
            self.parts.observers.model_loaded(model)
        if self.parts.features is not None:
            self.parts.features.warmed_up()
        new = [why for why in self._factory.plugins.left_out if why not in self.parts.troubles]
        self.parts.troubles += new
        self._reasons += new

    def _warm_up(self, runner: ModelRunner, largest: LargestStep) -> None:
        opened = self._setup.opened
        if self._models.operators.compiles:
            if opened.served.encoder is not None:
                raise ConfigError(
                    f"--operator-backend {self._factory.item('operators').name} compiles in a rehearsal of steps, and "
                    f"{opened.name} has an encoder, whose steps are not rehearsed: choose other operators"
                )
            largest.small().rehearse(runner)
        runner.captures.warm_up()
        self._wait()  # what loading has given the device to do is no request's affair
        self._operators_ready()

    def _wait(self) -> None:
        """For all that the device has been given to do."""
        done = self._setup.device.event()
        done.record()
        done.wait()

    def _operators_ready(self) -> None:
        made = self._models.operators.ready()
        if made:
            self._chosen["compiled"] = made
        why = self._models.variances()
        self._chosen["numbers"] = f"may vary with the batch: {'; '.join(why)}" if why else "the same in any batch"

    def _observers(self) -> WorkerObservers:
        context = partial(
            WorkerObserverContext,
            self._device,
            self._setup.device.is_host,
            self._group.everyone.rank,
            self._group.everyone.size,
            self._engine_index,
        )
        observers = self.parts.observers = WorkerObservers(self._config, self._factory.plugins, context)
        self.parts.operations |= observers.operations()
        return observers

    def _features(self, only: str = "") -> WorkerFeatures:
        device, opened = self._setup.device, self._setup.opened
        context = partial(
            WorkerPartContext,
            device=self._device,
            send=self._uploads.send,
            to_host=partial(_to_host, device),
            is_host=device.is_host,
            rank=self._group.everyone.rank,
            size=self._group.everyone.size,
            num_slots=self._config.engine.max_running_requests,
            vocab_size=opened.config.vocab_size,
            hidden_size=opened.config.hidden_size,
            num_layers=opened.config.num_layers,
            step_tokens=self._setup.max_step_tokens,
            dtype=getattr(torch, self._setup.facts.dtype),
            grammar=self._sampling.grammar,
            prompts=opened.served.prompts,
            encode=self._sampling.encode,
            inputs=opened.served.inputs,
            rebuild=self._rebuild,
            host_buffer=device.host_buffer,
            event=device.event,
            chosen={family: self._factory.item(family).declaration for family in self._setup.resolution.selections},
            hash_files=self._kv.files.start,
            processors=lambda: self._sampling.processors,
        )
        plugins = PartPlugins(self._factory, self._chosen, self._reasons)
        features = self.parts.features = self._models.features = build_worker_features(
            self._factory, context, plugins, only
        )
        self.parts.operations |= features.operations()
        return features

    def _staging(self, kind: type[StagingRing] = StagingRing) -> StagingRing:
        self._rings.append(kind(self._setup.device, self._device, MAX_IN_FLIGHT + 1))
        return self._rings[-1]

    def _plan_attention(self, batch: ForwardBatch) -> Any:
        """What the attention backend makes of a batch; nothing for a model without attention, or that plans itself."""
        layers = self._models.layers
        if not layers or self._setup.opened.served.encoder is not None:
            return None
        if batch.is_static:
            plan = self._models.attention.plan_static(batch, layers)
            if plan is not None:
                return plan
            batch.is_static = False
        return self._models.attention.plan(batch, layers)

    def _states(self, num_drafted: int) -> StateStore | None:
        """What recurrent layers keep of running sequences, and for the prefix cache; None without such layers."""
        if not self._setup.opened.served.is_recurrent:
            return None
        most = self._config.engine.max_running_requests
        states = StateStore.allocate(
            self._models.recurrent_states,
            num_slots=most,
            max_rows=states_kept(self._factory).max_rows,
            is_cached=self._chosen.get("cache", "none") != "none",
            device=self._device,
            free=self._memory().free,
            group=self._group,
            num_undone=num_drafted,
        )
        self._chosen["states"] = states.sentence()
        if states.num_slots < most:
            self._reasons.append(
                f"{states.num_slots} sequences run at once, of --max-running-requests {most}: half of the free memory "
                "holds no more of their states"
            )
        return states

    def _largest(self, groups: list[list[AttentionLayer]], max_drafts: int) -> LargestStep:
        """What bounds the run's steps, in a KV cache that holds the longest sequence."""
        setup, generates = self._setup, self._setup.opened.runner == "generate"
        return LargestStep(
            num_seqs=self._config.engine.max_running_requests,
            num_tokens=setup.max_step_tokens,
            seq_len=setup.max_sequence_len,
            page_size=self._config.engine.page_size,
            max_drafts=max_drafts,
            num_window_groups=len(groups) - 1,
            generates=generates,
            needs_whole_prompts=setup.opened.served.needs_whole_prompts,
        )

    def _sizing(self, groups: list[list[AttentionLayer]], others: MemoryInfo, num_null: int) -> CacheSizing:
        return CacheSizing(
            self._config,
            self._setup,
            self._models.attention,
            groups,
            self._group.everyone,
            self._device,
            self._memory,
            others=others.total - others.free,
            num_null=num_null,
            graph_sizes=self._capturing.sizes.sizes if num_null else (),
            piece_sizes=self._capturing.piece_sizes,
            kept_bytes=self._models.features.kept_bytes(self._setup.opened.served.inputs),
        )

    def _memory_before(self) -> MemoryInfo:
        """The memory before anything is loaded: what a worker before left in this process is no other's."""
        if not self._setup.device.is_host:
            gc.collect()
            self._setup.device.trim(self._device)
        return self._memory()

    def _memory(self) -> MemoryInfo:
        num_sharers = self._group.local_size * num_engines(self._factory.plugins, self._config.plugin_options)
        return self._setup.device.memory(self._device, num_sharers)

    def _in_flight(
        self, table: SequenceTable, max_rows: int
    ) -> Callable[[StepSampler, Drafting, Settled], InFlight] | None:
        """What keeps launched steps on a device with an order of work of its own."""
        device = self._setup.device
        if device.is_host:
            return None
        return partial(InFlight, device, self._device, table, size=MAX_IN_FLIGHT + 1, max_rows=max_rows)


def _to_host(device: Device, values: Tensor) -> Tensor:
    """Begin a copy into the host's memory; on the host, the same."""
    return values if device.is_host else device.host_buffer(values.shape, values.dtype).copy_(values, non_blocking=True)
