"""Build models: the served one, and one that drafts for it, from opened checkpoints to layers with weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from fwk.config import Config, EngineOptions, ModelOptions
from fwk.errors import ConfigError, ModelLoadError, in_range, shaped
from fwk.features.worker import WorkerFeatures
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.device import Staging, Upload
from fwk.interfaces.feature import ModelBuild
from fwk.interfaces.graphs import StepPieces
from fwk.interfaces.model import Encoder, HiddenTap, Model, ModelContext
from fwk.interfaces.moe import MoEContext, MoERunner, Routing
from fwk.interfaces.operators import OperatorContext, Operators
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.quant import QuantContext, QuantMethod
from fwk.interfaces.state import RecurrentState
from fwk.plugins import FAMILIES, Registered, choose, find, load_object
from fwk.plugins.answers import checked
from fwk.plugins.families import COMPUTING
from fwk.setup import memory_need
from fwk.setup.checkpoint import OpenedModel, open_head, open_model
from fwk.setup.resolve import ModelSetup, check_layers, check_quantizers, variance
from fwk.types import ModelConfig
from fwk.worker.loading.attention import build_attention
from fwk.worker.loading.model_identity import model_identity
from fwk.worker.loading.quantization import AUTO, UNQUANTISED, ChosenQuantization
from fwk.worker.loading.weights import BaseModelWeights, TrackedWeights
from fwk_native.thread_pool import ThreadPool

log = logging.getLogger(__name__)

T = TypeVar("T")

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


class ModelBuilder:
    """Builds models on one device, with the attention backend, operators and quantisers of the run.

    chosen: plugin names by family; what is only known once layers are built (``quant``, ``moe``) is written there.
    reasons: collects a sentence for each fallback. staging, upload: as in ``AttentionContext``.
    """

    def __init__(  # noqa: PLR0913 - what a worker has
        self,
        config: Config,
        setup: ModelSetup,
        tp: ParallelGroup,
        device: torch.device,
        threads: ThreadPool,
        chosen: dict[str, str],
        reasons: list[str],
        staging: Callable[[], Staging] | None = None,
        upload: Upload | None = None,
    ) -> None:
        self._config = config
        self._setup = setup
        self._factory = setup.factory
        self._tp = tp
        self._device = self.device = device
        self._dtype: torch.dtype = getattr(torch, setup.facts.dtype)
        self._threads = threads
        self._chosen = chosen
        self._reasons = reasons
        self._staging = staging
        self._upload = upload
        self.moe: Registered | None = None  # of the layers that were built
        self.layers: list[AttentionLayer] = []  # of all models that were built
        self.recurrent_states: list[RecurrentState] = []  # of the served model
        self.has_heads = False
        """Whether what drafts is built on the served model, or of its checkpoint."""
        self._num_own_layers = 0  # of ``layers``: the served model's, which come first
        self.wanted_taps: list[HiddenTap] = []  # of the served model, in the order heads asked for them
        self.taps: dict[int, HiddenTap] = {}
        self.made: dict[str, Any] = {}
        """What features have made for the served model."""
        self.features = WorkerFeatures()
        """To be set before models are built."""
        self._quant_variances: list[str] = []

    @cached_property
    def attention(self) -> AttentionBackend:
        return build_attention(
            self._factory,
            device=self._device,
            dtype=self._dtype,
            kv_dtype=self._setup.facts.kv_dtype,
            block_size=self._config.engine.page_size,
            threads=self._threads,
            staging=self._staging,
            upload=self._upload,
            is_deterministic=self._setup.facts.is_deterministic,
            tp_rank=self._tp.rank,
            tp_size=self._tp.size,
        )

    @cached_property
    def pieces(self) -> StepPieces | None:
        """What replays steps with prompts in pieces; None: nothing does."""
        return self.features.pieces(self.attention)

    @cached_property
    def operators(self) -> Operators:
        fields = {"device": self._device, "dtype": self._dtype, "threads": self._threads}
        checks: dict[str, Any] = {"rms_norm": _summed, "add_rms_norm": _summed, "gate": _gated, "rows": _rows}
        checks["choose_experts"] = partial(_routed, self._threads)
        checks |= dict.fromkeys(("rotate", "scale", "join", "add_rms_norm_rounded", "gate_rounded"))
        return checked(
            self._factory.item("operators"),
            self._factory.build("operators", OperatorContext, **fields),
            **checks,
        )

    def build_served(self, is_greedy: Tensor | None) -> Model | Encoder:
        """The served model. ``is_greedy``: as in ``ModelContext``.

        Raises ``FwkError`` when a layer or the weights are not what the configuration promised.
        """
        model, context = self._served(self._setup, self.layers, is_greedy)
        self._num_own_layers = len(self.layers)
        self.recurrent_states = context.recurrent_states
        self.taps, self.made = context.taps, context.made
        self._report_quantization(context)
        _check_all_read(self._setup.opened, self._factory.item("models").name, context)
        self._check_moe()
        check_layers(self.layers, self._factory.item("attention"), self._setup.facts)
        return model

    def rebuild_served(self, opened: OpenedModel, is_greedy: Tensor | None) -> tuple[Model | Encoder, ModelContext]:
        """The served model with the weights of another checkpoint, alongside the one that serves, for ``adopt``.

        Raises ``FwkError`` when the checkpoint is not what this run could serve; nothing has changed then.
        """
        if self.has_heads:
            raise ConfigError(
                f"--speculative-algorithm {self._config.engine.speculative_algorithm} drafts with a head on the "
                "model's weights, which would stay the old one: serve without it, or with one that needs no head"
            )
        layers = list[AttentionLayer]()
        model, context = self._served(replace(self._setup, opened=opened), layers, is_greedy)
        _check_all_read(opened, self._factory.item("models").name, context)
        assert isinstance(context.quant, ChosenQuantization)
        quant = context.quant.chosen()
        if quant != self._chosen["quant"]:
            raise ModelLoadError(
                f"its layers would be computed by {quant}; this server computes {self._chosen['quant']}"
            )
        own = self.layers[: self._num_own_layers]
        if list(map(_seen, layers)) != list(map(_seen, own)):
            raise ModelLoadError("its layers of attention are others than those of the model that serves")
        states = [(state.shapes, state.dtypes) for state in context.recurrent_states]
        if states != [(state.shapes, state.dtypes) for state in self.recurrent_states]:
            raise ModelLoadError("its recurrent layers are others than those of the model that serves")
        return model, context

    def build_encoder(self) -> Model:
        """The served model without its layers: what encodes media, and the embedding."""
        opened = self._setup.opened
        bare = replace(opened, config=replace(opened.config, num_layers=0))
        context = self._context(bare, self._config.engine, "encoder")
        return self._factory.build(self._factory.item("models"), partial(replace, context))

    def adopt(self, context: ModelContext) -> None:
        """From now on the layers of a model that was built anew are the served model's, with its K/V and states.

        ``layers`` is another list then: backends know a list by its identity.
        """
        layers = context.attention_layers
        for old, new in zip(self.layers, layers, strict=False):
            new.kv_group, new.kv_cache = old.kv_group, old.kv_cache
        self.layers, self._num_own_layers = [*layers, *self.layers[len(layers) :]], len(layers)
        context.attention_layers[:] = self.layers
        for old, new in zip(self.recurrent_states, context.recurrent_states, strict=True):
            new.tensors = old.tensors
        self.recurrent_states[:] = context.recurrent_states  # the list is the states' store's, too
        self.taps, self.made = context.taps, context.made

    def _served(
        self, setup: ModelSetup, layers: list[AttentionLayer], is_greedy: Tensor | None
    ) -> tuple[Model | Encoder, ModelContext]:
        """Build the served model of ``setup.opened``."""
        item = self._factory.item("models")
        opened, served = setup.opened, setup.opened.served
        if self._tp.stage.count > 1 and not getattr(load_object(item), "divides_layers", False):
            raise ConfigError(
                f"--pipeline-parallel-size {self._tp.stage.count} is not possible: model {item.name!r} builds all "
                f"layers of {opened.name} in one worker"
            )
        context = self._context(opened, self._config.engine, "served")
        context.attention_layers = layers
        kept = self.features.kept_bytes(served.inputs)
        memory_need.check(setup, context.weights.stored_sizes(), self._dtype.itemsize, self._tp.everyone.size, kept)
        if served.runner == "generate":
            context.is_greedy = is_greedy
        model: Model | Encoder = self._factory.build(item, partial(replace, context))
        return model, context

    def build_draft(self, name: str) -> Model:
        """A model that drafts for the served one; its layers join the served model's in the KV cache.

        Raises ``ConfigError`` when the two do not fit together.
        """
        self._check_decoder_only(name)
        own = self._second_model(name)
        opened = open_model(replace(self._config, model=own), self._factory.plugins, log.info)
        _check_draft(name, opened, self._setup)
        facts = replace(
            self._setup.facts, architecture=opened.config.architecture, model=opened.config, features=frozenset()
        )
        selection = choose(self._factory.plugins, "models", AUTO, facts)
        item = selection.chosen
        assert item is not None
        self._reasons.extend(f"for the draft model {name}, {reason}" for reason in selection.reasons())
        attention = self._factory.item("attention")
        refusal = attention.declaration.refusal(item.declaration.facts_with(facts, None))
        if refusal is not None:
            raise ConfigError(f"attention backend {attention.name!r} cannot serve the draft model {name}: it {refusal}")
        # How the served model is quantised says nothing of this one, which is computed as it is stored.
        context = self._context(opened, _as_stored(self._config.engine), "draft")
        model: Model = self._factory.build(item, partial(replace, context))
        _check_all_read(opened, item.name, context)
        return model

    def build_head(self, model: Model, make: Callable[[ModelContext], T], checkpoint: str | None) -> T:
        """What ``make`` builds for the served model: ``SpeculativeContext.build``."""
        opened = self._setup.opened
        self.has_heads = True
        self._check_decoder_only(checkpoint or "of the checkpoint")
        if checkpoint is None:
            return make(self._context(opened, self._config.engine, "head"))
        own = self._second_model(checkpoint)
        files, config = open_head(replace(self._config, model=own), self._factory.plugins, log.info, opened.config)
        _check_head(checkpoint, config, opened)
        facts = replace(self._setup.facts, head_size=config.head_size, num_kv_heads=config.num_kv_heads)
        attention = self._factory.item("attention")
        refusal = attention.declaration.refusal(replace(facts, num_heads=config.num_heads))
        if refusal is not None:
            raise ConfigError(f"attention backend {attention.name!r} cannot serve the head {checkpoint}: it {refusal}")
        context = self._context(
            replace(opened, checkpoint=files, config=config), _as_stored(self._config.engine), "head"
        )
        made = make(context)
        _check_all_read(replace(opened, path=files.path, config=config), f"the head {checkpoint}", context)
        return made

    def _second_model(self, name: str) -> ModelOptions:
        """The options of a model or head that drafts: ``NAME`` or ``NAME@REVISION``, unless a file is named so."""
        given, _, revision = (name, "", "") if Path(name).expanduser().exists() else name.rpartition("@")
        named = {"model": given or name, "revision": revision if given and revision else None}
        return self._config.model.model_copy(update={**SECOND_MODEL_OPTIONS, **named})

    def _check_decoder_only(self, name: str) -> None:
        """Raise ``ConfigError`` when what drafts for the served model would read its prompts otherwise than it does."""
        opened = self._setup.opened
        if opened.served.encoder is not None:
            raise ConfigError(
                f"the draft model or head {name} cannot draft for {opened.name}, whose prompts an encoder reads: "
                "choose a --speculative-algorithm without a model"
            )

    def tap(self, layers: Sequence[int]) -> None:
        """Have the served model keep its residual stream before these layers: ``SpeculativeContext.tap``."""
        unknown = [index for index in layers if index not in self.taps]
        if unknown:
            has = f"{min(self.taps)} to {max(self.taps)}" if self.taps else "no layer"
            raise ConfigError(
                f"the head reads what comes to layer {unknown[0]} of {self._setup.opened.name}, which lets heads read "
                f"that of {has}"
            )
        for index in layers:
            self.taps[index].is_wanted = True
            self.wanted_taps.append(self.taps[index])

    def _context(
        self, opened: OpenedModel, options: EngineOptions, role: Literal["served", "draft", "head", "encoder"]
    ) -> ModelContext:
        """What the layers of a model are built from. role: of the model in this run."""
        attention = self.attention  # before any weight is read: a backend that cannot start says so
        checkpoint_config = opened.config.raw.get("quantization_config") or {}
        is_base = opened.runner == "pool" and opened.served.is_decoder
        weights = (BaseModelWeights if is_base else TrackedWeights)(opened.checkpoint.weights())

        def method(item: Registered, dtype: torch.dtype = self._dtype) -> QuantMethod:
            return self._factory.build(
                item,
                QuantContext,
                device=self._device,
                dtype=dtype,
                checkpoint_config=checkpoint_config,
                threads=self._threads,
                is_deterministic=self._setup.facts.is_deterministic,
            )

        plugins, facts = self._factory.plugins, self._setup.facts
        unquantised = find(plugins, "quant", UNQUANTISED)
        plain = method(unquantised)
        float32 = method(unquantised, torch.float32) if self._dtype != torch.float32 else None
        context = ModelContext(
            config=opened.config,
            weights=weights,
            dtype=self._dtype,
            device=self._device,
            quant=ChosenQuantization(options, plugins, facts, weights, plain, method),
            plain=plain,
            attention=attention if self.pieces is None else self.pieces.attention,
            tp=self._tp,
            max_model_len=self._setup.max_model_len,
            attention_layers=self.layers,
            moe_runner=self._moe_runner,
            operators=self.operators,
            plain_float32=float32,
            float32_head=float32 if options.enable_fp32_lm_head else None,
            is_deterministic=facts.is_deterministic,
            ep_size=facts.ep_size,
        )
        told: list[str] = []
        build = ModelBuild(
            role,
            opened.loader,
            can_reread=not opened.checkpoint.weights_identity(),
            path=opened.path,
            threads=self._threads,
            identity=partial(model_identity, self._config, self._setup, opened, self._tp, role, told),
            read_since=weights.read_since,
        )
        told += self.features.model_context(context, build)
        return context

    def _moe_runner(self, context: MoEContext) -> MoERunner:
        """A runner for one layer. Of a model whose config names no experts, the plugin is chosen with the first."""
        if self.moe is None:
            settled = self._setup.resolution.selections.get("moe")
            selection = settled or choose(self._factory.plugins, "moe", AUTO, self._setup.facts)
            assert selection.chosen is not None
            self.moe = selection.chosen
            self._chosen["moe"] = self.moe.name
            if settled is None:
                self._reasons.extend(selection.reasons())
        given = {"threads": self._threads, "is_deterministic": self._setup.facts.is_deterministic}
        return checked(self.moe, self._factory.build(self.moe, partial(replace, context, **given)), apply=_summed)

    def variances(self) -> list[str]:
        """Why a sequence's numbers may depend on what else a step computes, by the plugins in use."""
        found = [variance(self._config.engine, self._setup.opened)]
        for family in COMPUTING:
            name = self._chosen.get(family)
            if name is not None and family != "quant":  # which is by layer
                why = find(self._factory.plugins, family, name).declaration.variance(self._setup.facts)
                found.append("" if why is None else f"{FAMILIES[family].noun} {name!r} {why}")
        return [why for why in (*found, *self._quant_variances) if why]

    def _report_quantization(self, context: ModelContext) -> None:
        """Note how the layers were quantised in the end."""
        assert isinstance(context.quant, ChosenQuantization)
        self._chosen["quant"] = context.quant.chosen()
        resolution = self._setup.resolution
        check_quantizers([name for name in context.quant.used() if name != UNQUANTISED], resolution)
        self._reasons.extend(context.quant.reasons(resolution.selections["quant"].missed()))
        self._quant_variances = context.quant.variances()

    def _check_moe(self) -> None:
        """Forget a MoE runner that no layer asked for. Raises ``ConfigError`` when an option was about experts."""
        if self.moe is not None or self._tp.stage.count > 1:  # the layers with experts may be another stage's
            return
        self._chosen.pop("moe", None)
        name = self._config.engine.moe_runner_backend
        if name != AUTO:
            raise ConfigError(f"--moe-runner-backend {name}: this model has no layers of experts")
        if self._setup.facts.ep_size > 1:
            raise ConfigError(
                f"--expert-parallel-size {self._setup.facts.ep_size}: this model has no layers of experts to divide"
            )


