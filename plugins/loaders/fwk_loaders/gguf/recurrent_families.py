"""What config.json says of architectures some of whose layers keep a state.

Which layers are of which kind is read off the tensors: the keys that say it differ from release to release.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fwk.errors import ModelLoadError
from fwk_loaders.gguf.metadata import Metadata

Config = dict[str, Any]


def _has(metadata: Metadata, name: str) -> bool:
    """Whether a layer has this tensor."""
    return any(stored.startswith("blk.") and stored.split(".", 2)[2] == name for stored in metadata.file.tensors)


def _layers_with(metadata: Metadata, config: Config, name: str) -> list[bool]:
    return [f"blk.{layer}.{name}" in metadata.file.tensors for layer in range(config["num_hidden_layers"])]


def _inner_size(metadata: Metadata) -> int:
    return metadata.integer(".ssm.inner_size", low=1)


def _mamba(metadata: Metadata, config: Config) -> Config:
    is_falcon = metadata.flag(".ssm.dt_b_c_rms", False)
    names = {"architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba"} if is_falcon else {}
    return names | {
        "intermediate_size": _inner_size(metadata),
        "state_size": metadata.integer(".ssm.state_size", low=1),
        "time_step_rank": metadata.integer(".ssm.time_step_rank", low=1),
        "conv_kernel": metadata.integer(".ssm.conv_kernel", low=2),
        "layer_norm_epsilon": config["rms_norm_eps"],
        "use_bias": _has(metadata, "ssm_in.bias"),
        "use_conv_bias": _has(metadata, "ssm_conv1d.bias"),
    }


def _second(metadata: Metadata, names: Mapping[str, str]) -> Config:
    """Mamba-2's sizes, by the names a family has for heads, head_size, groups, state and width."""
    heads = metadata.integer(".ssm.time_step_rank", low=1)
    size, rest = divmod(_inner_size(metadata), heads)
    if rest:
        raise metadata.wrong(".ssm.inner_size", f"a multiple of the {heads} heads of .ssm.time_step_rank", "this")
    found = {
        "heads": heads,
        "head_size": size,
        "groups": metadata.integer(".ssm.group_count", low=1),
        "state": metadata.integer(".ssm.state_size", low=1),
        "width": metadata.integer(".ssm.conv_kernel", low=2),
    }
    return {name: found[what] for what, name in names.items()}


def _mamba2(metadata: Metadata, config: Config) -> Config:
    names = {
        "heads": "num_heads",
        "head_size": "head_dim",
        "groups": "n_groups",
        "state": "state_size",
        "width": "conv_kernel",
    }
    return _second(metadata, names) | {
        "layer_norm_epsilon": config["rms_norm_eps"],
        "use_bias": _has(metadata, "ssm_in.bias"),
        "use_conv_bias": _has(metadata, "ssm_conv1d.bias"),
    }


def _nemotron_h(metadata: Metadata, config: Config) -> Config:
    attends, maps = (_layers_with(metadata, config, name) for name in ("attn_q.weight", "ffn_up.weight"))
    kinds = ["full_attention" if a else "mlp" if m else "linear_attention" for a, m in zip(attends, maps, strict=True)]
    names = {
        "heads": "mamba_num_heads",
        "head_size": "mamba_head_dim",
        "groups": "n_groups",
        "state": "ssm_state_size",
        "width": "conv_kernel",
    }
    return _second(metadata, names) | {
        "layers_block_type": kinds,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "use_bias": _has(metadata, "ssm_in.bias"),
        "use_conv_bias": _has(metadata, "ssm_conv1d.bias"),
        "mlp_bias": _has(metadata, "ffn_up.bias"),
    }


def _granite_hybrid(metadata: Metadata, config: Config) -> Config:
    attends = _layers_with(metadata, config, "attn_q.weight")
    names = {"heads": "mamba_n_heads", "groups": "mamba_n_groups", "state": "mamba_d_state", "width": "mamba_d_conv"}
    shared = metadata.file.tensors.get("blk.0.ffn_up_shexp.weight") or metadata.file.tensors.get("blk.0.ffn_up.weight")
    if shared is None:
        raise ModelLoadError(
            f"{metadata.file.path}: tensors 'blk.0.ffn_up.weight' and 'blk.0.ffn_up_shexp.weight' are missing; the "
            "file is no whole model"
        )
    return _second(metadata, names) | {
        "layer_types": ["attention" if attending else "mamba" for attending in attends],
        "mamba_expand": _expansion(metadata, config),
        "mamba_proj_bias": _has(metadata, "ssm_in.bias"),
        "mamba_conv_bias": _has(metadata, "ssm_conv1d.bias"),
        "attention_bias": _has(metadata, "attn_q.bias"),
        "shared_intermediate_size": shared.shape[0],
        "num_local_experts": config.get("num_experts", 0),
        "position_embedding_type": "rope" if metadata.flag(".rope.scaling.finetuned", False) else "nope",
        **granite_factors(metadata),
    }


