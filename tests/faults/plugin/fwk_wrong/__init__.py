"""Plugins of every family that serve as a built-in does, until an order makes one of their answers wrong.

An order is a file in the server's folder for temporary files; ``fwk_wrong.spoil`` carries it out. All declare what
their built-in does, but for its options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

from pydantic import BaseModel, Field

from fwk import DialectSpec, EnginePoolSpec, FeatureSpec, Options, hookimpl, option
from fwk.interfaces.declaration import Declaration
from fwk.interfaces.feature import Wire
from fwk_wrong.wire import Told

BASES = {
    "attention_backends": ("fwk_attention.torch_sdpa", "torch"),
    "quantizers": ("fwk_quant.int8", "int8"),
    "schedule_policies": ("fwk_schedulers.lpm", "lpm"),
    "speculative_decoders": ("fwk_speculative.ngram", "ngram"),
    "lora_backends": ("fwk_lora.torch_lora", "torch"),
    "lora_sources": ("fwk_lora.local", "local"),
    "prefix_caches": ("fwk_cache.hierarchical", "hierarchical"),
    "cache_tiers": ("fwk_cache.host", "host"),
    "samplers": ("fwk_sampling.torch_sampler", "torch"),
    "logits_processors": ("fwk_sampling.processors", "logit_bias"),
    "grammar_backends": ("fwk_grammar.xgrammar", "xgrammar"),
    "tool_parsers": ("fwk_parsers.hermes", "hermes"),
    "reasoning_parsers": ("fwk_parsers.think", "qwen3"),
    "devices": ("fwk_devices.cpu", "cpu"),
    "executors": ("fwk_executors.inprocess", "inprocess"),
    "load_balancers": ("fwk_balancers.round_robin", "round_robin"),
    "kv_transfers": ("fwk_kv_transfer.tcp", "tcp"),
    "loaders": ("fwk_loaders.dummy", "dummy"),
    "model_sources": ("fwk_loaders.local", "local"),
    "observers": ("fwk_observability.log", "log"),
    "operators": ("fwk_operators.torch_ops", "torch"),
    "moe_runners": ("fwk_moe.torch_loop", "torch"),
    "expert_placers": ("fwk_moe.deepseek_placement", "deepseek"),
    "multimodal_processors": ("fwk_multimodal.idefics3", "idefics3"),
    "models": ("fwk_models.llama", "llama"),
}
"""By hook: the module that declares the built-in, and its name."""


FIRST = ("model_sources", "lora_sources", "multimodal_processors")
"""Of those that no option names: asked before all others."""

NUM_ENGINE_PARTS = 48
"""Features that are alike but for their names: an engine's part that has failed once is asked no more."""


def base(hook: str) -> Declaration:
    """The built-in's declaration."""
    module, name = BASES[hook]
    return next(spec for spec in getattr(import_module(module), hook)() if spec.name == name)


def _declaring(hook: str) -> Callable[[], list[Declaration]]:
    def declare() -> list[Declaration]:
        changes: dict[str, Any] = (
            {"enabled_by": ("wrong_observer",), "options": ObserverOptions} if hook == "observers" else {}
        )
        rank = 1000 if hook in FIRST else -100
        own = {"name": NAME, "load": f"fwk_wrong.spoil:{hook}", "rank": rank, "options": None, "switches": ()} | changes
        return [replace(base(hook), **own)]

    declare.__name__ = hook
    return hookimpl(declare)


class ObserverOptions(Options):
    """Options of the observer."""

    wrong_observer: bool = option(False, "Whether the observer is on.")


class PoolOptions(Options):
    """Options of the pool of engines."""

    wrong_pool: bool = option(False, "Whether the pool is on.")


class FeatureParams(BaseModel):
    """The request field that has a feature take part: its number, of which ``wrong`` is the first."""

    wrong_feature: int = Field(0)


NAME = "wrong"

globals().update({hook: _declaring(hook) for hook in BASES})


@hookimpl
def engine_pools() -> list[EnginePoolSpec]:
    load = "fwk_wrong.spoil:engine_pools"
    return [EnginePoolSpec(name=NAME, load=load, options=PoolOptions, enabled_by=("wrong_pool",))]


@hookimpl
def dialects() -> list[DialectSpec]:
    return [DialectSpec(name=NAME, load="fwk_wrong.spoil:dialects")]


@hookimpl
def features() -> list[FeatureSpec]:
    parts: dict[str, Any] = {part: f"fwk_wrong.spoil:{part}_part" for part in ("server", "engine", "worker")}
    wire = Wire(Told, Told, Told, Told, Told, Told)
    others = [
        FeatureSpec(name=f"{NAME}{number}", server=parts["server"], engine=f"fwk_wrong.spoil:engine{number}", wire=wire)
        for number in range(2, NUM_ENGINE_PARTS + 2)
    ]
    return [FeatureSpec(name=NAME, **parts, wire=wire, params=FeatureParams), *others]