def _summed(answer: Any, x: Tensor, *more: Any, **named: Any) -> str | None:
    return shaped(answer, tuple(x.shape), x.dtype)


def _gated(answer: Any, x: Tensor, *more: Any, **named: Any) -> str | None:
    return shaped(answer, (*x.shape[:-1], x.shape[-1] // 2), x.dtype)


def _rows(answer: Any, table: Tensor, indices: Tensor, *more: Any, **named: Any) -> str | None:
    return shaped(answer, (indices.shape[0], *table.shape[1:]), table.dtype)


def _routed(threads: ThreadPool, answer: Any, logits: Tensor, routing: Routing, *more: Any, **named: Any) -> str | None:
    if not isinstance(answer, tuple) or len(cast("tuple[Any, ...]", answer)) != 2:
        return "answered no pair of ids and weights,"
    ids, weights = cast("tuple[Any, Any]", answer)
    shape = (logits.shape[0], routing.top_k)
    wrong = shaped(ids, shape, torch.int64) or shaped(weights, shape, torch.float32)
    if wrong is None and threads.tape is None:  # what is recorded is not computed
        wrong = in_range(ids, logits.shape[1], "the expert")
    return wrong


def _seen(layer: AttentionLayer) -> tuple[object, ...]:
    """What backends, blocks and plans were settled by."""
    sizes = layer.num_heads, layer.num_kv_heads, layer.kv_spec, layer.soft_cap
    return (*sizes, layer.index, layer.is_pruned, layer.features)


def _as_stored(options: EngineOptions) -> EngineOptions:
    """The same options, of weights that are computed as they are stored."""
    return options.model_copy(update={"quantization": AUTO, "quantization_exclude": (), "quantization_layers": ()})


def _check_head(name: str, config: ModelConfig, opened: OpenedModel) -> None:
    """Raise ``ConfigError`` when a head's config is not of the served model's sizes."""
    for what, own, wanted in (
        ("hidden states of", config.hidden_size, opened.config.hidden_size),
        ("a vocabulary of", config.vocab_size, opened.config.vocab_size),
    ):
        if own != wanted:
            raise ConfigError(
                f"the head {name} was made for {what} {own}, the served model has {wanted}: they must be the same"
            )


def _check_draft(name: str, opened: OpenedModel, setup: ModelSetup) -> None:
    """Raise ``ConfigError`` when a model cannot draft for the served one."""
    if opened.runner != "generate":
        raise ConfigError(f"the draft model {name} is for {opened.task}: give one that generates text")
    if opened.served.is_recurrent:
        raise ConfigError(f"the draft model {name} has recurrent layers, whose states cannot be taken back")
    vocab_size = setup.opened.config.vocab_size
    if opened.config.vocab_size != vocab_size:
        raise ConfigError(
            f"the draft model {name} has a vocabulary of {opened.config.vocab_size} tokens, the served model "
            f"{vocab_size}: they must be the same"
        )
    if opened.max_model_len < setup.max_model_len:
        raise ConfigError(
            f"the draft model {name} reaches {opened.max_model_len} tokens, the served model "
            f"{setup.max_model_len}: set --context-length {opened.max_model_len}"
        )


def _check_all_read(opened: OpenedModel, what: str, context: ModelContext) -> None:
    """Raise ``ModelLoadError`` when a built model, or a head, left tensors of the checkpoint unread in every stage."""
    assert isinstance(context.weights, TrackedWeights)
    context.weights.progress.end()
    left = context.weights.unread(context.config.tie_word_embeddings)
    if context.tp.stage.count > 1:
        names = sorted(context.weights.names())
        unread = frozenset(left)
        mine = torch.tensor([name in unread for name in names], dtype=torch.uint8)
        everywhere = context.tp.everyone.all_gather(mine.unsqueeze(0), 0).all(0).tolist()
        left = [name for name, is_left in zip(names, everywhere, strict=True) if is_left]
    if left:
        some = ", ".join(left[:5]) + (", ..." if len(left) > 5 else "")
        raise ModelLoadError(
            f"{opened.path}: {len(left)} tensors belong to no layer of {what} "
            f"({some}): this checkpoint is of another architecture than its config says"
        )
