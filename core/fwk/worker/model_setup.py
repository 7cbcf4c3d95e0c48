"""Settle device, precision and plugins, before any weight is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fwk.config import Config, EngineOptions
from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.attention import AttentionLayer, KVKind
from fwk.interfaces.declaration import Facts, Host
from fwk.native import cpu_flags
from fwk.plugins import FAMILIES, PluginSet, Registered, Settlement, negotiate
from fwk.plugins.families import ORDER
from fwk.plugins.selection import AUTO, check_used
from fwk.worker.opened_model import OpenedModel


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """An opened model on a settled device, in a settled precision, with settled plugins.

    ``reasons`` has a sentence for each way in which the run is not what ``auto`` would have liked best.
    """

    opened: OpenedModel
    settlement: Settlement
    reasons: tuple[str, ...]

    @property
    def facts(self) -> Facts:
        return self.settlement.facts

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
    """Choose device, dtype and the engine's plugins.

    Raises ``PluginError`` when no set of plugins agrees, ``ConfigError`` for options of one that was not chosen.
    """
    engine = config.engine
    host = detect_host(engine.device)
    reasons: list[str] = []
    dtype = config.model.dtype
    if dtype == "auto":
        stored = opened.config.torch_dtype
        dtype, why = _auto_dtype(stored, host)
        if why:
            reasons.append(why)
    if opened.task == "embed":
        _check_embeds(engine, opened.name)
        if opened.pooling is None:
            reasons.append("embeddings are the mean of the hidden states, not normalised: there is no modules.json")
    layouts = opened.checkpoint.weights().layouts("")
    _check_readable(engine, opened, plugins, layouts)
    facts = Facts(
        host=host,
        dtype=dtype,
        kv_dtype=engine.kv_cache_dtype,
        block_size=engine.page_size,
        architecture=opened.config.architecture,
        tp_size=engine.tensor_parallel_size,
        task=opened.task,
        layouts=layouts,
        model=opened.config,
        chosen={"quant": tuple(text.rpartition("=")[2] for text in engine.quantization_layers)},
    )
    settlement = negotiate(plugins, wanted(config, opened), facts, config.plugin_options)
    one_each = {family: name for family, name in settlement.chosen.items() if family != "quant"}  # that is by layer
    check_used(plugins, config.plugin_options, one_each | {"loaders": opened.loader})
    return ModelSetup(opened, settlement, (*reasons, *settlement.reasons()))


def _check_readable(options: EngineOptions, opened: OpenedModel, plugins: PluginSet, layouts: tuple[str, ...]) -> None:
    """Refuse weights that ``auto`` finds no quantizer for: they are stored in a way nobody here knows."""
    known = {layout for item in plugins.family("quant") for layout in getattr(item.declaration, "exact", ())}
    if options.quantization == AUTO and plugins.family("quant") and not known & set(layouts):
        raise ModelLoadError(
            f"{opened.name}: the weights are stored as {' and '.join(layouts)}, which no installed quantizer reads; "
            "convert the checkpoint, or install a plugin that declares the layout"
        )


def wanted(config: Config, opened: OpenedModel) -> dict[str, str]:
    """What was asked for of each family that an engine for the model uses: a plugin's name, or ``auto``."""
    found: dict[str, str] = {}
    for family in ORDER:
        option, switch = FAMILIES[family].option or "", FAMILIES[family].switch
        if switch is None or getattr(config.engine, switch):
            found[family] = getattr(config.engine, option, None) or getattr(config.model, option)
    if found["speculative"] == "none":
        del found["speculative"]
    if opened.task == "embed":  # it computes every prompt whole, and leaves nothing behind to be found
        found["cache"] = "none"
    return found


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
