"""Every hook of fwk, one per family. Hooks declare; the declared objects do the work.

Each hook is called once at start-up in every process, before any model or device is touched, and returns a list of
declarations: frozen, light data. Importing the module that implements a hook must not import torch or any other heavy
library; the declaration's ``load`` names where those are needed.
"""

from __future__ import annotations

import pluggy

from fwk.interfaces.attention import AttentionBackendSpec
from fwk.interfaces.balance import LoadBalancerSpec
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

PROJECT = "fwk"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def attention_backends() -> list[AttentionBackendSpec]:
    """Declare attention backends: kernels over the paged KV cache (``--attention-backend``)."""
    return []


@hookspec
def quantizers() -> list[QuantizerSpec]:
    """Declare weight formats of linear layers (``--quantization``)."""
    return []


@hookspec
def models() -> list[ModelSpec]:
    """Declare model implementations, chosen by the checkpoint's architecture."""
    return []


@hookspec
def schedule_policies() -> list[SchedulePolicySpec]:
    """Declare schedule policies: order, admission, pre-emption, chunk size (``--schedule-policy``)."""
    return []


@hookspec
def speculative_decoders() -> list[SpeculativeDecoderSpec]:
    """Declare speculative decoders: they propose drafts, core verifies (``--speculative-algorithm``)."""
    return []


@hookspec
def lora_backends() -> list[LoRABackendSpec]:
    """Declare LoRA kernels (``--lora-backend``)."""
    return []


@hookspec
def lora_sources() -> list[LoRASourceSpec]:
    """Declare places LoRA adapters come from; all are asked in order of rank."""
    return []


@hookspec
def prefix_caches() -> list[PrefixCacheSpec]:
    """Declare prefix caches: reuse of K/V between requests (``--prefix-cache``)."""
    return []


@hookspec
def cache_tiers() -> list[CacheTierSpec]:
    """Declare stores that keep K/V outside the device: host memory, files, ... (``--cache-tiers``)."""
    return []


@hookspec
def samplers() -> list[SamplerSpec]:
    """Declare samplers: they pick token ids from processed logits (``--sampling-backend``)."""
    return []


@hookspec
def logits_processors() -> list[LogitsProcessorSpec]:
    """Declare logits processors; those of other packages take part once they are named, all in ascending ``order``."""
    return []


@hookspec
def grammar_backends() -> list[GrammarBackendSpec]:
    """Declare grammar backends: JSON schema, regex, EBNF and the like (``--grammar-backend``)."""
    return []


@hookspec
def tool_parsers() -> list[ToolParserSpec]:
    """Declare parsers of tool calls (``--tool-call-parser``)."""
    return []


@hookspec
def reasoning_parsers() -> list[ReasoningParserSpec]:
    """Declare parsers that split thinking from the answer (``--reasoning-parser``)."""
    return []


@hookspec
def devices() -> list[DeviceSpec]:
    """Declare devices: what a worker computes on (``--device``)."""
    return []


@hookspec
def executors() -> list[ExecutorSpec]:
    """Declare executors: how the engine reaches its workers (``--executor``)."""
    return []


@hookspec
def engine_pools() -> list[EnginePoolSpec]:
    """Declare pools of engines: several for a model, or some that end when unused; each is off until turned on."""
    return []


@hookspec
def load_balancers() -> list[LoadBalancerSpec]:
    """Declare load balancers: which of a server's engines gets a request (``--load-balance-method``)."""
    return []


@hookspec
def kv_transfers() -> list[KVTransferSpec]:
    """Declare transports of K/V between engines (``--disaggregation-transfer-backend``)."""
    return []


@hookspec
def loaders() -> list[LoaderSpec]:
    """Declare readers of checkpoint formats (``--load-format``)."""
    return []


@hookspec
def model_sources() -> list[ModelSourceSpec]:
    """Declare places models come from: folders, hubs, packages; all are asked in order of rank."""
    return []


@hookspec
def dialects() -> list[DialectSpec]:
    """Declare HTTP dialects; those of other packages are mounted once they are named."""
    return []


@hookspec
def observers() -> list[ObserverSpec]:
    """Declare observers: metrics, traces, logs; those of other packages take part once they are named."""
    return []


@hookspec
def operators() -> list[OperatorsSpec]:
    """Declare the small operators of layers: norms, rotary positions, gates (``--operator-backend``)."""
    return []


@hookspec
def moe_runners() -> list[MoERunnerSpec]:
    """Declare mixture-of-experts kernels (``--moe-runner-backend``)."""
    return []


@hookspec
def expert_placers() -> list[ExpertPlacerSpec]:
    """Declare algorithms that spread experts over ranks by their loads (``--eplb-algorithm``)."""
    return []


@hookspec
def multimodal_processors() -> list[MultimodalProcessorSpec]:
    """Declare processors that turn images, audio and video into prompt tokens and tensors."""
    return []


@hookspec
def features() -> list[FeatureSpec]:
    """Declare features: capabilities with parts in server, engine and workers; every one that is not off takes part."""
    return []
