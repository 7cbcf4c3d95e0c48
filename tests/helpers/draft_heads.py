"""Tiny random heads in the layouts that are published, for the models of ``tests.helpers.tiny``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fwk_kit.testing.serving import TINY
from tests.helpers.architectures import EXPERTS, GROUPS, write
from tests.helpers.lazy import lazy

transformers = lazy("transformers")

SIZE, INNER, VOCAB = TINY["hidden_size"], TINY["intermediate_size"], TINY["vocab_size"]
HEADS, KV_HEADS = TINY["num_attention_heads"], TINY["num_key_value_heads"]
DRAFT_VOCAB = 100


def _config(**more: Any) -> dict[str, Any]:
    return {**TINY, "num_hidden_layers": 1, "tie_word_embeddings": False, **more}


def _layer(prefix: str, in_features: int, draw: Any, size: int = SIZE) -> dict[str, Tensor]:
    return {
        f"{prefix}.self_attn.q_proj.weight": draw(size, in_features),
        f"{prefix}.self_attn.k_proj.weight": draw(size // HEADS * KV_HEADS, in_features),
        f"{prefix}.self_attn.v_proj.weight": draw(size // HEADS * KV_HEADS, in_features),
        f"{prefix}.self_attn.o_proj.weight": draw(size, size),
        f"{prefix}.mlp.gate_proj.weight": draw(INNER, size),
        f"{prefix}.mlp.up_proj.weight": draw(INNER, size),
        f"{prefix}.mlp.down_proj.weight": draw(size, INNER),
        f"{prefix}.post_attention_layernorm.weight": 1 + draw(size),
    }


def _save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _drawer(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator) * 0.1


def save_eagle(folder: Path, **config: Any) -> Path:
    """An EAGLE head as its authors and SGLang name it, with the copy of the embedding that such files carry."""
    draw = _drawer(3)
    tensors = {"fc.weight": draw(SIZE, 2 * SIZE), "fc.bias": draw(SIZE), "embed_tokens.weight": draw(VOCAB, SIZE)}
    return _save(folder, _config(**config), tensors | _layer("layers.0", SIZE, draw))


def save_eagle3(
    folder: Path, *, layer: str = "midlayer", layers: list[int] | None = None, size: int = SIZE, **config: Any
) -> Path:
    """An EAGLE-3 head with a vocabulary of its own, tokens ``3 * i`` of the target's. layers: whose inputs it reads."""
    draw = _drawer(4)
    tensors = {
        "fc.weight": draw(size, 3 * size),
        f"{layer}.input_layernorm.weight": 1 + draw(size),
        f"{layer}.hidden_norm.weight": 1 + draw(size),
        **_layer(layer, 2 * size, draw, size),
        "norm.weight": 1 + draw(size),
        "lm_head.weight": 3 * draw(DRAFT_VOCAB, size),
        "d2t": 2 * torch.arange(DRAFT_VOCAB),
        "t2d": torch.arange(VOCAB) % 3 == 0,
    }
    ids = [0, 1, 1] if layers is None else layers
    own = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": ids, "architectures": ["LlamaEagle3"]}
    return _save(folder, _config(**{**own, "hidden_size": size, **config}), tensors)


def save_medusa(folder: Path, count: int = 3, *, is_converted: bool = False) -> Path:
    """Medusa heads, named as its authors do or as converted for vLLM."""
    draw = _drawer(5)
    tensors: dict[str, Tensor] = {}
    for i in range(count):
        block, head = (f"blocks.{i}.layers.0", f"lm_heads.{i}") if is_converted else (f"{i}.0.linear", f"{i}.1")
        tensors |= {
            f"{block}.weight": draw(SIZE, SIZE),
            f"{block}.bias": draw(SIZE),
            f"{head}.weight": 3 * draw(VOCAB, SIZE),
        }
    return _save(folder, {"medusa_num_heads": count, "medusa_num_layers": 1, "vocab_size": VOCAB}, tensors)


def with_predictor(folder: Path) -> Any:
    """Add a layer for multi-token prediction to a checkpoint, as published; returns it as transformers' own layer."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = load_file(folder / "model.safetensors")
    last = reference.config.num_hidden_layers
    generator = torch.Generator().manual_seed(9)
    for name, x in list(tensors.items()):
        if name.startswith(f"model.layers.{last - 1}."):
            added = name.replace(f"layers.{last - 1}.", f"layers.{last}.")
            tensors[added] = x + 0.1 * torch.randn(x.shape, generator=generator)
    size, prefix = reference.config.hidden_size, f"model.layers.{last}"
    draw = lambda *shape: torch.randn(shape, generator=generator) * 0.1  # noqa: E731
    tensors |= {
        f"{prefix}.enorm.weight": 1 + draw(size),
        f"{prefix}.hnorm.weight": 1 + draw(size),
        f"{prefix}.eh_proj.weight": draw(size, 2 * size),
        f"{prefix}.shared_head.norm.weight": 1 + draw(size),
        f"{prefix}.shared_head.head.weight": tensors["lm_head.weight"].clone(),
        f"{prefix}.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return reference, tensors, prefix


def save_mtp(folder: Path) -> Path:
    """A GLM-4.5 without experts, with a layer for multi-token prediction."""
    write(folder, "glm4_moe", {**EXPERTS, **GROUPS, "head_dim": 16, "use_qk_norm": True, "first_k_dense_replace": 3})
    with_predictor(folder)
    return folder


def knows_words(head: Path, words: Sequence[int]) -> None:
    """Leave a head no vocabulary but these: then some of its drafts are right."""
    config, file = json.loads((head / "config.json").read_text()), head / "model.safetensors"
    (head / "config.json").write_text(json.dumps({**config, "draft_vocab_size": len(words)}))
    tensors = load_file(file) | {"d2t": torch.tensor(list(words)) - torch.arange(len(words))}
    generator = torch.Generator().manual_seed(2)
    save_file(tensors | {"lm_head.weight": torch.randn((len(words), SIZE), generator=generator)}, file)
