"""Tiny PEFT adapters, made by peft itself, and the checkpoints they make when merged into their base model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.helpers.lazy import lazy

lora = lazy("peft.tuners.lora")
peft = lazy("peft")
transformers = lazy("transformers")

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VOCAB_SIZE = 320


def make_base(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny Llama as transformers saves it, in float32, with a tokeniser of one word per id."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        **changes,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    for weight in model.parameters():  # larger than transformers draws them, so that layers and adapters matter
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.12)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(settings["vocab_size"])}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
    return folder


def make_adapter(base: Path, folder: Path, merged: Path | None = None, *, seed: int = 1, **settings: Any) -> Path:
    """A random adapter for ``base`` in ``folder``, as peft saves it; ``merged`` gets the checkpoint peft merges.

    ``settings`` are those of peft's ``LoraConfig``; by default rank 4 on q_proj and v_proj.
    """
    chosen = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers by a name it is about to drop
        model = peft.get_peft_model(_base_network(base), peft.LoraConfig(**chosen))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, lora.LoraLayer):
                for part in (*layer.lora_A.values(), *layer.lora_B.values()):
                    part.weight.normal_(std=0.2, generator=generator)
    model.save_pretrained(folder)
    if merged is not None:
        model.merge_and_unload().save_pretrained(merged)
        (merged / "tokenizer.json").write_bytes((base / "tokenizer.json").read_bytes())
    return folder


def reference(base: Path, adapter: Path | None = None) -> torch.nn.Module:
    """The network as transformers and peft compute it in float32, the adapter alongside the weights and not in them."""
    network = _base_network(base)
    if adapter is None:
        return network
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.PeftModel.from_pretrained(network, adapter)


def _base_network(base: Path) -> Any:
    return transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
