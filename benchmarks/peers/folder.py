"""The default model as a Hugging Face folder in bfloat16, for engines that read no GGUF file.

The numbers are those fwk computes with: de-quantised by its own loader, and rounded to bfloat16 once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fwk.setup.checkpoint import OpenedModel


def write(model: OpenedModel, folder: Path) -> None:
    """Write config, tokenizer, chat template and weights of a Llama model. The folder appears only when it is whole."""
    import torch
    from safetensors.torch import save_file

    part = folder.with_name(folder.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    source = model.checkpoint.weights()
    config = {key: value for key, value in model.checkpoint.config().items() if value is not None}
    shapes = {name: _shape(name, config) for name in source.names()}
    tensors = {
        name: source.tensor(name, shape).to(torch.bfloat16).contiguous()
        for name, shape in shapes.items()
        if not (name == "lm_head.weight" and config["tie_word_embeddings"])
    }
    save_file(tensors, str(part / "model.safetensors"), metadata={"format": "pt"})
    checkpoint = model.checkpoint
    checkpoint.tokenizer().save(str(part / "tokenizer.json"))
    tokenizer = {
        **checkpoint.tokenizer_config(),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": checkpoint.chat_template(),
    }
    files = {
        "config.json": {**config, "dtype": "bfloat16"},
        "generation_config.json": dict(checkpoint.generation_config()),
        "tokenizer_config.json": tokenizer,
    }
    for name, content in files.items():
        (part / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(part, folder)


def _shape(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    sizes = {
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return sizes.get(name.split(".")[-2], (hidden,))
