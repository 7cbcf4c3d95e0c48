"""The table of families: hook, declaration, option, contract suite and API version of each.

The public names of declarations (``fwk.XSpec``), ``VERSIONS`` and the kit's suites follow from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches

from fwk.interfaces.attention import AttentionBackendSpec
from fwk.interfaces.balance import LoadBalancerSpec
from fwk.interfaces.declaration import Declaration
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
from fwk.plugins.versions import Adapter, ApiVersion, quant_1


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of plugin.

    suite: the contract suite, ``"module:class"`` of the kit's package of suites.
    option: the option, core's or a plugin's, whose value names the plugin (or plugins); None while none does.
    takes_all: every installed plugin takes part, so there is nothing to choose.
    pattern_option: a core option with values ``PATTERN=NAME``, which choose plugins for parts of the model.
    switch: the option, core's or a plugin's, without which nothing of the family is used.
    has_none: ``none`` does without a plugin of the family.
    serves: only a server has plugins of the family; ``fwk.LLM`` builds none.
    version: raise ``newest`` with the interface, and add an adapter for the version before.
    """

    hook: str
    noun: str
    spec: type[Declaration]
    suite: str
    option: str | None = None
    takes_all: bool = False
    pattern_option: str | None = None
    switch: str | None = None
    has_none: bool = False
    serves: bool = False
    version: ApiVersion = field(default_factory=ApiVersion)


_ALL = [
    Family(
        "attention_backends",
        "attention backend",
        AttentionBackendSpec,
        "attention:AttentionSuite",
        "attention_backend",
    ),
    Family(
        "quantizers",
        "quantizer",
        QuantizerSpec,
        "quant:QuantizerSuite",
        "quantization",
        pattern_option="quantization_layers",
        version=ApiVersion(2, {1: Adapter("0.4", quant_1)}),
    ),
    Family("models", "model", ModelSpec, "models:ModelSuite", "model_impl"),
    Family(
        "schedule_policies", "schedule policy", SchedulePolicySpec, "schedulers:SchedulePolicySuite", "schedule_policy"
    ),
    Family(
        "speculative_decoders",
        "speculative decoder",
        SpeculativeDecoderSpec,
        "speculative:SpeculativeDecoderSuite",
        "speculative_algorithm",
        has_none=True,
        version=ApiVersion(2, {1: Adapter("0.4")}),
    ),
    Family(
        "lora_backends", "LoRA backend", LoRABackendSpec, "lora:LoRABackendSuite", "lora_backend", switch="enable_lora"
    ),
    Family("lora_sources", "LoRA source", LoRASourceSpec, "lora:LoRASourceSuite", takes_all=True, switch="enable_lora"),
    Family("prefix_caches", "prefix cache", PrefixCacheSpec, "caches:PrefixCacheSuite", "prefix_cache"),
    Family("cache_tiers", "cache tier", CacheTierSpec, "caches:CacheTierSuite", "cache_tiers"),
    Family("samplers", "sampler", SamplerSpec, "samplers:SamplerSuite", "sampling_backend"),
    Family(
        "logits_processors",
        "logits processor",
        LogitsProcessorSpec,
        "logits_processors:LogitsProcessorSuite",
        takes_all=True,
    ),
    Family(
        "grammar_backends",
        "grammar backend",
        GrammarBackendSpec,
        "grammar:GrammarBackendSuite",
        "grammar_backend",
        has_none=True,
    ),
    Family("tool_parsers", "tool parser", ToolParserSpec, "parsers:ToolParserSuite", "tool_call_parser", has_none=True),
    Family(
        "reasoning_parsers",
        "reasoning parser",
        ReasoningParserSpec,
        "parsers:ReasoningParserSuite",
        "reasoning_parser",
        has_none=True,
    ),
    Family("devices", "device", DeviceSpec, "devices:DeviceSuite", "device"),
    Family("executors", "executor", ExecutorSpec, "executors:ExecutorSuite", "executor"),
    Family(
        "engine_pools", "pool of engines", EnginePoolSpec, "engine_pools:EnginePoolSuite", takes_all=True, serves=True
    ),
    Family(
        "load_balancers",
        "load balancer",
        LoadBalancerSpec,
        "balancers:LoadBalancerSuite",
        "load_balance_method",
        serves=True,
    ),
    Family(
        "kv_transfers",
        "KV transfer",
        KVTransferSpec,
        "kv_transfer:KVTransferSuite",
        "disaggregation_transfer_backend",
        version=ApiVersion(2),
    ),
    Family("loaders", "loader", LoaderSpec, "loaders:LoaderSuite", "load_format"),
    Family("model_sources", "model source", ModelSourceSpec, "loaders:ModelSourceSuite", takes_all=True),
    Family("dialects", "HTTP dialect", DialectSpec, "dialects:DialectSuite", takes_all=True, serves=True),
    Family("observers", "observer", ObserverSpec, "observers:ObserverSuite", takes_all=True, serves=True),
    Family("operators", "set of operators", OperatorsSpec, "operators:OperatorsSuite", "operator_backend"),
    Family("moe_runners", "MoE runner", MoERunnerSpec, "moe:MoERunnerSuite", "moe_runner_backend"),
    Family(
        "expert_placers",
        "expert placement algorithm",
        ExpertPlacerSpec,
        "expert_placers:ExpertPlacerSuite",
        "eplb_algorithm",
    ),
    Family(
        "multimodal_processors",
        "multimodal processor",
        MultimodalProcessorSpec,
        "multimodal:MultimodalProcessorSuite",
        takes_all=True,
        version=ApiVersion(2),
    ),
    Family("features", "feature", FeatureSpec, "features:FeatureSuite", takes_all=True),
]


def closest(word: str, words: Iterable[str]) -> str:
    """A hint at the word that was probably meant; empty if there is none."""
    close = get_close_matches(word, list(words), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


FAMILIES: dict[str, Family] = {family.spec.family: family for family in _ALL}

VERSIONS: dict[str, ApiVersion] = {name: family.version for name, family in FAMILIES.items()}

ORDER = (
    "models",
    "quant",
    "attention",
    "moe",
    "lora",
    "speculative",
    "cache",
    "executors",
    "samplers",
    "operators",
    "grammar",
    "schedulers",
)
"""The families that are settled together. Of two that cannot both have their best, the earlier one gets it."""

COMPUTING = ("quant", "attention", "moe", "lora", "operators")
"""The families whose plugins compute a sequence's numbers together with those of others."""

NAMED = ("dialects", "observers", "logits_processors", "features", "model_sources", "lora_sources")
"""Families of which every built-in takes part, and another package's plugin once it is named."""

PARTS = ("cache_tiers", "logits_processors", "lora_sources", "features")
"""Families of an engine of which none or several take part: each is held against what was settled."""
