"""The kit for plugin authors: one contract suite per family, which our own plugins' tests subclass too.

Needs pytest: ``pip install 'fwk[testing]'``. A suite's module is imported when the suite is asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from fwk.plugins.families import FAMILIES

try:
    import pytest
except ImportError as error:
    raise ImportError("fwk_kit.testing needs pytest: pip install 'fwk[testing]'") from error

pytest.register_assert_rewrite(*(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__)))

if TYPE_CHECKING:
    from fwk_kit.testing.asgi import Call, Reply
    from fwk_kit.testing.attention import AttentionSuite
    from fwk_kit.testing.balancers import LoadBalancerSuite
    from fwk_kit.testing.base import PluginSuite
    from fwk_kit.testing.batches import block_tables, make_batch
    from fwk_kit.testing.caches import CacheTierSuite, PrefixCacheSuite
    from fwk_kit.testing.devices import DeviceSuite
    from fwk_kit.testing.dialects import DialectSuite
    from fwk_kit.testing.engine_pools import EnginePoolSuite
    from fwk_kit.testing.executors import ExecutorSuite
    from fwk_kit.testing.expert_placers import ExpertPlacerSuite
    from fwk_kit.testing.features import FeatureSuite
    from fwk_kit.testing.grammar import GrammarBackendSuite
    from fwk_kit.testing.kv_transfer import KVTransferSuite
    from fwk_kit.testing.loaders import LoaderSuite, ModelSourceSuite
    from fwk_kit.testing.logits_processors import LogitsProcessorSuite
    from fwk_kit.testing.lora import LoRABackendSuite, LoRASourceSuite
    from fwk_kit.testing.models import ModelSuite
    from fwk_kit.testing.moe import MoERunnerSuite
    from fwk_kit.testing.multimodal import MultimodalProcessorSuite
    from fwk_kit.testing.observers import ObserverSuite
    from fwk_kit.testing.operators import OperatorsSuite
    from fwk_kit.testing.parsers import ReasoningParserSuite, ToolParserSuite
    from fwk_kit.testing.quant import QuantizerSuite
    from fwk_kit.testing.samplers import SamplerSuite
    from fwk_kit.testing.schedulers import SchedulePolicySuite
    from fwk_kit.testing.served import ServedSuite
    from fwk_kit.testing.serving import MIXTURE, TINY, ask, metric, serve_tiny, tiny_tensors
    from fwk_kit.testing.speculative import SpeculativeDecoderSuite

SUITES: dict[str, str] = {name: f"{__name__}.{family.suite}" for name, family in FAMILIES.items()}
"""The suite of each family."""

_HELPERS = {
    "PluginSuite": "fwk_kit.testing.base",
    "ServedSuite": "fwk_kit.testing.served",
    "Call": "fwk_kit.testing.asgi",
    "Reply": "fwk_kit.testing.asgi",
    "MIXTURE": "fwk_kit.testing.serving",
    "TINY": "fwk_kit.testing.serving",
    "ask": "fwk_kit.testing.serving",
    "metric": "fwk_kit.testing.serving",
    "serve_tiny": "fwk_kit.testing.serving",
    "tiny_tensors": "fwk_kit.testing.serving",
    "block_tables": "fwk_kit.testing.batches",
    "make_batch": "fwk_kit.testing.batches",
}
"""What else plugin tests use: base classes, a small served model, requests to an application, batches."""

__all__ = [
    "MIXTURE",
    "SUITES",
    "TINY",
    "AttentionSuite",
    "CacheTierSuite",
    "Call",
    "DeviceSuite",
    "DialectSuite",
    "EnginePoolSuite",
    "ExecutorSuite",
    "ExpertPlacerSuite",
    "FeatureSuite",
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
    "Reply",
    "SamplerSuite",
    "SchedulePolicySuite",
    "ServedSuite",
    "SpeculativeDecoderSuite",
    "ToolParserSuite",
    "ask",
    "block_tables",
    "make_batch",
    "metric",
    "serve_tiny",
    "suite_of",
    "tiny_tensors",
]


def suite_of(family: str) -> type[PluginSuite]:
    """The suite of a family."""
    module, _, name = SUITES[family].partition(":")
    return getattr(importlib.import_module(module), name)


def __getattr__(name: str) -> Any:
    if name in _HELPERS:
        return getattr(importlib.import_module(_HELPERS[name]), name)
    for family, where in SUITES.items():
        if where.endswith(f":{name}"):
            return suite_of(family)
    raise AttributeError(f"module 'fwk_kit.testing' has no attribute {name!r}")
