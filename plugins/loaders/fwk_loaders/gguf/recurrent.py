"""Architectures some of whose layers keep a state.

The converter stores A = -exp(A_log), drops the convolution's middle dimension, and splits or reorders what Qwen joins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fwk_loaders.gguf.architecture import EXPERT_PARTS, LAYER_NAMES, Architecture, Conversion

_DECAY = Conversion(values=lambda a: (-a).log())
_NORM = Conversion(values=lambda weight: weight.flatten())


def _state_space(prefix: str, *, is_second: bool) -> dict[str, str]:
    """Mamba's modules below ``prefix``; the second generation has a norm instead of ``x_proj`` and ``dt_proj``."""
    found = {"in_proj": "ssm_in", "conv1d": "ssm_conv1d", "out_proj": "ssm_out"}
    found |= {"norm": "ssm_norm"} if is_second else {"x_proj": "ssm_x", "dt_proj": "ssm_dt"}
    return {f"{prefix}.{name}": short for name, short in found.items()}


def _factors(prefix: str, *, is_second: bool) -> dict[str, str]:
    found = {"A_log": "ssm_a", "D": "ssm_d"} | ({"dt_bias": "ssm_dt.bias"} if is_second else {})
    return {f"{prefix}.{name}": short for name, short in found.items()}


_BACKBONE = {"backbone.embeddings": "token_embd", "backbone.norm_f": "output_norm", "lm_head": "output"}
_ATTENTION = {name: short for name, short in LAYER_NAMES.items() if name.startswith("self_attn")}
_SHARED_EXPERT = {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in EXPERT_PARTS}


def _by_key_head(config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """Qwen3-Next's ``in_proj_qkvz``: q, k, v and z of each key head; stored are all of each."""
    keys, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] // keys * config["linear_value_head_dim"]
    starts = np.cumsum([0, *(keys * each for each in (size, size, values))])
    parts = [
        start + np.arange(keys * each).reshape(keys, each)
        for start, each in zip(starts, (size, size, values, values), strict=True)
    ]
    return np.concatenate(parts, 1).reshape(-1)


def _value_heads(config: Mapping[str, Any], size: int, before: int = 0) -> np.ndarray[Any, Any]:
    """Value heads by key head, as stored in turns; of ``size`` rows each, behind ``before`` others."""
    keys = config["linear_num_key_heads"]
    ratio = config["linear_num_value_heads"] // keys
    turns = np.arange(keys * ratio * size).reshape(ratio, keys, size).swapaxes(0, 1).reshape(-1)
    return np.concatenate((np.arange(before), before + turns))


