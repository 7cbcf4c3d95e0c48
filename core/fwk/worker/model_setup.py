"""Settle device and precision, the facts on which kernels are chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fwk.config import Config, EngineOptions
from fwk.errors import ConfigError, PluginError
from fwk.interfaces.attention import AttentionLayer, KVKind
from fwk.interfaces.declaration import Facts, Host
from fwk.interfaces.model import ModelSpec
from fwk.interfaces.speculative import SpeculativeDecoderSpec
from fwk.native import cpu_flags
from fwk.plugins import PluginSet, Registered, choose
from fwk.plugins.selection import plugin_options
from fwk.types import ModelConfig
from fwk.worker.opened_model import OpenedModel


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """An opened model on a settled device in a settled precision."""

    opened: OpenedModel
    facts: Facts
    reasons: tuple[str, ...]

    @property
    def max_model_len(self) -> int:
        return self.opened.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.opened.eos_token_ids


def detect_host(device: str) -> Host:
    """The machine as plugins may need to know it. Imports torch."""
    import torch  # noqa: PLC0415 - a light command must not pay for it

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("--device cuda: this machine has no usable GPU (torch.cuda.is_available() is false)")
    if device == "cpu" or not has_gpu:
        return Host("cpu", None, cpu_flags())
    return Host("cuda", torch.cuda.get_device_capability(), cpu_flags())


def settle(config: Config, opened: OpenedModel, plugins: PluginSet) -> ModelSetup:
    """Choose device and dtype. Reasons say where ``auto`` departed from the checkpoint."""
    host = detect_host(config.engine.device)
    reasons: list[str] = []
    dtype = config.model.dtype
    if dtype == "auto":
        stored = opened.config.torch_dtype
        dtype, why = _auto_dtype(stored, host)
        if why:
            reasons.append(why)
    facts = Facts(
        host=host,
        dtype=dtype,
        kv_dtype=config.engine.kv_cache_dtype,
        block_size=config.engine.page_size,
        architecture=opened.config.architecture,
        tp_size=config.engine.tensor_parallel_size,
    )
    if opened.task == "embed":
        _check_embeds(config.engine, opened.name)
        if opened.pooling is None:
            reasons.append("embeddings are the mean of the hidden states, not normalised: there is no modules.json")
    try:
        model = choose(plugins, "models", config.model.model_impl, facts).chosen
    except PluginError:  # reported when the worker chooses
        model = None
    if model is not None:
        facts = model_facts(facts, opened.config, model)
    return ModelSetup(opened, replace(facts, features=facts.features | _drafting(config, plugins)), tuple(reasons))


def _check_embeds(options: EngineOptions, name: str) -> None:
    """Refuse what an encoder could only ignore: it writes no text and keeps no K/V."""
    for option, idle, why in (
        ("speculative_algorithm", ("none",), "there is nothing to draft"),
        ("enable_lora", (False,), "and adapters are for models of text"),
        ("kv_cache_dtype", ("auto",), "which keeps no K/V"),
        ("prefix_cache", ("auto", "none"), "which keeps no K/V"),
        ("cache_tiers", ((),), "which keeps no K/V"),
    ):
        value = getattr(options, option)
        if value not in idle:
            shown = "" if value is True else f" {' '.join(value) if isinstance(value, tuple) else value}"
            raise ConfigError(f"--{option.replace('_', '-')}{shown}: {name} makes embeddings, {why}")


def model_facts(facts: Facts, config: ModelConfig, model: Registered) -> Facts:
    """``facts`` with what a model and its implementation decide of them."""
    assert isinstance(model.declaration, ModelSpec)
    needs = model.declaration.attention_needs(config)
    return replace(
        facts,
        head_size=needs.head_size,
        num_heads=config.num_heads,
        num_kv_heads=needs.num_kv_heads,
        architecture=config.architecture,
        features=needs.features,
    )


def check_layers(layers: Sequence[AttentionLayer], attention: Registered, facts: Facts) -> None:
    """Hold the layers that were built against the backend that was chosen by what the configuration promised.

    Raises ``ConfigError`` for the first that is beyond it.
    """
    for layer in layers:
        asked = {
            "sliding_window": layer.sliding_window is not None,
            "soft_cap": layer.soft_cap is not None,
            "latent": layer.kind is KVKind.LATENT,
        }
        needed = facts.features | {name for name, is_asked in asked.items() if is_asked}
        refusal = attention.declaration.refusal(replace(facts, head_size=layer.head_size, features=needed))
        if refusal is not None:
            raise ConfigError(
                f"attention backend {attention.name!r} cannot serve layer {layer.index} of this model: it {refusal}"
            )


def _drafting(config: Config, plugins: PluginSet) -> frozenset[str]:
    """What the speculative decoder asks of the attention backend; an unknown one is reported when it is chosen."""
    decoder = plugins.by_family.get("speculative", {}).get(config.engine.speculative_algorithm)
    if decoder is None:
        return frozenset()
    assert isinstance(decoder.declaration, SpeculativeDecoderSpec)
    return decoder.declaration.required_features(plugin_options(decoder, config.plugin_options))


def _auto_dtype(stored: str, host: Host) -> tuple[str, str | None]:
    if stored not in ("float32", "bfloat16", "float16"):
        stored = "bfloat16"
    if host.device != "cpu" or stored == "float32":
        return stored, None
    if host.cpu_flags & {"avx512_bf16", "amx_bf16", "bf16"}:
        why = (
            None
            if stored == "bfloat16"
            else "dtype bfloat16 instead of the checkpoint's float16: CPUs compute it faster"
        )
        return "bfloat16", why
    return "float32", f"dtype float32 instead of the checkpoint's {stored}: this CPU has no bfloat16 instructions"
