"""The architectures this loader knows, by ``general.architecture``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fwk_loaders.gguf import recurrent
from fwk_loaders.gguf.architecture import (
    EXPERT_PARTS,
    JOINED_NAMES,
    LAYER_NAMES,
    SANDWICH_NAMES,
    Architecture,
    Conversion,
)

_OLDER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
    **{f"{attention}.query_key_value": "attn_qkv" for attention in ("self_attention", "attention")},
    **{f"{attention}.dense": "attn_output" for attention in ("self_attention", "attention")},
}
"""GPT-NeoX's, BLOOM's and Falcon's."""


def _older(attention: str, **more: str) -> dict[str, str]:
    """Names of layers whose attention is called that."""
    other = "attention" if attention == "self_attention" else "self_attention"
    return {name: short for name, short in _OLDER_NAMES.items() if not name.startswith(f"{other}.")} | more


_COHERE = {"layer_norm_eps": ".attention.layer_norm_epsilon", "logit_scale": ".logit_scale"}

_FALCON = {
    "transformer.word_embeddings": "token_embd",
    "transformer.ln_f": "output_norm",
    "lm_head": "output",
}
_EPSILON = {"layer_norm_epsilon": ".attention.layer_norm_epsilon"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaves_qk=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", config={"use_sliding_window": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", config={"use_sliding_window": False}),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        layer_names={**LAYER_NAMES, "mlp.gate": "ffn_gate_inp"},
        config={"use_sliding_window": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        has_experts=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_offset=1.0,
        layer_names=SANDWICH_NAMES,
        config={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma": Architecture("GemmaForCausalLM", "gemma", norm_offset=1.0, config={"hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        norm_offset=1.0,
        layer_names=SANDWICH_NAMES,
        config={"hidden_activation": "gelu_pytorch_tanh"},
        numbers={
            "attn_logit_softcapping": ".attn_logit_softcapping",
            "final_logit_softcapping": ".final_logit_softcapping",
        },
    ),
    "granite": Architecture(
        "GraniteForCausalLM",
        "granite",
        interleaves_qk=True,
        numbers={
            "embedding_multiplier": ".embedding_scale",
            "residual_multiplier": ".residual_scale",
            "logits_scaling": ".logit_scale",
            "attention_multiplier": ".attention.scale",
        },
    ),
    "smollm3": Architecture(
        "SmolLM3ForCausalLM",
        "smollm3",
        interleaves_qk=True,
        config={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", layer_names=SANDWICH_NAMES),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        "olmoe",
        layer_names={**LAYER_NAMES, "mlp.gate": "ffn_gate_inp"},
        config={"norm_topk_prob": False},
        has_experts=True,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", layer_names={**JOINED_NAMES, "self_attn.qkv_proj": "attn_qkv"}),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        layer_names={
            **JOINED_NAMES,
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "chatglm": Architecture("GlmForCausalLM", "glm", layer_names=JOINED_NAMES),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        layer_names={
            **{name: short for name, short in LAYER_NAMES.items() if "mlp" not in name},
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        config={"hidden_act": "gelu_pytorch_tanh"},
        numbers={"norm_epsilon": ".attention.layer_norm_epsilon"},
    ),
    "command-r": Architecture("CohereForCausalLM", "cohere", numbers=_COHERE),
    "cohere2": Architecture("Cohere2ForCausalLM", "cohere2", numbers=_COHERE),
    "internlm2": Architecture("LlamaForCausalLM", "llama", interleaves_qk=True),
    "baichuan": Architecture("LlamaForCausalLM", "llama", interleaves_qk=True),
    "minicpm": Architecture(
        "GraniteForCausalLM",
        "granite",
        interleaves_qk=True,
        numbers={
            "embedding_multiplier": ".embedding_scale",
            "residual_multiplier": ".residual_scale",
            "logits_scaling": ".logit_scale",
        },
    ),
    "qwen2moe": Architecture(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        layer_names={
            **LAYER_NAMES,
            "mlp.gate": "ffn_gate_inp",
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
            **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in EXPERT_PARTS},
        },
        config={"use_sliding_window": False, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        has_experts=True,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        layer_names={
            **LAYER_NAMES,
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
        },
        has_experts=True,
        whole_names={"self_attn.sinks": "attn_sinks.weight"},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "gpt2",
        layers="transformer.h",
        layer_names={
            "ln_1": "attn_norm",
            "attn.c_attn": "attn_qkv",
            "attn.c_proj": "attn_output",
            "ln_2": "ffn_norm",
            "mlp.c_fc": "ffn_up",
            "mlp.c_proj": "ffn_down",
        },
        top_names={
            "transformer.wte": "token_embd",
            "transformer.wpe": "position_embd",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        config={"stores_conv1d": False},
        numbers=_EPSILON,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        layers="gpt_neox.layers",
        layer_names=_older("attention"),
        top_names={
            "gpt_neox.embed_in": "token_embd",
            "gpt_neox.final_layer_norm": "output_norm",
            "embed_out": "output",
        },
        config={"hidden_act": "gelu"},
        numbers={"layer_norm_eps": ".attention.layer_norm_epsilon"},
        grouped="attention.query_key_value",
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        "bloom",
        layers="transformer.h",
        layer_names=_older("self_attention"),
        top_names={
            "transformer.word_embeddings": "token_embd",
            "transformer.word_embeddings_layernorm": "token_embd_norm",
            "transformer.ln_f": "output_norm",
            "lm_head": "output",
        },
        numbers=_EPSILON,
        grouped="self_attention.query_key_value",
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        "falcon",
        layers="transformer.h",
        layer_names=_older("self_attention"),
        top_names=_FALCON,
        numbers=_EPSILON,
        grouped="self_attention.query_key_value",
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        layer_names={
            **LAYER_NAMES,
            "post_attention_layernorm": "post_attention_norm",
            "mlp.gate": "ffn_gate_inp",
            **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in EXPERT_PARTS},
            **{name: f"nextn.{name}" for name in ("eh_proj", "embed_tokens", "enorm", "hnorm")},
            "shared_head.head": "nextn.shared_head_head",
            "shared_head.norm": "nextn.shared_head_norm",
        },
        has_experts=True,
        whole_names={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        layer_names={
            **LAYER_NAMES,
            **{f"self_attn.{name}_proj": f"attn_{name}" for name in ("q_a", "q_b", "kv_b")},
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "mlp.gate": "ffn_gate_inp",
            **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in EXPERT_PARTS},
        },
        has_experts=True,
        whole_names={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
        is_latent=True,
    ),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        "granitemoe",
        interleaves_qk=True,
        layer_names={**LAYER_NAMES, "block_sparse_moe.router.layer": "ffn_gate_inp"},
        has_experts=True,
        experts=("block_sparse_moe", "gate_proj", "up_proj", "down_proj"),
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        "llama4_text",
        layer_names={
            **{name: short for name, short in LAYER_NAMES.items() if "mlp" not in name and "_norm" not in name},
            **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in EXPERT_PARTS},
            **{f"feed_forward.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in EXPERT_PARTS},
            "feed_forward.router": "ffn_gate_inp",
        },
        has_experts=True,
        experts=("feed_forward", "gate_proj", "up_proj", "down_proj"),
    ),
    **recurrent.ARCHITECTURES,
}
"""By ``general.architecture``."""

MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    interleaves_qk=True,
    layer_names={**LAYER_NAMES, "block_sparse_moe.gate": "ffn_gate_inp"},
    has_experts=True,
    experts=("block_sparse_moe", "w1", "w3", "w2"),
)
"""``llama`` with experts."""

FALCON_TWO_NORMS = replace(
    ARCHITECTURES["falcon"],
    layer_names={
        **{name: short for name, short in _older("self_attention").items() if "norm" not in name},
        "ln_mlp": "attn_norm",
        "ln_attn": "attn_norm_2",
    },
)
"""``falcon`` with a norm for each part of a layer."""


def _rows(part: int) -> Conversion:
    """The rows of queries (0), keys (1) or values (2) in the matrix that holds all three."""

    def order(config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        size, heads, kv_heads = (config[name] for name in ("head_dim", "num_attention_heads", "num_key_value_heads"))
        starts = (0, heads * size, (heads + kv_heads) * size, (heads + 2 * kv_heads) * size)
        return np.arange(starts[part], starts[part + 1])

    return Conversion(("attn_qkv",), rows=order, is_cut=True)


CHATGLM_JOINED = replace(
    ARCHITECTURES["chatglm"],
    layer_names={
        name: short for name, short in JOINED_NAMES.items() if short[:6] not in ("attn_q", "attn_k", "attn_v")
    },
    conversions={f"self_attn.{name}_proj": _rows(part) for part, name in enumerate("qkv")},
)
"""``chatglm`` of checkpoints that transformers did not write: ChatGLM 2 and 3, and the first GLM-4."""
