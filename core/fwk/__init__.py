"""fwk: an LLM inference framework whose core is small and whose every feature is a plugin.

This module holds the public names. Importing it is light: ``LLM`` brings torch in only when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fwk.config import Options, option
from fwk.hookspecs import hookimpl
from fwk.interfaces.attention import AttentionBackendSpec
from fwk.interfaces.balance import LoadBalancerSpec
from fwk.interfaces.cache import CacheTierSpec, PrefixCacheSpec
from fwk.interfaces.declaration import Ask, Declaration, Facts, Host, Limit, Needs
from fwk.interfaces.dialect import DialectSpec
from fwk.interfaces.executor import ExecutorSpec
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
from fwk.interfaces.quant import QuantizerSpec
from fwk.interfaces.sampling import LogitsProcessorSpec, SamplerSpec
from fwk.interfaces.schedule import SchedulePolicySpec
from fwk.interfaces.speculative import SpeculativeDecoderSpec
from fwk.types import GrammarRequest, SamplingParams

if TYPE_CHECKING:
    from fwk.engine.llm import LLM, Completion

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "Ask",
    "AttentionBackendSpec",
    "CacheTierSpec",
    "Completion",
    "Declaration",
    "DialectSpec",
    "ExecutorSpec",
    "Facts",
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


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from fwk.engine import llm  # noqa: PLC0415 - imports torch, so only when asked for

        return getattr(llm, name)
    raise AttributeError(f"module 'fwk' has no attribute {name!r}")