def _whole_heads(config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    return _value_heads(config, config["linear_value_head_dim"])


def _behind_keys(config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    before = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    return _value_heads(config, config["linear_value_head_dim"], before)


def _numbers_of_heads(config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    return _value_heads(config, 1)


_QWEN3_NEXT = Architecture(
    "Qwen3NextForCausalLM",
    "qwen3_next",
    norm_offset=1.0,
    layer_names={
        **{name: short for name, short in LAYER_NAMES.items() if name != "post_attention_layernorm"},
        "post_attention_layernorm": "post_attention_norm",
        "linear_attn.in_proj_ba": "ssm_ba",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        "mlp.gate": "ffn_gate_inp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        **_SHARED_EXPERT,
    },
    config={"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    has_experts=True,
    whole_names={"linear_attn.A_log": "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"},
    conversions={
        "linear_attn.in_proj_qkvz": Conversion(("attn_qkv", "attn_gate"), rows=_by_key_head),
        "linear_attn.A_log": _DECAY,
        "linear_attn.norm": Conversion(),
    },
    is_recurrent=True,
    predictor="mtp",
)
_QWEN3_5_MOE = replace(
    _QWEN3_NEXT,
    model_class="Qwen3_5MoeForCausalLM",
    model_type="qwen3_5_moe_text",
    layer_names={
        **{name: short for name, short in _QWEN3_NEXT.layer_names.items() if not name.endswith("in_proj_ba")},
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
    },
    conversions={
        "linear_attn.in_proj_qkv": Conversion(rows=_behind_keys),
        "linear_attn.in_proj_z": Conversion(rows=_whole_heads),
        **{f"linear_attn.in_proj_{name}": Conversion(rows=_numbers_of_heads) for name in "ab"},
        "linear_attn.conv1d": Conversion(rows=_behind_keys),
        "linear_attn.out_proj": Conversion(columns=_whole_heads),
        "linear_attn.A_log": replace(_DECAY, rows=_numbers_of_heads),
        "linear_attn.dt_bias": Conversion(rows=_numbers_of_heads),
        "linear_attn.norm": Conversion(),
    },
)
_QWEN3_5 = replace(
    _QWEN3_5_MOE, model_class="Qwen3_5ForCausalLM", model_type="qwen3_5_text", config={}, has_experts=False
)

_GRANITE_HYBRID = Architecture(
    "GraniteMoeHybridForCausalLM",
    "granitemoehybrid",
    interleaves_qk=True,
    layer_names={
        **_ATTENTION,
        **_state_space("mamba", is_second=True),
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "shared_mlp.output_linear": "ffn_down",
    },
    whole_names=_factors("mamba", is_second=True),
    conversions={
        "mamba.A_log": _DECAY,
        "mamba.norm": _NORM,
        "shared_mlp.input_linear": Conversion(("ffn_gate", "ffn_up")),
    },
    is_recurrent=True,
)
GRANITE_HYBRID_EXPERTS = replace(
    _GRANITE_HYBRID,
    layer_names={
        **_GRANITE_HYBRID.layer_names,
        "shared_mlp.output_linear": "ffn_down_shexp",
        "block_sparse_moe.router.layer": "ffn_gate_inp",
    },
    conversions={
        **_GRANITE_HYBRID.conversions,
        "shared_mlp.input_linear": Conversion(("ffn_gate_shexp", "ffn_up_shexp")),
    },
    has_experts=True,
    experts=("block_sparse_moe", "gate_proj", "up_proj", "down_proj"),
)
"""``granitehybrid`` with experts."""

ARCHITECTURES: dict[str, Architecture] = {
    "mamba": Architecture(
        "MambaForCausalLM",
        "mamba",
        layers="backbone.layers",
        layer_names={"norm": "attn_norm", **_state_space("mixer", is_second=False)},
        top_names=_BACKBONE,
        whole_names=_factors("mixer", is_second=False),
        conversions={"mixer.A_log": _DECAY},
        is_recurrent=True,
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        "mamba2",
        layers="backbone.layers",
        layer_names={"norm": "attn_norm", **_state_space("mixer", is_second=True)},
        top_names=_BACKBONE,
        whole_names=_factors("mixer", is_second=True),
        conversions={"mixer.A_log": _DECAY, "mixer.norm": _NORM},
        is_recurrent=True,
    ),
    "jamba": Architecture(
        "JambaForCausalLM",
        "jamba",
        layer_names={
            **_ATTENTION,
            **_state_space("mamba", is_second=False),
            **{f"mamba.{name}_layernorm": f"ssm_{name}_norm" for name in ("dt", "b", "c")},
            **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in EXPERT_PARTS},
            "feed_forward.router": "ffn_gate_inp",
            "input_layernorm": "attn_norm",
            "pre_ff_layernorm": "ffn_norm",
        },
        top_names={"model.embed_tokens": "token_embd", "model.final_layernorm": "output_norm", "lm_head": "output"},
        has_experts=True,
        experts=("feed_forward", "gate_proj", "up_proj", "down_proj"),
        whole_names=_factors("mamba", is_second=False),
        conversions={"mamba.A_log": _DECAY},
        is_recurrent=True,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        "lfm2",
        layer_names={
            **{name: short for name, short in _ATTENTION.items() if not name.endswith(("o_proj", "_norm"))},
            "self_attn.out_proj": "attn_output",
            "self_attn.q_layernorm": "attn_q_norm",
            "self_attn.k_layernorm": "attn_k_norm",
            **{f"conv.{name}_proj": f"shortconv.{name}_proj" for name in ("in", "out")},
            "conv.conv": "shortconv.conv",
            **{f"feed_forward.w{number}": f"ffn_{part}" for number, part in ((1, "gate"), (2, "down"), (3, "up"))},
            "operator_norm": "attn_norm",
            "ffn_norm": "ffn_norm",
        },
        top_names={
            "model.embed_tokens": "token_embd",
            "model.embedding_norm": "token_embd_norm",
            "lm_head": "output",
        },
        config={"block_auto_adjust_ff_dim": False},
        is_recurrent=True,
    ),
    "qwen3next": _QWEN3_NEXT,
    "qwen35": _QWEN3_5,
    "qwen35moe": _QWEN3_5_MOE,
    "granitehybrid": _GRANITE_HYBRID,
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        "nemotron_h",
        interleaves_qk=True,
        layers="backbone.layers",
        layer_names={
            "norm": "attn_norm",
            **_state_space("mixer", is_second=True),
            **{name.replace("self_attn", "mixer"): short for name, short in _ATTENTION.items()},
            **{f"mixer.{part}_proj": f"ffn_{part}" for part in ("up", "down")},
        },
        top_names=_BACKBONE,
        whole_names=_factors("mixer", is_second=True),
        conversions={"mixer.A_log": _DECAY, "mixer.norm": _NORM},
        is_recurrent=True,
    ),
}
"""By ``general.architecture``."""
