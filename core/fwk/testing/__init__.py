"""The kit for plugin authors: one contract suite per family, which our own plugins' tests subclass too.

Needs pytest: ``pip install 'fwk[testing]'``. A suite's module is imported when the suite is asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ImportError as error:
    raise ImportError("fwk.testing needs pytest: pip install 'fwk[testing]'") from error

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

if TYPE_CHECKING:
    from fwk.testing.attention import AttentionSuite
    from fwk.testing.balancers import LoadBalancerSuite
    from fwk.testing.base import PluginSuite
    from fwk.testing.caches import CacheTierSuite, PrefixCacheSuite
    from fwk.testing.dialects import DialectSuite
    from fwk.testing.executors import ExecutorSuite
    from fwk.testing.grammar import GrammarBackendSuite
    from fwk.testing.kv_transfer import KVTransferSuite
    from fwk.testing.loaders import LoaderSuite, ModelSourceSuite
    from fwk.testing.logits_processors import LogitsProcessorSuite
    from fwk.testing.lora import LoRABackendSuite, LoRASourceSuite
    from fwk.testing.models import ModelSuite
    from fwk.testing.moe import MoERunnerSuite
    from fwk.testing.multimodal import MultimodalProcessorSuite
    from fwk.testing.observers import ObserverSuite
    from fwk.testing.operators import OperatorsSuite
    from fwk.testing.parsers import ReasoningParserSuite, ToolParserSuite
    from fwk.testing.quant import QuantizerSuite
    from fwk.testing.samplers import SamplerSuite
    from fwk.testing.schedulers import SchedulePolicySuite
    from fwk.testing.served import ServedSuite
    from fwk.testing.speculative import SpeculativeDecoderSuite

SUITES: dict[str, str] = {
    "attention": "fwk.testing.attention:AttentionSuite",
    "quant": "fwk.testing.quant:QuantizerSuite",
    "models": "fwk.testing.models:ModelSuite",
    "schedulers": "fwk.testing.schedulers:SchedulePolicySuite",
    "speculative": "fwk.testing.speculative:SpeculativeDecoderSuite",
    "lora": "fwk.testing.lora:LoRABackendSuite",
    "lora_sources": "fwk.testing.lora:LoRASourceSuite",
    "cache": "fwk.testing.caches:PrefixCacheSuite",
    "cache_tiers": "fwk.testing.caches:CacheTierSuite",
    "samplers": "fwk.testing.samplers:SamplerSuite",
    "logits_processors": "fwk.testing.logits_processors:LogitsProcessorSuite",
    "grammar": "fwk.testing.grammar:GrammarBackendSuite",
    "tool_parsers": "fwk.testing.parsers:ToolParserSuite",
    "reasoning_parsers": "fwk.testing.parsers:ReasoningParserSuite",
    "executors": "fwk.testing.executors:ExecutorSuite",
    "load_balancers": "fwk.testing.balancers:LoadBalancerSuite",
    "kv_transfer": "fwk.testing.kv_transfer:KVTransferSuite",
    "loaders": "fwk.testing.loaders:LoaderSuite",
    "model_sources": "fwk.testing.loaders:ModelSourceSuite",
    "dialects": "fwk.testing.dialects:DialectSuite",
    "observers": "fwk.testing.observers:ObserverSuite",
    "moe": "fwk.testing.moe:MoERunnerSuite",
    "operators": "fwk.testing.operators:OperatorsSuite",
    "multimodal": "fwk.testing.multimodal:MultimodalProcessorSuite",
}
"""The suite of each family."""

_BASES = {"PluginSuite": "fwk.testing.base", "ServedSuite": "fwk.testing.served"}

__all__ = [
    "SUITES",
    "AttentionSuite",
    "CacheTierSuite",
    "DialectSuite",
    "ExecutorSuite",
    "GrammarBackendSuite",
    "KVTransferSuite",
    "LoRABackendSuite",
    "LoRASourceSuite",
    "LoadBalancerSuite",
    "LoaderSuite",
    "LogitsProcessorSuite",
    "MoERunnerSuite",
    "ModelSourceSuite",
    "ModelSuite",
    "MultimodalProcessorSuite",
    "ObserverSuite",
    "OperatorsSuite",
    "PluginSuite",
    "PrefixCacheSuite",
    "QuantizerSuite",
    "ReasoningParserSuite",
    "SamplerSuite",
    "SchedulePolicySuite",
    "ServedSuite",
    "SpeculativeDecoderSuite",
    "ToolParserSuite",
    "suite_of",
]


def suite_of(family: str) -> type[PluginSuite]:
    """The suite of a family."""
    module, _, name = SUITES[family].partition(":")
    return getattr(importlib.import_module(module), name)


def __getattr__(name: str) -> Any:
    if name in _BASES:
        return getattr(importlib.import_module(_BASES[name]), name)
    for family, where in SUITES.items():
        if where.endswith(f":{name}"):
            return suite_of(family)
    raise AttributeError(f"module 'fwk.testing' has no attribute {name!r}")
