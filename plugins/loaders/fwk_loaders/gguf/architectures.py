"""The architectures this loader knows: how llama.cpp's converter names and changes their tensors.

The converter renames tensors, stores the rows of Q and K of the ``llama`` architecture in another order (its rotary
embedding turns neighbouring pairs, Hugging Face's turns the two halves of a head), and adds one to Gemma's norms.
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
_SANDWICH_NAMES = {
    **_LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_HF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)\.(weight|bias)")
_HF_EXPERT = re.compile(r"model\.layers\.(\d{1,6})\.mlp\.experts\.(\d{1,6})\.(gate|up|down)_proj\.weight")
_GGUF_EXPERTS = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)_exps\.weight")
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
    """

    model_class: str
    model_type: str
    interleaves_qk: bool = False
    norm_offset: float = 0.0
    layer_names: Mapping[str, str] = field(default_factory=lambda: _LAYER_NAMES)
    config: Mapping[str, object] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    has_experts: bool = False

    def stored_expert(self, name: str) -> tuple[str, int] | None:
        """The GGUF tensor that one expert's matrix is part of, and its place there; None for all other tensors."""
        match = _HF_EXPERT.fullmatch(name) if self.has_experts else None
        return None if match is None else (f"blk.{int(match[1])}.ffn_{match[3]}_exps.weight", int(match[2]))

    def given_experts(self, stored: str, count: int) -> list[str]:
        """The Hugging Face names of the ``count`` matrices in a GGUF tensor; none of one that is no layer's experts."""
        match = _GGUF_EXPERTS.fullmatch(stored) if self.has_experts else None
        if match is None:
            return []
        return [f"model.layers.{int(match[1])}.mlp.experts.{i}.{match[2]}_proj.weight" for i in range(count)]

    def stored_name(self, name: str) -> str | None:
        """The GGUF name of a Hugging Face tensor; None when the architecture has no such tensor."""
        if match := _HF_LAYER.fullmatch(name):
            stored = self.layer_names.get(match[2])
            return f"blk.{int(match[1])}.{stored}.{match[3]}" if stored else None
        module, _, kind = name.rpartition(".")
        return f"{_TOP_NAMES[module]}.{kind}" if module in _TOP_NAMES else None

    def given_name(self, stored: str) -> str | None:
        """The Hugging Face name of a GGUF tensor; None when the architecture has no such tensor."""
        if match := _GGUF_LAYER.fullmatch(stored):
            names = (given for given, short in self.layer_names.items() if short == match[2])
            given = next(names, None)
            return f"model.layers.{int(match[1])}.{given}.{match[3]}" if given else None
        module, _, kind = stored.rpartition(".")
        return next((f"{given}.{kind}" for given, short in _TOP_NAMES.items() if short == module), None)


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
}
"""By ``general.architecture``."""
