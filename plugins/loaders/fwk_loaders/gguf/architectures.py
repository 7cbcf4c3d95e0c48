"""The architectures this loader knows: how llama.cpp's converter names and changes their tensors.

The converter renames tensors, adds one to Gemma's norms, and stores the rows of Q and K of the ``llama`` architecture
and its kin in another order: their rotary embedding turns neighbouring pairs, Hugging Face's the two halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_JOINED_NAMES = {
    **{name: short for name, short in _LAYER_NAMES.items() if "_norm" not in name and "mlp" not in name},
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_SANDWICH_NAMES = {
    **_LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_HF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_HF_EXPERT = re.compile(r"model\.layers\.(\d{1,6})\.(\w+)\.experts\.(\d{1,6})\.(\w+)\.(weight|bias)")
_GGUF_EXPERTS = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)_exps\.(weight|bias)")
_EXPERT_PARTS = ("gate", "up", "down")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture of GGUF files.

    interleaves_qk: rows of Q and K come in pairs and must be put back.
    norm_offset: what the converter added to the weights of norms.
    layer_names: Hugging Face name to GGUF name, inside a layer.
    config: fields of config.json that are the same for every model of the architecture.
    numbers: further fields of config.json, by the keys of their numbers in the file; left out where it has none.
    has_experts: a layer's experts are stored as one tensor for each of gate, up and down, their matrices in a row.
    experts: where a layer has them, and their matrices for gate, up and down.
    whole_names: Hugging Face name to GGUF name of a layer's tensors that end in neither ``weight`` nor ``bias``.
    is_latent: attention keeps latents (MLA), and the matrix that expands them may be stored in two.
    """

    model_class: str
    model_type: str
    interleaves_qk: bool = False
    norm_offset: float = 0.0
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    config: Mapping[str, object] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    has_experts: bool = False
    experts: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")
    whole_names: Mapping[str, str] = field(default_factory=dict)
    is_latent: bool = False

    def stored_expert(self, name: str) -> tuple[str, int] | None:
        """The GGUF tensor that one expert's matrix is part of, and its place there; None for all other tensors."""
        match = _HF_EXPERT.fullmatch(name) if self.has_experts else None
        if match is None or match[2] != self.experts[0] or match[4] not in self.experts[1:]:
            return None
        part = _EXPERT_PARTS[self.experts.index(match[4]) - 1]
        return f"blk.{int(match[1])}.ffn_{part}_exps.{match[5]}", int(match[3])

    def given_experts(self, stored: str, count: int) -> list[str]:
        """The Hugging Face names of the ``count`` matrices in a GGUF tensor; none of one that is no layer's experts."""
        match = _GGUF_EXPERTS.fullmatch(stored) if self.has_experts else None
        if match is None:
            return []
        part = self.experts[1 + _EXPERT_PARTS.index(match[2])]
        prefix = f"model.layers.{int(match[1])}.{self.experts[0]}.experts"
        return [f"{prefix}.{i}.{part}.{match[3]}" for i in range(count)]

    def stored_name(self, name: str) -> str | None:
        """The GGUF name of a Hugging Face tensor; None when the architecture has no such tensor."""
        layer, _, whole = name.removeprefix("model.layers.").partition(".")
        if whole in self.whole_names:
            return f"blk.{layer}.{self.whole_names[whole]}"
        if match := _HF_LAYER.fullmatch(name):
            stored = self.layer_names.get(match[2])
            return f"blk.{int(match[1])}.{stored}.{match[3]}" if stored else None
        module, _, kind = name.rpartition(".")
        return f"{_TOP_NAMES[module]}.{kind}" if module in _TOP_NAMES else None

    def given_name(self, stored: str) -> str | None:
        """The Hugging Face name of a GGUF tensor; None when the architecture has no such tensor."""
        if match := _GGUF_LAYER.fullmatch(stored):
            prefix = f"model.layers.{int(match[1])}"
            whole = (given for given, short in self.whole_names.items() if short == f"{match[2]}.{match[3]}")
            names = (f"{given}.{match[3]}" for given, short in self.layer_names.items() if short == match[2])
            given = next(whole, None) or next(names, None)
            return f"{prefix}.{given}" if given else None
        module, _, kind = stored.rpartition(".")
        return next((f"{given}.{kind}" for given, short in _TOP_NAMES.items() if short == module), None)


_COHERE = {"layer_norm_eps": ".attention.layer_norm_epsilon", "logit_scale": ".logit_scale"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", "llama", interleaves_qk=True),
    "qwen2": Architecture("Qwen2ForCausalLM", "qwen2", config={"use_sliding_window": False}),
    "qwen3": Architecture("Qwen3ForCausalLM", "qwen3", config={"use_sliding_window": False}),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        layer_names={**_LAYER_NAMES, "mlp.gate": "ffn_gate_inp"},
        config={"use_sliding_window": False, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        has_experts=True,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        norm_offset=1.0,
        layer_names=_SANDWICH_NAMES,
        config={"hidden_activation": "gelu_pytorch_tanh"},
    ),
    "gemma": Architecture(
        "GemmaForCausalLM", "gemma", norm_offset=1.0, config={"hidden_activation": "gelu_pytorch_tanh"}
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        "gemma2",
        norm_offset=1.0,
        layer_names=_SANDWICH_NAMES,
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
    "olmo2": Architecture("Olmo2ForCausalLM", "olmo2", layer_names=_SANDWICH_NAMES),
    "olmoe": Architecture(
        "OlmoeForCausalLM",
        "olmoe",
        layer_names={**_LAYER_NAMES, "mlp.gate": "ffn_gate_inp"},
        config={"norm_topk_prob": False},
        has_experts=True,
    ),
    "phi3": Architecture("Phi3ForCausalLM", "phi3", layer_names={**_JOINED_NAMES, "self_attn.qkv_proj": "attn_qkv"}),
    "glm4": Architecture(
        "Glm4ForCausalLM",
        "glm4",
        layer_names={
            **_JOINED_NAMES,
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
    ),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        "starcoder2",
        layer_names={
            **{name: short for name, short in _LAYER_NAMES.items() if "mlp" not in name},
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
            **_LAYER_NAMES,
            "mlp.gate": "ffn_gate_inp",
            "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
            **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in _EXPERT_PARTS},
        },
        config={"use_sliding_window": False, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
        has_experts=True,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        "gpt_oss",
        layer_names={
            **_LAYER_NAMES,
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
        },
        has_experts=True,
        whole_names={"self_attn.sinks": "attn_sinks.weight"},
    ),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        layer_names={
            **_LAYER_NAMES,
            **{f"self_attn.{name}_proj": f"attn_{name}" for name in ("q_a", "q_b", "kv_b")},
            "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
            "self_attn.q_a_layernorm": "attn_q_a_norm",
            "self_attn.kv_a_layernorm": "attn_kv_a_norm",
            "mlp.gate": "ffn_gate_inp",
            **{f"mlp.shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in _EXPERT_PARTS},
        },
        has_experts=True,
        whole_names={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
        is_latent=True,
    ),
}
"""By ``general.architecture``."""

MIXTRAL = Architecture(
    "MixtralForCausalLM",
    "mixtral",
    interleaves_qk=True,
    layer_names={**_LAYER_NAMES, "block_sparse_moe.gate": "ffn_gate_inp"},
    has_experts=True,
    experts=("block_sparse_moe", "w1", "w3", "w2"),
)
"""``llama`` with experts."""
