"""Vectors of prompts: of models that embed, classify or score, and generate nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import msgspec

from fwk import FeatureSpec, Options, hookimpl, option
from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.feature import FeatureRun, PromptModel, PromptsServed, Wire
from fwk.interfaces.loader import Checkpoint
from fwk.interfaces.pooling import PoolingConfig

AUTO = "auto"


class PoolingOptions(Options):
    """Options of ``features.pooling``."""

    pooling_type: Literal["auto", "mean", "cls", "last", "token"] = option(
        AUTO,
        "How a model that does not generate makes a vector of hidden states: mean, cls (the first), last, or token (a "
        "vector of each); auto: as the checkpoint says, else the last of a decoder and the mean of an encoder.",
        stability="beta",
    )
    classifier_from_token: tuple[str, ...] = option(
        (),
        "With --task classify, a model that generates scores by its logits of one token, or of the second less the "
        "first: no yes.",
        stability="beta",
    )


class Wanted(msgspec.Struct, array_like=True, frozen=True):
    """What goes along with such a request, to the engine and to the workers: where a pair's second text begins."""

    segment_start: int = 0


class Vector(msgspec.Struct, array_like=True, frozen=True):
    """What was made of a prompt: float32 numbers, little-endian."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a served model's vectors are made (``PromptsServed.settings``).

    is_decoder: of the K/V of a model that could generate. has_labels: the vector is a classifier's scores.
    """

    config: PoolingConfig
    task: str
    is_decoder: bool
    has_labels: bool


class PoolingSpec(FeatureSpec):
    """Serves models whose ``ModelSpec.runner`` is ``pool``."""

    def made_for(self, checkpoint: Checkpoint) -> str:
        return "" if checkpoint.pooling() is None else "embed"

    def serves(self, model: PromptModel, options: PoolingOptions) -> PromptsServed:
        spec, task, is_decoder = model.spec, model.task, model.spec.runner == "generate"
        labels = _labels(model, options)
        if is_decoder:
            _check_causal(model)
        stored = model.checkpoint.pooling()
        pooling = _pooling(model, stored, options)
        notes: tuple[str, ...] = ()
        if task == "embed" and stored is None and options.pooling_type == AUTO:
            how = "normalised" if pooling.normalize else "not normalised"
            found = "the last token's hidden state" if pooling.kind == "last" else "the mean of the hidden states"
            notes = (f"embeddings are {found}, {how}: there is no modules.json (--pooling-type)",)
        return PromptsServed(
            vector_size=len(labels) if is_decoder and task == "classify" else spec.vector_size(model.config),
            labels=labels,
            has_token_vectors=pooling.kind == "token",
            needs_whole_prompts=not (is_decoder and (task == "classify" or pooling.kind == "last")),
            max_length=pooling.max_length,
            notes=notes,
            settings=Pooling(pooling, task, is_decoder, bool(labels)),
        )

    def check_run(self, run: FeatureRun, options: PoolingOptions) -> None:
        if run.prompts is None:
            if options.pooling_type != AUTO:
                raise ConfigError("--pooling-type: this model generates text; --task embed makes vectors of prompts")
            if options.classifier_from_token:
                raise ConfigError(_TOKENS)
            return
        pooling: Pooling = run.prompts.settings
        what = "makes embeddings" if pooling.task == "embed" else f"is served to {pooling.task}"
        refused: list[tuple[str, Sequence[object], str]] = [
            ("speculative_algorithm", ("none",), "there is nothing to draft"),
        ]
        if not pooling.is_decoder:
            refused.append(("kv_cache_dtype", (AUTO,), "which keeps no K/V"))
        if run.prompts.needs_whole_prompts:
            why = "which needs the hidden states of all tokens" if pooling.is_decoder else "which keeps no K/V"
            refused.append(("prefix_cache", (AUTO, "none"), why))
        for name, idle, why in refused:
            value = getattr(run.config.engine, name)
            if value not in idle:
                raise ConfigError(f"--{name.replace('_', '-')} {value}: {run.model} {what}, {why}")


_TOKENS = "--classifier-from-token takes one or two tokens, with --task classify, for a model that generates text"


def _labels(model: PromptModel, options: PoolingOptions) -> tuple[str, ...]:
    tokens = options.classifier_from_token
    has_head = model.config.architecture not in model.spec.architectures or model.spec.runner == "pool"
    if tokens and (model.task != "classify" or has_head or len(tokens) > 2):
        raise ConfigError(_TOKENS)
    if model.task != "classify":
        return ()
    if not (tokens or has_head):
        raise ConfigError(
            f"--task classify: {model.name} has no layer to classify with; --classifier-from-token no yes scores by "
            "the logits of tokens"
        )
    return (tokens[-1],) if tokens else model.config.labels


def _check_causal(model: PromptModel) -> None:
    """Refuse decoders that were trained again to see what follows: their vectors would be silently wrong."""
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        if model.config.raw.get(key) == value:
            raise ModelLoadError(
                f"config.json: {key} is {str(value).lower()}: every token of this model sees the whole prompt, which "
                "decoders do not compute here"
            )


def _pooling(model: PromptModel, stored: PoolingConfig | None, options: PoolingOptions) -> PoolingConfig:
    found = stored or model.spec.pooling(model.task)
    if options.pooling_type == AUTO:
        return found
    if model.task == "classify":
        raise ConfigError("--pooling-type is for models that embed: a classifier's layer says what it reads")
    return replace(found, kind=cast("Any", options.pooling_type))


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        PoolingSpec(
            name="pooling",
            server="fwk_features.pooling.server:PoolingServer",
            worker="fwk_features.pooling.worker:PoolingWorker",
            wire=Wire(request=Wanted, sequence=Wanted, result=Vector, event=Vector),
            options=PoolingOptions,
            methods=("embed", "classify", "classify_pairs"),
            runners=("generate", "pool"),
            changes_kv=False,
            summary="vectors and scores of prompts (--task embed, classify), for models that do not generate",
        )
    ]
