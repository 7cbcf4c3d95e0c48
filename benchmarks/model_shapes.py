"""Folders of random weights in the shapes of models that people run.

    python -m benchmarks.model_shapes FOLDER 1b [--config-only]

``--config-only`` writes what ``--load-format dummy`` needs; otherwise ``model.safetensors`` in bfloat16, tensor by
tensor. The tokeniser is the dummy loader's, one token per byte.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from pathlib import Path
from typing import Any

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "tie_word_embeddings": True,
    "bos_token_id": 257,
    "eos_token_id": 258,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128}


def _shape(base: dict[str, Any], hidden: int, layers: int, inner: int, heads: int, kv_heads: int) -> dict[str, Any]:
    return base | {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "0.6b": _shape(QWEN3, 1024, 28, 3072, 16, 8),
    "1b": _shape(LLAMA, 2048, 16, 8192, 32, 8),
    "3b": _shape(LLAMA, 3072, 28, 8192, 24, 8),
    "8b": _shape(LLAMA, 4096, 32, 14336, 32, 8) | {"tie_word_embeddings": False},
    "moe": _shape(QWEN3, 1024, 16, 3072, 16, 8)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
}
"""Qwen3-0.6B, Llama-3.2-1B and 3B, Llama-3.1-8B, and a Qwen3-MoE of 1.4 thousand million weights."""


def tensors(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    kv = head * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}"
        attention = {"q_proj": (heads * head, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden)}
        attention["o_proj"] = (hidden, heads * head)
        if config["model_type"].startswith("qwen3"):
            found |= {f"{prefix}.self_attn.{name}.weight": (head,) for name in ("q_norm", "k_norm")}
        found |= {f"{prefix}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        found |= _mlp(prefix, config)
        found |= {f"{prefix}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    found["model.norm.weight"] = (hidden,)
    return found if config["tie_word_embeddings"] else found | {"lm_head.weight": (config["vocab_size"], hidden)}


def _mlp(prefix: str, config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, experts = config["hidden_size"], config.get("num_experts", 0)
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if not experts:
        return {f"{prefix}.mlp.{name}.weight": shape for name, shape in shapes.items()}
    found: dict[str, tuple[int, ...]] = {f"{prefix}.mlp.gate.weight": (experts, hidden)}
    for index in range(experts):
        found |= {f"{prefix}.mlp.experts.{index}.{name}.weight": shape for name, shape in shapes.items()}
    return found


def write(folder: Path, config: dict[str, Any], *, has_weights: bool = True) -> None:
    """config.json, the tokeniser's files and, tensor by tensor, model.safetensors."""
    import torch

    from fwk_loaders.dummy.tokenizer import CHAT_TEMPLATE, TOKENIZER_CONFIG, build_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    build_tokenizer(config["vocab_size"], str(folder)).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**TOKENIZER_CONFIG, "chat_template": CHAT_TEMPLATE}))
    if not has_weights:
        return
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensors(config).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator().manual_seed(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for shape in tensors(config).values():
            values = torch.ones(shape) if len(shape) == 1 else torch.empty(shape).normal_(0, 0.02, generator=generator)
            file.write(values.bfloat16().view(torch.uint8).numpy().data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("--config-only", action="store_true")
    arguments = parser.parse_args()
    write(arguments.folder, SHAPES[arguments.shape], has_weights=not arguments.config_only)


if __name__ == "__main__":
    main()