def granite_factors(metadata: Metadata) -> Config:
    """What Granite's parts are multiplied with; a factor of one is left out of the file."""
    keys = {
        "embedding_multiplier": ".embedding_scale",
        "residual_multiplier": ".residual_scale",
        "logits_scaling": ".logit_scale",
        "attention_multiplier": ".attention.scale",
    }
    return {name: metadata.number(key) for name, key in keys.items() if metadata.has(key)}


def _jamba(metadata: Metadata, config: Config) -> Config:
    attending = _layers_with(metadata, config, "attn_q.weight")
    routed = _layers_with(metadata, config, "ffn_gate_inp.weight")
    found: Config = {
        "mamba_expand": _expansion(metadata, config),
        "mamba_d_state": metadata.integer(".ssm.state_size", low=1),
        "mamba_d_conv": metadata.integer(".ssm.conv_kernel", low=2),
        "mamba_dt_rank": metadata.integer(".ssm.time_step_rank", low=1),
        "mamba_proj_bias": _has(metadata, "ssm_in.bias"),
        "mamba_conv_bias": _has(metadata, "ssm_conv1d.bias"),
    }
    for kind, layers in (("attn", attending), ("expert", routed)):
        period, offset = _rhythm(layers)
        if layers != [layer % period == offset for layer in range(len(layers))] and any(layers):
            which = [layer for layer, is_one in enumerate(layers) if is_one]
            raise ModelLoadError(f"{metadata.file.path}: {kind} layers {which} do not follow each other evenly")
        found |= {f"{kind}_layer_period": period, f"{kind}_layer_offset": offset}
    return found | ({} if any(routed) else {"num_experts": 1})


def _rhythm(layers: list[bool]) -> tuple[int, int]:
    """(period, offset) of the layers that are marked; where there are none, of one behind the last."""
    which = [layer for layer, is_one in enumerate(layers) if is_one]
    if len(which) > 1:
        return which[1] - which[0], which[0]
    return len(layers) + 1, which[0] if which else len(layers)


def _expansion(metadata: Metadata, config: Config) -> int:
    found, rest = divmod(_inner_size(metadata), config["hidden_size"])
    if rest:
        raise metadata.wrong(".ssm.inner_size", f"a multiple of .embedding_length, {config['hidden_size']}", "this")
    return found


def _lfm2(metadata: Metadata, config: Config) -> Config:
    attends = _layers_with(metadata, config, "attn_q.weight")
    return {
        "layer_types": ["full_attention" if attending else "conv" for attending in attends],
        "conv_L_cache": metadata.integer(".shortconv.l_cache", low=2),
        "conv_bias": _has(metadata, "shortconv.conv.bias"),
    }


def _qwen3_next(metadata: Metadata, config: Config) -> Config:
    recurrent = _layers_with(metadata, config, "ssm_conv1d.weight")
    heads = metadata.integer(".ssm.time_step_rank", low=1)
    keys = metadata.integer(".ssm.group_count", low=1)
    size, rest = divmod(_inner_size(metadata), heads)
    if rest or heads % keys:
        raise metadata.wrong(".ssm.time_step_rank", f"a multiple of {keys} that divides .ssm.inner_size", heads)
    found: Config = {
        "layer_types": ["linear_attention" if is_linear else "full_attention" for is_linear in recurrent],
        "linear_conv_kernel_dim": metadata.integer(".ssm.conv_kernel", low=2),
        "linear_key_head_dim": metadata.integer(".ssm.state_size", low=1),
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_value_head_dim": size,
        "attention_bias": _has(metadata, "attn_q.bias"),
    }
    if "num_experts" in config:
        shared = metadata.integer(".expert_shared_feed_forward_length", low=1)
        found["shared_expert_intermediate_size"] = shared
    return found


FURTHER: dict[str, Callable[[Metadata, Config], Config]] = {
    "mamba": _mamba,
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "qwen3next": _qwen3_next,
    "qwen35": _qwen3_next,
    "qwen35moe": _qwen3_next,
}
"""As ``families.FURTHER``."""
