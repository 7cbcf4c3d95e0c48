"""Tiny random checkpoints of every model that takes images, and the model of text that is within each."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.helpers.images import write_vision
from tests.helpers.qwen_vl import write_qwen_vl
from tests.helpers.vision_models import write_seeing


@dataclass(frozen=True)
class Seeing:
    """write: a checkpoint into a folder; returns transformers' model. text: the architecture of its text alone."""

    write: Callable[[Path], Any]
    text: str


SEEING: dict[str, Seeing] = {
    "idefics3": Seeing(write_vision, "LlamaForCausalLM"),
    "smolvlm": Seeing(partial(write_vision, kind="smolvlm"), "LlamaForCausalLM"),
    "qwen2_vl": Seeing(partial(write_qwen_vl, kind="Qwen2VL"), "Qwen2ForCausalLM"),
    "qwen2_5_vl": Seeing(partial(write_qwen_vl, kind="Qwen2_5_VL"), "Qwen2ForCausalLM"),
    "qwen3_vl": Seeing(partial(write_qwen_vl, kind="Qwen3VL"), "Qwen3ForCausalLM"),
    "qwen3_vl_moe": Seeing(partial(write_qwen_vl, kind="Qwen3VLMoe"), "Qwen3MoeForCausalLM"),
    "qwen3_5": Seeing(partial(write_qwen_vl, kind="Qwen3_5"), "Qwen3_5ForCausalLM"),
    "gemma3": Seeing(partial(write_seeing, name="gemma3"), "Gemma3ForCausalLM"),
    "pixtral": Seeing(partial(write_seeing, name="pixtral"), "MistralForCausalLM"),
    "llava_onevision": Seeing(partial(write_seeing, name="llava_onevision"), "Qwen2ForCausalLM"),
    "internvl": Seeing(partial(write_seeing, name="internvl"), "Qwen2ForCausalLM"),
    "mistral3": Seeing(partial(write_seeing, name="mistral3"), "MistralForCausalLM"),
}


def write_text_alone(folder: Path, seeing: Path, architecture: str) -> None:
    """The model of text within a checkpoint, as one of its own: the same weights under its names."""
    text = json.loads((seeing / "config.json").read_text())["text_config"]
    weights = load_file(seeing / "model.safetensors")
    [prefix] = [n.removesuffix("embed_tokens.weight") for n in weights if n.endswith("embed_tokens.weight")]
    own = {f"model.{name.removeprefix(prefix)}": x for name, x in weights.items() if name.startswith(prefix)}
    head = next((x for name, x in weights.items() if name.endswith("lm_head.weight")), None)
    if head is not None:
        own["lm_head.weight"] = head
    for name in [name for name in own if name.endswith("experts.gate_up_proj")]:
        own |= _apart(name.removesuffix("gate_up_proj"), own.pop(name), own.pop(name.replace("gate_up", "down")))
    text |= {"architectures": [architecture], "dtype": "float32", "tie_word_embeddings": head is None}
    (folder / "config.json").write_text(json.dumps(text))
    save_file(own, folder / "model.safetensors")


def _apart(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Tensors of each expert, [out, in], of those of all. gate_up: [experts, 2 * inner, hidden], or both turned."""
    if gate_up.shape[2] == 2 * down.shape[1]:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    return {
        f"{prefix}{i}.{name}_proj.weight": x.contiguous()
        for i, both in enumerate(gate_up)
        for name, x in zip(("gate", "up", "down"), (*both.chunk(2), down[i]), strict=True)
    }
