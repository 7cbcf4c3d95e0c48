"""fwk: an LLM inference framework whose core is small and whose every feature is a plugin.

This module holds the public names. Importing it is light: each brings in what defines it when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import fwk_deprecated as _  # noqa: F401 - former names work from here on

if TYPE_CHECKING:
    from fwk.config import Options, option
    from fwk.hookspecs import hookimpl
    from fwk.interfaces.attention import AttentionBackendSpec
    from fwk.interfaces.balance import LoadBalancerSpec
    from fwk.interfaces.completion import Completion
    from fwk.interfaces.declaration import Ask, Declaration, Facts, Host, Limit, Needs
    from fwk.interfaces.device import DeviceSpec
    from fwk.interfaces.dialect import DialectSpec
    from fwk.interfaces.engine_pool import EnginePoolSpec
    from fwk.interfaces.executor import ExecutorSpec
    from fwk.interfaces.expert_placement import ExpertPlacerSpec
    from fwk.interfaces.feature import FeatureSpec
    from fwk.interfaces.grammar import GrammarBackendSpec
    from fwk.interfaces.kv_transfer import KVTransferSpec
    from fwk.interfaces.loader import LoaderSpec, ModelSourceSpec
    from fwk.interfaces.lora import LoRABackendSpec, LoRASourceSpec
    from fwk.interfaces.model import ModelSpec
    from fwk.interfaces.moe import MoERunnerSpec
    from fwk.interfaces.multimodal import MultimodalProcessorSpec
    from fwk.interfaces.observer import ObserverSpec
    from fwk.interfaces.operators import OperatorsSpec
    from fwk.interfaces.parser import ReasoningParserSpec, ToolParserSpec
    from fwk.interfaces.prefix_cache import CacheTierSpec, PrefixCacheSpec
    from fwk.interfaces.quant import QuantizerSpec
    from fwk.interfaces.sampling import LogitsProcessorSpec, SamplerSpec
    from fwk.interfaces.schedule import SchedulePolicySpec
    from fwk.interfaces.speculative import SpeculativeDecoderSpec
    from fwk.types import GrammarRequest, SamplingParams
    from fwk_offline.async_llm import AsyncLLM
    from fwk_offline.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Ask",
    "AsyncLLM",
    "AttentionBackendSpec",
    "CacheTierSpec",
    "Completion",
    "Declaration",
    "DeviceSpec",
    "DialectSpec",
    "EnginePoolSpec",
    "ExecutorSpec",
    "ExpertPlacerSpec",
    "Facts",
    "FeatureSpec",
    "GrammarBackendSpec",
    "GrammarRequest",
    "Host",
    "KVTransferSpec",
    "Limit",
    "LoRABackendSpec",
    "LoRASourceSpec",
    "LoadBalancerSpec",
    "LoaderSpec",
    "LogitsProcessorSpec",
    "MoERunnerSpec",
    "ModelSourceSpec",
    "ModelSpec",
    "MultimodalProcessorSpec",
    "Needs",
    "ObserverSpec",
    "OperatorsSpec",
    "Options",
    "PrefixCacheSpec",
    "QuantizerSpec",
    "ReasoningParserSpec",
    "SamplerSpec",
    "SamplingParams",
    "SchedulePolicySpec",
    "SpeculativeDecoderSpec",
    "ToolParserSpec",
    "hookimpl",
    "option",
]


_HOMES = {
    "Ask": "fwk.interfaces.declaration",
    "Completion": "fwk.interfaces.completion",
    "Declaration": "fwk.interfaces.declaration",
    "Facts": "fwk.interfaces.declaration",
    "GrammarRequest": "fwk.types",
    "Host": "fwk.interfaces.declaration",
    "Limit": "fwk.interfaces.declaration",
    "Needs": "fwk.interfaces.declaration",
    "Options": "fwk.config",
    "SamplingParams": "fwk.types",
    "hookimpl": "fwk.hookspecs",
    "option": "fwk.config",
}
"""Where the public names of core are defined, but for the families' declarations."""

_GROUP = "fwk.names"
"""Entry points of the public names that packages alongside core define: each is called as it is named here."""

_ELSEWHERE = ("AsyncLLM", "LLM")


def _installed(name: str) -> Any:
    """What another package defines. Raises ``PluginError`` where none is installed that does."""
    from fwk.errors import PluginError  # noqa: PLC0415 - importing fwk is light

    point = next(iter(entry_points(group=_GROUP, name=name)), None)
    if point is None:
        raise PluginError(f"fwk.{name} is not installed: no package has the entry point {name!r} of the group {_GROUP}")
    return point.load()


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value: Any = getattr(import_module(_HOMES[name]), name)
    elif name in _ELSEWHERE:
        value = _installed(name)
    elif name in __all__:
        from fwk.plugins.families import FAMILIES  # noqa: PLC0415 - importing fwk is light

        value = next(family.spec for family in FAMILIES.values() if family.spec.__name__ == name)
    else:
        raise AttributeError(f"module 'fwk' has no attribute {name!r}")
    globals()[name] = value
    return value
