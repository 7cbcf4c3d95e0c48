"""What llama.cpp's converter writes of families that it cuts, joins or computes anew: metadata and tensors.

Written with numpy and the gguf package's tables of names, after the converter; it shares no code with the reader.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from tests.helpers.lazy import lazy
from tests.helpers.quantised import Array, write_tokens

gguf = lazy("gguf")

Config = Mapping[str, Any]
Written = list[tuple[str, Array]]
"""Names as the gguf package's table knows them, or finished ones that begin with ``blk.``."""


def written(
    source: Path,
    path: Path,
    architecture: str,
    *,
    quantises: str = "",
    more: Mapping[str, Any] | None = None,
    extras: Mapping[str, Array] | None = None,
) -> Path:
    """A checkpoint as a GGUF file in float32.

    quantises: the type of matrices whose rows are whole blocks of it. more: metadata instead of the converter's.
    extras: further tensors, by their names in the file.
    """
    config = json.loads((source / "config.json").read_text())
    keys, change = FAMILIES[architecture]
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**_common(config), **keys(config), **(more or {})}.items():
        full = f"{architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(full, value)
        else:
            {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)](full, value)
    write_tokens(writer, config["vocab_size"])
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, len(_kinds(config)) or config["num_hidden_layers"])
    experts: dict[str, list[Array]] = {}
    for given, x in sorted(load_file(source / "model.safetensors").items(), key=lambda item: _sorted(item[0])):
        for name, data in change(given, x.float().numpy(), config):
            before, found, after = name.partition(".experts.")
            if found and after.split(".")[0].isdigit():
                experts.setdefault(f"{before}.experts.{after.partition('.')[2]}", []).append(data)
                continue
            _add(writer, _stored(names, name), data, quantises)
    for name, parts in experts.items():
        _add(writer, _stored(names, name.replace("feed_forward", "mlp")), np.stack(parts), quantises)
    for name, data in (extras or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _sorted(name: str) -> list[Any]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def _stored(names: gguf.TensorNameMap, name: str) -> str:
    if name.startswith("blk."):
        return name
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return stored


def _add(writer: gguf.GGUFWriter, stored: str, data: Array, quantises: str) -> None:
    data = np.ascontiguousarray(data)
    if quantises and data.ndim > 1 and data.shape[-1] % 32 == 0 and "ssm_conv" not in stored:
        kind = gguf.GGMLQuantizationType[quantises]
        writer.add_tensor(stored, gguf.quants.quantize(data, kind), raw_dtype=kind)
    else:
        writer.add_tensor(stored, data)


def _common(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    found = {
        "block_count": len(_kinds(config)) or config["num_hidden_layers"],
        "context_length": config.get("max_position_embeddings") or 2**20,
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config.get("intermediate_size") or 0,
        "attention.layer_norm_rms_epsilon": _epsilon(config),
        "attention.head_count": config.get("num_attention_heads") or 0,
        "rope.freq_base": float(rope.get("rope_theta", 10000.0)),
    }
    if config.get("num_key_value_heads"):
        found["attention.head_count_kv"] = config["num_key_value_heads"]
    if config.get("head_dim"):
        found |= {f"attention.{name}_length": config["head_dim"] for name in ("key", "value")}
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        found |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    return found


def _epsilon(config: Config) -> float:
    names = ("layer_norm_epsilon", "rms_norm_eps", "norm_eps", "layernorm_epsilon")
    return float(next(config[name] for name in names if config.get(name) is not None))


def _kinds(config: Config) -> list[str]:
    return list(config.get("layers_block_type") or config.get("layer_types") or [])


def _heads_of_layers(config: Config) -> list[int]:
    full = ("attention", "full_attention")
    return [config["num_key_value_heads"] if kind in full else 0 for kind in _kinds(config)]


def _plain(name: str, data: Array, config: Config) -> Written:
    return [(name, data)]


def _interleaved(name: str, data: Array, config: Config) -> Array:
    """The halves of Q's and K's heads take turns."""
    if not name.endswith(("q_proj.weight", "k_proj.weight")):
        return data
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    return data.reshape(heads, 2, data.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(data.shape)


def _state_space(name: str, data: Array, config: Config) -> Written:
    if name.endswith("A_log"):
        return [(name, -np.exp(data))]
    return [(name, data.squeeze() if name.endswith("conv1d.weight") else data)]


def _second(name: str, data: Array, config: Config, groups: int) -> Written:
    """Of Mamba-2: A and D have a dimension more, the norm is by group."""
    if name.endswith(".dt_bias"):
        return [(f"{name.removesuffix('.dt_bias')}.dt_proj.bias", data)]
    if name.endswith((".mixer.norm.weight", ".mamba.norm.weight")):
        return [(name, data.reshape(groups, -1))]
    [(name, data)] = _state_space(name, data, config)
    return [(name, data.reshape(-1, 1) if name.endswith((".A_log", ".D")) else data)]


def _mamba(config: Config) -> dict[str, Any]:
    rank = config["time_step_rank"]
    return {
        "attention.head_count": 0,
        "feed_forward_length": 0,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["intermediate_size"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": -(-config["hidden_size"] // 16) if rank == "auto" else rank,
        "ssm.dt_b_c_rms": config["model_type"] == "falcon_mamba",
    }


def _mamba2(config: Config) -> dict[str, Any]:
    inner = config["expand"] * config["hidden_size"]
    return {
        "attention.head_count": 0,
        "feed_forward_length": 0,
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": inner,
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": inner // config["head_dim"],
        "ssm.group_count": config["n_groups"],
    }


def _jamba(config: Config) -> dict[str, Any]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers, heads = range(config["num_hidden_layers"]), config["num_key_value_heads"]
    return {
        "attention.head_count_kv": [heads if i >= offset and (i - offset) % period == 0 else 0 for i in layers],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.time_step_rank": config["mamba_dt_rank"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }


def _jamba_tensor(name: str, data: Array, config: Config) -> Written:
    parts = ("gate_proj", "up_proj")
    if ".experts.gate_up_proj" in name:
        halves = np.split(data, 2, axis=1)
        before = name.partition(".experts.")[0].replace("feed_forward", "mlp")
        return [(f"{before}.experts.{part}.weight", half) for part, half in zip(parts, halves, strict=True)]
    if name.endswith(".experts.down_proj"):
        return [(f"{name.replace('feed_forward', 'mlp')}.weight", data)]
    return _state_space(name, data, config)


def _lfm2(config: Config) -> dict[str, Any]:
    inner = config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        inner = int(config["block_ffn_dim_multiplier"] * int(2 * inner / 3))
        inner = -(-inner // config["block_multiple_of"]) * config["block_multiple_of"]
    return {
        "attention.head_count_kv": _heads_of_layers(config),
        "feed_forward_length": inner,
        "shortconv.l_cache": config["conv_L_cache"],
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
    }


def _lfm2_tensor(name: str, data: Array, config: Config) -> Written:
    return [(name, data.squeeze(1) if name.endswith("conv.conv.weight") else data)]


def _qwen3_next(config: Config) -> dict[str, Any]:
    values, size = config["linear_num_value_heads"], config["linear_value_head_dim"]
    found = {
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": values,
        "ssm.inner_size": values * size,
        "full_attention_interval": 2,
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
    }
    if config.get("shared_expert_intermediate_size"):
        found["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
        found["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return found


def _qwen3_next_tensor(name: str, data: Array, config: Config) -> Written:
    if name.endswith("in_proj_qkvz.weight"):
        keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
        of_values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
        heads = data.reshape(keys, -1, data.shape[1])
        parts = np.split(heads, np.cumsum([size, size, of_values]), axis=1)
        *qkv, z = (part.reshape(-1, data.shape[1]) for part in parts)
        layer = name.split(".layers.")[1].split(".")[0]
        return [(f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv)), (f"blk.{layer}.attn_gate.weight", z)]
    if name.endswith(".dt_bias"):
        return [(f"{name.removesuffix('.dt_bias')}.dt_proj.bias", data)]
    if ".experts.gate_up_proj" in name:
        before = name.removesuffix(".gate_up_proj")
        halves = np.split(data, 2, axis=1)
        return [(f"{before}.{part}_proj.weight", half) for part, half in zip(("gate", "up"), halves, strict=True)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", data)]
    if name.endswith("shared_expert_gate.weight"):
        return [(name, data.reshape(-1))]
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return [(name, data + 1)]
    return _state_space(name, data, config)


def _in_turns(data: Array, config: Config, size: int, axis: int) -> Array:
    """Value heads, one of each key head after another."""
    keys = config["linear_num_key_heads"]
    whole = np.moveaxis(data, axis, 0)
    heads = whole.reshape(keys, -1, size, *whole.shape[1:]).swapaxes(0, 1)
    return np.moveaxis(heads.reshape(whole.shape), 0, axis)


def _qwen3_5_tensor(name: str, data: Array, config: Config) -> Written:
    size, before = (
        config["linear_value_head_dim"],
        2 * config["linear_num_key_heads"] * config["linear_key_head_dim"],
    )
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        data = np.concatenate((data[:before], _in_turns(data[before:], config, size, 0)))
    elif name.endswith("in_proj_z.weight"):
        data = _in_turns(data, config, size, 0)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        data = _in_turns(data, config, 1, 0)
    elif name.endswith("linear_attn.out_proj.weight"):
        data = _in_turns(data, config, size, 1)
    return _qwen3_next_tensor(name, data, config)


def _granite(config: Config) -> dict[str, Any]:
    found = {
        "attention.scale": float(config["attention_multiplier"]),
        "embedding_scale": float(config["embedding_multiplier"]),
        "residual_scale": float(config["residual_multiplier"]),
        "logit_scale": float(config["logits_scaling"]),
    }
    shared = config.get("shared_intermediate_size")
    return found | ({"expert_shared_feed_forward_length": shared} if shared else {})


def _granite_tensor(name: str, data: Array, config: Config) -> Written:
    if name.endswith("input_linear.weight"):
        layer, has_experts = name.split(".layers.")[1].split(".")[0], bool(config.get("num_local_experts"))
        kind = "_exps" if "block_sparse" in name else "_shexp" if has_experts else ""
        halves = np.split(data, 2, axis=-2)
        return [
            (f"blk.{layer}.ffn_{part}{kind}.weight", half) for part, half in zip(("gate", "up"), halves, strict=True)
        ]
    if name.endswith("shared_mlp.output_linear.weight") and not config.get("num_local_experts"):
        return [(f"blk.{name.split('.layers.')[1].split('.')[0]}.ffn_down.weight", data)]
    return [(name, _interleaved(name, data, config))]


def _granite_hybrid(config: Config) -> dict[str, Any]:
    return _granite(config) | {
        "attention.head_count_kv": _heads_of_layers(config),
        "context_length": 2**20,
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
    }


def _granite_hybrid_tensor(name: str, data: Array, config: Config) -> Written:
    if ".mamba." in name:
        return _second(name, data, config, config["mamba_n_groups"])
    return _granite_tensor(name, data, config)


def _nemotron_h(config: Config) -> dict[str, Any]:
    kinds, inner = _kinds(config), config["intermediate_size"]
    return {
        "attention.head_count_kv": _heads_of_layers(config),
        "feed_forward_length": [inner if kind == "mlp" else 0 for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
    }


def _nemotron_h_tensor(name: str, data: Array, config: Config) -> Written:
    [(name, data)] = _second(name, data, config, config["n_groups"])
    return [(name.replace("model.", "backbone.", 1), _interleaved(name, data, config))]


def _chatglm(config: Config) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    return {"rope.dimension_count": size // 2}


def _llama4(config: Config) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _llama4_tensor(name: str, data: Array, config: Config) -> Written:
    if name.endswith("experts.gate_up_proj"):
        before = name.removesuffix(".gate_up_proj")
        halves = np.split(data.swapaxes(1, 2), 2, axis=1)
        return [(f"{before}.{part}_proj.weight", half) for part, half in zip(("gate", "up"), halves, strict=True)]
    if name.endswith("experts.down_proj"):
        return [(f"{name}.weight", data.swapaxes(1, 2))]
    return [(name, data)]


FAMILIES: dict[str, tuple[Callable[[Config], dict[str, Any]], Callable[[str, Array, Config], Written]]] = {
    "mamba": (_mamba, _state_space),
    "mamba2": (_mamba2, lambda name, data, config: _second(name, data, config, config["n_groups"])),
    "jamba": (_jamba, _jamba_tensor),
    "lfm2": (_lfm2, _lfm2_tensor),
    "qwen3next": (_qwen3_next, _qwen3_next_tensor),
    "qwen35": (_qwen3_next, _qwen3_5_tensor),
    "qwen35moe": (_qwen3_next, _qwen3_5_tensor),
    "granitemoe": (_granite, _granite_tensor),
    "granitehybrid": (_granite_hybrid, _granite_hybrid_tensor),
    "nemotron_h": (_nemotron_h, _nemotron_h_tensor),
    "chatglm": (_chatglm, _plain),
    "llama4": (_llama4, _llama4_tensor),
}
"""By ``general.architecture``: further metadata, and what becomes of a tensor."""
