"""How llama.cpp's converter names and changes the tensors of an architecture.

The converter renames tensors, adds one to Gemma's norms, and stores the rows of Q and K of the ``llama`` architecture
and its kin in another order: their rotary embedding turns neighbouring pairs, Hugging Face's the two halves of a head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

LAYER_NAMES = {
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
JOINED_NAMES = {
    **{name: short for name, short in LAYER_NAMES.items() if "_norm" not in name and "mlp" not in name},
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SANDWICH_NAMES = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_HF_LAYER = re.compile(r"(\d{1,6})\.(.+)\.(weight|bias)")
_HF_EXPERT = re.compile(r"model\.layers\.(\d{1,6})\.(\w+)\.experts\.(\d{1,6})\.(\w+)\.(weight|bias)")
_GGUF_EXPERTS = re.compile(r"blk\.(\d{1,6})\.ffn_(gate|up|down)_exps\.(weight|bias)")
EXPERT_PARTS = ("gate", "up", "down")
_GGUF_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_KINDS = ("weight", "bias")


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one of a layer's tensors comes from what the converter made of it.

    parts: GGUF names whose rows are stored one after another; empty: of the tensor's own name.
    rows, columns: by config.json, an array of int64: row i of the tensor is row ``rows[i]`` of what is stored.
    values: undoes the converter's arithmetic, tensor to tensor.
    is_cut: ``rows`` are some of those that are stored, not all of them.
    """

    parts: tuple[str, ...] = ()
    rows: Callable[[Mapping[str, Any]], Any] | None = None
    columns: Callable[[Mapping[str, Any]], Any] | None = None
    values: Callable[[Any], Any] | None = None
    is_cut: bool = False


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
    layers, top_names: where layers are, and the other tensors; Hugging Face name to GGUF name.
    grouped: the matrix whose rows are stored as all queries, keys and values, and were those of each K/V head.
    conversions: by a layer's module or, where its name ends in neither ``weight`` nor ``bias``, by the whole name.
    is_recurrent: some layers keep a state: numbers of heads and features may be 0, or one for each layer.
    predictor: what names of layers behind the last begin with; empty: what those of all layers begin with.
    """

    model_class: str
    model_type: str
    interleaves_qk: bool = False
    norm_offset: float = 0.0
    layer_names: Mapping[str, str] = field(default_factory=lambda: LAYER_NAMES)
    config: Mapping[str, object] = field(default_factory=dict)
    numbers: Mapping[str, str] = field(default_factory=dict)
    has_experts: bool = False
    experts: tuple[str, str, str, str] = ("mlp", "gate_proj", "up_proj", "down_proj")
    whole_names: Mapping[str, str] = field(default_factory=dict)
    is_latent: bool = False
    layers: str = "model.layers"
    top_names: Mapping[str, str] = field(default_factory=lambda: TOP_NAMES)
    grouped: str = ""
    conversions: Mapping[str, Conversion] = field(default_factory=dict)
    is_recurrent: bool = False
    predictor: str = ""

    def stored_expert(self, name: str) -> tuple[str, int] | None:
        """The GGUF tensor that one expert's matrix is part of, and its place there; None for all other tensors."""
        match = _HF_EXPERT.fullmatch(name) if self.has_experts else None
        if match is None or match[2] != self.experts[0] or match[4] not in self.experts[1:]:
            return None
        part = EXPERT_PARTS[self.experts.index(match[4]) - 1]
        return f"blk.{int(match[1])}.ffn_{part}_exps.{match[5]}", int(match[3])

    def given_experts(self, stored: str, count: int) -> list[str]:
        """The Hugging Face names of the ``count`` matrices in a GGUF tensor; none of one that is no layer's experts."""
        match = _GGUF_EXPERTS.fullmatch(stored) if self.has_experts else None
        if match is None:
            return []
        part = self.experts[1 + EXPERT_PARTS.index(match[2])]
        prefix = f"model.layers.{int(match[1])}.{self.experts[0]}.experts"
        return [f"{prefix}.{i}.{part}.{match[3]}" for i in range(count)]

    def stored_name(self, name: str) -> str | None:
        """The GGUF name of a Hugging Face tensor; None when the architecture has no such tensor."""
        layer, _, whole = name.removeprefix(f"{self.layers}.").partition(".")
        if whole in self.whole_names:
            return f"blk.{layer}.{self.whole_names[whole]}"
        if name.startswith(f"{self.layers}.") and (match := _HF_LAYER.fullmatch(name[len(self.layers) + 1 :])):
            stored = self.layer_names.get(match[2])
            return f"blk.{int(match[1])}.{stored}.{match[3]}" if stored else None
        module, _, kind = name.rpartition(".")
        return f"{self.top_names[module]}.{kind}" if module in self.top_names else None

    def given_names(self, stored: str) -> list[str] | None:
        """The Hugging Face names of a GGUF tensor; None when the architecture has no such tensor.

        Several where the tensor is cut, none where it is a part of another's.
        """
        match = _GGUF_LAYER.fullmatch(stored)
        module, _, kind = (match[2] if match else stored).rpartition(".")
        if match is None:
            return next(([f"{given}.{kind}"] for given, short in self.top_names.items() if short == module), None)
        prefix = f"{self.layers}.{int(match[1])}"
        whole = [given for given, short in self.whole_names.items() if short == match[2]]
        if whole or kind not in _KINDS:
            return [f"{prefix}.{given}" for given in whole] or None
        of_parts = [(given, change.parts) for given, change in self.conversions.items() if module in change.parts]
        if of_parts:
            return [f"{prefix}.{given}.{kind}" for given, parts in of_parts if parts[0] == module]
        names = [given for given, short in self.layer_names.items() if short == module]
        return [f"{prefix}.{names[0]}.{kind}"] if names else None

    def conversion(self, name: str) -> tuple[Conversion, list[str]] | None:
        """How a Hugging Face tensor is made, and of which GGUF tensors; None when it is stored as it is."""
        if not self.conversions or not name.startswith(f"{self.layers}."):
            return None
        layer, _, rest = name[len(self.layers) + 1 :].partition(".")
        module, _, kind = rest.rpartition(".")
        change = self.conversions.get(rest) or (self.conversions.get(module) if kind in _KINDS else None)
        if change is None:
            return None
        own = self.stored_name(name)
        return change, [f"blk.{layer}.{part}.{kind}" for part in change.parts] or ([own] if own else [])
