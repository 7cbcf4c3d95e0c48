"""What llama.cpp's converter writes of families whose files differ from the model's in more than names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.mxfp4 import as_numbers
from tests.helpers.quantised import Change, Twins, gguf_like


def _phi3(config: dict[str, Any]) -> dict[str, Any]:
    return {"phi3.rope.dimension_count": 16}


def _glm4(config: dict[str, Any]) -> dict[str, Any]:
    return {"glm4.rope.dimension_count": int(16 * config["rope_parameters"]["partial_rotary_factor"])}


def _qwen2moe(config: dict[str, Any]) -> dict[str, Any]:
    return {"qwen2moe.expert_shared_feed_forward_length": config["shared_expert_intermediate_size"]}


def _gpt_oss(config: dict[str, Any]) -> dict[str, Any]:
    rope = config["rope_parameters"]
    return {
        "gpt-oss.rope.scaling.type": "yarn",
        "gpt-oss.rope.scaling.factor": float(rope["factor"]),
        "gpt-oss.rope.scaling.original_context_length": rope["original_max_position_embeddings"],
    }


def _deepseek2(config: dict[str, Any]) -> dict[str, Any]:
    """As newer converters write it: one head that is kept, of rank and rotated numbers."""
    rotated, is_v3 = config["qk_rope_head_dim"], config["model_type"] == "deepseek_v3"
    found = {
        "attention.key_length": config["kv_lora_rank"] + rotated,
        "attention.value_length": config["kv_lora_rank"],
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotated,
        "attention.value_length_mla": config["v_head_dim"],
        "attention.kv_lora_rank": config["kv_lora_rank"],
        "rope.dimension_count": rotated,
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config.get("norm_topk_prob")),
        "expert_gating_func": 2 if is_v3 else 1,
    }
    if config["q_lora_rank"]:
        found["attention.q_lora_rank"] = config["q_lora_rank"]
    if is_v3:
        found |= {"expert_group_count": config["n_group"], "expert_group_used_count": config["topk_group"]}
    return {f"deepseek2.{key}": value for key, value in found.items()}


def _gptneox(config: dict[str, Any]) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    return {
        "gptneox.use_parallel_residual": config["use_parallel_residual"],
        "gptneox.rope.dimension_count": int(size * config["rope_parameters"].get("partial_rotary_factor", 0.25)),
    }


def _glm4moe(config: dict[str, Any]) -> dict[str, Any]:
    found = {
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": bool(config["norm_topk_prob"]),
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_gating_func": 2,
        "rope.dimension_count": int(config["head_dim"] * config["rope_parameters"]["partial_rotary_factor"]),
    }
    return {f"glm4moe.{key}": value for key, value in found.items()}


MORE = {
    "gptneox": _gptneox,
    "glm4moe": _glm4moe,
    "phi3": _phi3,
    "glm4": _glm4,
    "qwen2moe": _qwen2moe,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
}


def converter(config: Mapping[str, Any]) -> Change:
    """``converted`` for a model."""
    return lambda name, data: converted(name, data, config)


def converted(name: str, data: Any, config: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """What the converter does to tensors of some families, beyond another name."""
    if name.endswith("shared_expert_gate.weight"):
        return [(name, data[0])]
    if name.endswith("e_score_correction_bias"):
        return [(name.replace("_bias", ".bias"), data)]
    if config["model_type"] == "bloom":
        name = name.removeprefix("transformer.")
    if "query_key_value" in name:
        heads = config.get("num_attention_heads") or config["n_head"]
        shared = heads if config["model_type"] != "falcon" else _falcon_kv_heads(config)
        size = config["hidden_size"] // heads
        grouped = data.reshape(shared, heads // shared + 2, size, -1)
        parts = (grouped[:, :-2], grouped[:, -2], grouped[:, -1])
        return [(name, np.concatenate([part.reshape(-1, grouped.shape[-1]) for part in parts]).reshape(data.shape))]
    if config["model_type"] == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return [(name, data.T)]
    if name.endswith("sinks"):
        return [(f"{name}.weight", data)]
    if ".experts.gate_up_proj" in name or name.endswith((".experts.down_proj", ".experts.down_proj_bias")):  # gpt-oss
        kind = "bias" if name.endswith("_bias") else "weight"
        stem, whole = name.removesuffix("_bias"), data if kind == "bias" else data.swapaxes(1, 2)
        if "down" in stem:
            return [(f"{stem}.{kind}", whole)]
        return [(f"{stem.replace('gate_up', part)}.{kind}", whole[:, i::2]) for i, part in enumerate(("gate", "up"))]
    if name.endswith("kv_b_proj.weight"):
        heads = data.reshape(config["num_attention_heads"], -1, data.shape[1])
        k, v = np.split(heads, [config["qk_nope_head_dim"]], 1)
        return [(name.replace("kv_b", "k_b"), k.swapaxes(1, 2)), (name.replace("kv_b", "v_b"), v)]
    return [(name, data)]


def _falcon_kv_heads(config: Mapping[str, Any]) -> int:
    return config["num_kv_heads"] if config["new_decoder_architecture"] else 1


def family_twins(source: Path, folder: Path) -> Twins:
    """A checkpoint of gpt-oss with experts in MXFP4, or of DeepSeek-V2 with experts in Q8_0: a file, and what it holds.

    Attention is in Q8_0, but for what MLA multiplies head by head.
    """
    config = json.loads((source / "config.json").read_text())
    is_oss = config["model_type"] == "gpt_oss"
    tensors = load_file(source / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        tensors[name] = as_numbers(tensors, name)
    plain = folder / "plain"
    plain.mkdir(parents=True)
    for file in source.glob("*.json"):
        (plain / file.name).write_bytes(file.read_bytes())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    save_file(tensors, plain / "model.safetensors")
    path = gguf_like(
        plain,
        folder / "model.gguf",
        "gpt-oss" if is_oss else "deepseek2",
        {},
        interleaves=False,
        more=(_gpt_oss if is_oss else _deepseek2)(config),
        change=converter(config),
        quantises="MXFP4" if is_oss else "Q8_0",  # MXFP4 holds just the numbers it had
        of_attention="Q8_0",
        values=tensors,
    )
    held = {name: torch.as_tensor(np.asarray(x)).contiguous() for name, x in tensors.items()}
    save_file(held, plain / "model.safetensors")
    return Twins("gguf", path, {"quantization": "gguf", "dtype": "float32"}, plain)
