"""What config.json says of a family beyond what all have, by the keys llama.cpp's converter writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fwk.errors import ModelLoadError
from fwk_loaders.gguf import recurrent_families
from fwk_loaders.gguf.metadata import Metadata

Config = dict[str, Any]

_GEMMA2_27B_LAYERS = 46
_GEMMA3_27B_LAYERS = 62
_OLMO3_PATTERN = 4
_BAICHUAN_13B_LAYERS = 40
_MAVERICK_EXPERTS = 128
_LLAMA4_CHUNK = 8192
_SIGMOID = 2
"""Of ``.expert_gating_func``."""


def _kinds(metadata: Metadata, config: Config, pattern: int) -> list[str]:
    """Each ``pattern``-th layer sees everything, unless the file says otherwise."""
    key, count = ".attention.sliding_window_pattern", config["num_hidden_layers"]
    windows = metadata.flags(key, count)
    if windows is None:
        every = metadata.integer(key, pattern, low=1)
        windows = [(layer + 1) % every != 0 for layer in range(count)]
    return ["sliding_attention" if has_window else "full_attention" for has_window in windows]


def _gemma2(metadata: Metadata, config: Config) -> Config:
    is_largest = config["num_hidden_layers"] == _GEMMA2_27B_LAYERS
    scalar = _even_share(config) if is_largest else config["head_dim"]
    return {"query_pre_attn_scalar": scalar, "layer_types": _kinds(metadata, config, 2)}


def _gemma3(metadata: Metadata, config: Config) -> Config:
    """Five layers with a sliding window, then one without; the 27B model scales queries by another size."""
    is_largest = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    return {
        "rope_local_base_freq": metadata.number(".rope.freq_base_swa", 10_000.0),
        "query_pre_attn_scalar": _even_share(config) if is_largest else config["head_dim"],
        "layer_types": _kinds(metadata, config, 6),
    }


def _even_share(config: Config) -> int:
    return config["hidden_size"] // config["num_attention_heads"]


def _olmo2(metadata: Metadata, config: Config) -> Config:
    """OLMo 3 goes by the name of OLMo 2, and has windows: in three layers, then one without."""
    if not config.get("sliding_window"):
        return {}
    kinds, theta = _kinds(metadata, config, _OLMO3_PATTERN), config["rope_theta"]
    ropes = {
        "full_attention": {**(config["rope_scaling"] or {"rope_type": "default"}), "rope_theta": theta},
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }
    names = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    return names | {"layer_types": kinds, "rope_parameters": ropes, "rope_scaling": None}


def _cohere(metadata: Metadata, config: Config) -> Config:
    return {"use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors}


def _cohere2(metadata: Metadata, config: Config) -> Config:
    return {"layer_types": _kinds(metadata, config, 4)}


def _baichuan(metadata: Metadata, config: Config) -> Config:
    """Of 7B: 13B has slopes instead of rotary positions, and nothing in the file says so but its depth."""
    if config["num_hidden_layers"] == _BAICHUAN_13B_LAYERS:
        raise ModelLoadError(
            f"{metadata.file.path}: Baichuan 13B cannot be read from GGUF, 7B can. Use the model's safetensors"
        )
    return {}


def _minicpm(metadata: Metadata, config: Config) -> Config:
    for key in (".embedding_scale", ".residual_scale", ".logit_scale"):
        metadata.number(key)  # older converters left them out, and they differ from model to model
    return {"attention_multiplier": config["head_dim"] ** -0.5}


def _starcoder2(metadata: Metadata, config: Config) -> Config:
    return {"use_bias": config["attention_bias"]}


def _qwen2moe(metadata: Metadata, config: Config) -> Config:
    inner = metadata.integer(".expert_shared_feed_forward_length", low=1)
    return {"qkv_bias": config["attention_bias"], "shared_expert_intermediate_size": inner}


def _gpt_oss(metadata: Metadata, config: Config) -> Config:
    """A window in every second layer, the first one included; angles of YaRN that are not rounded to whole ones."""
    scaling = config["rope_scaling"]
    return {
        "layer_types": _kinds(metadata, config, 2),
        "intermediate_size": config["moe_intermediate_size"],
        "num_local_experts": config["num_experts"],
        "rope_scaling": {**scaling, "truncate": False} if scaling else {"rope_type": "default"},
    }


def _deepseek2(metadata: Metadata, config: Config) -> Config:
    """DeepSeek-V2 and V3, told apart by how experts are scored."""
    rotated = metadata.integer(".rope.dimension_count", low=1)
    found: Config = {
        "kv_lora_rank": metadata.integer(".attention.kv_lora_rank", low=1),
        "q_lora_rank": metadata.integer(".attention.q_lora_rank", 0) or None,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": config["head_dim"] - rotated,
        "v_head_dim": metadata.integer(_mla(metadata, "value_length"), low=1),
        "num_key_value_heads": config["num_attention_heads"],
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": metadata.integer(".expert_shared_count", low=1),
        "routed_scaling_factor": metadata.number(".expert_weights_scale", 1.0),
        "first_k_dense_replace": metadata.integer(".leading_dense_block_count", 0),
        "n_group": metadata.integer(".expert_group_count", 1, low=1),
        "topk_group": metadata.integer(".expert_group_used_count", 1, low=1),
    }
    if metadata.integer(".expert_gating_func", 1) == _SIGMOID:
        names = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "topk_method": "noaux_tc"}
        return found | names | {"norm_topk_prob": metadata.flag(".expert_weights_norm", True)}
    found["topk_method"] = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    found["norm_topk_prob"] = metadata.flag(".expert_weights_norm", False)
    if config["rope_scaling"] and metadata.has(".rope.scaling.yarn_log_multiplier"):
        scale = round(10 * metadata.number(".rope.scaling.yarn_log_multiplier"), 6)
        found["rope_scaling"] = {**config["rope_scaling"], "mscale": scale, "mscale_all_dim": scale}
    return found


def _mla(metadata: Metadata, name: str) -> str:
    """Newer converters say ``key_length`` of what is kept, and ``key_length_mla`` of the heads."""
    key = f".attention.{name}_mla"
    return key if metadata.has(key) else f".attention.{name}"


def latent_head_dim(metadata: Metadata) -> int:
    """Numbers of a query's head, its rotated ones included."""
    return metadata.integer(_mla(metadata, "key_length"), low=1, high=2**16 - 1)


