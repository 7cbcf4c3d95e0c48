"""Architectures by the name transformers has for each, with what a small one of each is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fwk_loaders.dummy.tokenizer import build_tokenizer
from tests.helpers import checkpoints
from tests.helpers.lazy import lazy

transformers = lazy("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OWN = {"num_key_value_heads": 4, "intermediate_size": 256}
"""For configurations that have neither of the two, and would only keep the numbers."""
KINDS = ["sliding_attention", "full_attention"]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + i / 4 for i in range(8)],
    "short_factor": [1.0 + i / 8 for i in range(8)],
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 3}
GROUPS = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
    "head_dim": 16,
    "hidden_size": 64,
    "layer_types": KINDS,
}
MAMBA = {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 1, "expand": 2}
JAMBA = {
    "num_hidden_layers": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 3,
    "num_experts": 4,
    "mamba_d_state": 12,
}
DELTA = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
NEXT = {**DELTA, **EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48}
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "mamba_n_heads": 8,
    "mamba_d_state": 24,
    "shared_intermediate_size": 48,
    "num_local_experts": 0,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
    "attention_multiplier": 0.2,
}
NEMOTRON = {
    "num_hidden_layers": None,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 24,
    "mlp_bias": True,
}
LLAMA4 = {
    "num_local_experts": 4,
    "intermediate_size_mlp": 128,
    "head_dim": 16,
    "no_rope_layers": [1, 0],
    "floor_scale": 16,
    "moe_layers": [0, 1],
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", {}),
    "phi3 window": ("phi3", {"sliding_window": 20}),
    "phi3 longrope": (
        "phi3",
        {"rope_parameters": {**LONG, "factor": 4.0}, "original_max_position_embeddings": 512},
    ),
    "phi4 partial": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"sliding_window": 20, "layer_types": KINDS}),
    "gemma": ("gemma", {"head_dim": 24}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 20}),
    "gemma2 uncapped": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gpt2": ("gpt2", {**OWN, "n_inner": None}),
    "gpt_neox": ("gpt_neox", OWN),
    "gpt_neox one after another": ("gpt_neox", {**OWN, "use_parallel_residual": False, "tie_word_embeddings": True}),
    "falcon multi-query": ("falcon", {"alibi": False, "multi_query": True}),
    "falcon slopes": ("falcon", {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}),
    "falcon groups": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon groups, one norm": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "bloom": ("bloom", OWN),
    "bloom six heads": (
        "bloom",
        {**OWN, "num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96, "intermediate_size": 384},
    ),
    "opt": ("opt", {**OWN, "ffn_dim": 256, "word_embed_proj_dim": 64}),
    "starcoder2": ("starcoder2", {"sliding_window": 20}),
    "starcoder2 no bias": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "glm": ("glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("glm4", {"head_dim": 16}),
    "cohere": ("cohere", {}),
    "cohere norms": ("cohere", {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("cohere2", {"sliding_window": 20, "layer_types": KINDS, "head_dim": 16}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_multiplier": 0.2},
    ),
    "granitemoe": ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.4}),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral window": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 20}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48}),
    "qwen2_moe some layers dense": (
        "qwen2_moe",
        {
            **EXPERTS,
            "num_experts": 8,
            "shared_expert_intermediate_size": 48,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "qkv_bias": False,
        },
    ),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "glm4_moe": ("glm4_moe", {**EXPERTS, **GROUPS, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    "glm4_moe one group": ("glm4_moe", {**EXPERTS, "n_routed_experts": 8, "head_dim": 16, "norm_topk_prob": False}),
    "deepseek_v3": ("deepseek_v3", {**EXPERTS, **GROUPS, **LATENT}),
    "deepseek_v3 no query latent": ("deepseek_v3", {**EXPERTS, **GROUPS, **LATENT, "q_lora_rank": None}),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "mamba2": ("mamba2", MAMBA),
    "mamba2 groups": ("mamba2", {**MAMBA, "n_groups": 2, "use_bias": True, "tie_word_embeddings": True}),
    "mamba": ("mamba", {"state_size": 12}),
    "mamba biased": ("mamba", {"use_bias": True, "time_step_rank": 6, "tie_word_embeddings": False, "conv_kernel": 3}),
    "falcon mamba": ("falcon_mamba", {"mixer_rms_eps": 1e-3, "time_step_rank": 6}),
    "jamba": ("jamba", JAMBA),
    "jamba dense, ends with a state": (
        "jamba",
        {**JAMBA, "num_experts": 1, "attn_layer_offset": 0, "mamba_proj_bias": True, "tie_word_embeddings": True},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    "lfm2 ends with a convolution": (
        "lfm2",
        {"layer_types": ["full_attention", "conv"], "conv_bias": True, "block_auto_adjust_ff_dim": False},
    ),
    "qwen3_next": ("qwen3_next", NEXT),
    "qwen3_next dense": ("qwen3_next", {**NEXT, "mlp_only_layers": [0, 1], "linear_num_value_heads": 2}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "qwen3_5_moe": ("qwen3_5_moe_text", NEXT),
    "granite hybrid": ("granitemoehybrid", HYBRID),
    "granite hybrid with experts": (
        "granitemoehybrid",
        {**HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "llama4": ("llama4_text", LLAMA4),
    "llama4 dense layers between": (
        "llama4_text",
        {**LLAMA4, "moe_layers": [1], "use_qk_norm": False, "no_rope_layers": [1, 1], "attention_bias": True},
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "tie_word_embeddings": False}),
}


QWEN3, QWEN3_MOE, GEMMA3, LATENT_V2 = (
    checkpoints.KINDS[kind][2] for kind in ("qwen3", "qwen3_moe", "gemma3", "deepseek_v2")
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
ROPES = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama own head size": ("llama", {"head_dim": 24}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama every head its own": ("llama", {"num_key_value_heads": 4}),
    "llama rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama rope linear": ("llama", {"rope_parameters": LINEAR}),
    "llama rope yarn": ("llama", {"rope_parameters": YARN}),
    "llama rope yarn, tuned": (
        "llama",
        {"rope_parameters": {**YARN, "beta_fast": 16.0, "truncate": False, "mscale": 0.7}},
    ),
    "llama rope yarn, scaled": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("qwen3", QWEN3),
    "qwen3 tied, biased": ("qwen3", {**QWEN3, "tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 windows": ("qwen3", {**QWEN3, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe not normalised": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": False, "num_experts_per_tok": 2}),
    "qwen3_moe some layers dense": ("qwen3_moe", {**QWEN3_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3_moe every second": ("qwen3_moe", {**QWEN3_MOE, "num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "qwen3_moe all experts": ("qwen3_moe", {**QWEN3_MOE, "num_experts_per_tok": 8}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3 scaled ropes": ("gemma3_text", {**GEMMA3, "rope_parameters": ROPES}),
    "gemma3 capped": ("gemma3_text", {**GEMMA3, "final_logit_softcapping": 3.0}),
    "gemma3 own head": ("gemma3_text", {**GEMMA3, "tie_word_embeddings": False, "attention_bias": True}),
    "deepseek_v2": ("deepseek_v2", LATENT_V2),
    "deepseek_v2 query latent, biases": (
        "deepseek_v2",
        {**LATENT_V2, "q_lora_rank": 24, "attention_bias": True, "rms_norm_eps": 1e-2, "first_k_dense_replace": 0},
    ),
    "deepseek_v2 yarn": (
        "deepseek_v2",
        {**LATENT_V2, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.9}},
    ),
    "deepseek_v2 groups, tied": ("deepseek_v2", {**LATENT_V2, **V2_GROUPS, "tie_word_embeddings": True}),
}
"""Of the families that ``checkpoints`` writes too: what else a config of theirs says."""


def write(folder: Path, kind: str, changes: dict[str, Any]) -> transformers.PreTrainedModel:
    """A checkpoint of transformers' own class for the kind, with a tokeniser of bytes; returns the reference."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    # Falcon's own attention without a fused kernel adds its slopes twice.
    attention = "sdpa" if kind == "falcon" else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
    adds_one = kind.startswith("gemma")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.normal_(1.0 if is_norm and not adds_one else 0.0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.25)
    model.save_pretrained(folder)
    build_tokenizer(SMALL["vocab_size"], str(folder)).save(str(folder / "tokenizer.json"))
    return model


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)