def _phi3(metadata: Metadata, config: Config) -> Config:
    """LongRoPE's two lists of factors are tensors."""
    if "rope_factors_long.weight" not in metadata.file.tensors:
        return {}
    original = metadata.integer(".rope.scaling.original_context_length", low=1)
    scaling: Config = {"rope_type": "longrope", "original_max_position_embeddings": original}
    for name in ("long", "short"):
        info = metadata.file.tensors.get(f"rope_factors_{name}.weight")
        if info is None or info.type.name != "F32" or len(info.shape) != 1:
            raise ModelLoadError(
                f"{metadata.file.path}: tensor 'rope_factors_{name}.weight' must be a list of float32 values"
            )
        stored = np.frombuffer(metadata.file.buffer, "<f4", info.shape[0], info.start)
        scaling[f"{name}_factor"] = [float(x) for x in stored]
    if metadata.has(".rope.scaling.attn_factor"):
        scaling["attention_factor"] = metadata.number(".rope.scaling.attn_factor")
    return {"rope_scaling": scaling, "original_max_position_embeddings": original}


def _gptneox(metadata: Metadata, config: Config) -> Config:
    return {
        "attention_bias": "blk.0.attn_qkv.bias" in metadata.file.tensors,
        "use_parallel_residual": metadata.flag(".use_parallel_residual", True),
        "rotary_pct": config["partial_rotary_factor"],
        "rotary_emb_base": config["rope_theta"],
    }


def _falcon(metadata: Metadata, config: Config) -> Config:
    """With one K/V head or groups of them; of the latter some have one norm for both parts of a layer."""
    heads, num_norms = config["num_key_value_heads"], 1 + ("blk.0.attn_norm_2.weight" in metadata.file.tensors)
    return {
        "bias": "blk.0.attn_qkv.bias" in metadata.file.tensors,
        "ffn_hidden_size": config["intermediate_size"],
        "alibi": False,
        "multi_query": heads == 1,
        "new_decoder_architecture": heads > 1,
        "num_kv_heads": heads,
        "num_ln_in_parallel_attn": num_norms,
    }


def _glm4moe(metadata: Metadata, config: Config) -> Config:
    return {
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": metadata.integer(".expert_shared_count", 1, low=0),
        "routed_scaling_factor": metadata.number(".expert_weights_scale", 1.0),
        "norm_topk_prob": metadata.flag(".expert_weights_norm", True),
        "first_k_dense_replace": metadata.integer(".leading_dense_block_count", 0),
        "n_group": metadata.integer(".expert_group_count", 1, low=1),
        "topk_group": metadata.integer(".expert_group_used_count", 1, low=1),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in metadata.file.tensors,
    }


def _granitemoe(metadata: Metadata, config: Config) -> Config:
    """With shared experts it is Granite 4 without a layer that keeps a state."""
    found = {"num_local_experts": config["num_experts"], **recurrent_families.granite_factors(metadata)}
    shared = metadata.integer(".expert_shared_feed_forward_length", 0)
    if not shared:
        return found
    kinds = ["attention"] * config["num_hidden_layers"]
    return found | {"layer_types": kinds, "shared_intermediate_size": shared, "position_embedding_type": "rope"}


def _llama4(metadata: Metadata, config: Config) -> Config:
    """Norms of queries and keys are not told apart by the file: the model with 128 experts has none."""
    layers = range(config["num_hidden_layers"])
    return {
        "intermediate_size": config["moe_intermediate_size"],
        "intermediate_size_mlp": config["intermediate_size"],
        "num_local_experts": config["num_experts"],
        "moe_layers": [layer for layer in layers if f"blk.{layer}.ffn_gate_inp.weight" in metadata.file.tensors],
        "use_qk_norm": config["num_experts"] != _MAVERICK_EXPERTS,
        "attention_chunk_size": _LLAMA4_CHUNK,
    }


FURTHER: dict[str, Callable[[Metadata, Config], Config]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "olmo2": _olmo2,
    "command-r": _cohere,
    "cohere2": _cohere2,
    "baichuan": _baichuan,
    "minicpm": _minicpm,
    "starcoder2": _starcoder2,
    "qwen2moe": _qwen2moe,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek2,
    "phi3": _phi3,
    "gptneox": _gptneox,
    "falcon": _falcon,
    "glm4moe": _glm4moe,
    "granitemoe": _granitemoe,
    "llama4": _llama4,
    **recurrent_families.FURTHER,
}
"""By ``general.architecture``: fields that are added to the others, or take their place."""

PARTIAL_ROTARY = ("phi3", "chatglm", "glm4", "gptneox", "glm4moe", "qwen3next", "qwen35", "qwen35moe")
"""Architectures that turn a part of each head only."""
