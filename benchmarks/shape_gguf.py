"""A folder of ``benchmarks.model_shapes`` as a GGUF file in bfloat16, by the names of llama.cpp's converter.

    python -m benchmarks.shape_gguf FOLDER FILE

llama.cpp's ``llama-quantize`` makes the other formats of it.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}


MERGE = "\u0100 \u0101"
"""Bytes 0 and 1, as GPT-2's tokeniser shows them."""


def write(folder: Path, path: Path) -> None:
    """Weights are read from ``model.safetensors`` tensor by tensor and written as they are."""
    config = json.loads((folder / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _metadata(writer, config, folder)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    stacked: dict[str, list[NDArray[np.uint16]]] = {}
    for name, values in _tensors(folder / "model.safetensors"):
        stacked.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(values)
    for name, parts in stacked.items():
        stored = names.get_name(name, try_suffixes=(".weight",))
        if stored is None:
            raise SystemExit(f"{name}: a GGUF file of {config['model_type']} has no such tensor")
        values = np.stack(parts) if len(parts) > 1 else parts[0]
        if values.ndim == 1 or name.endswith("mlp.gate.weight"):  # the converter keeps these in float32
            writer.add_tensor(stored, (values.astype(np.uint32) << 16).view(np.float32))
            continue
        if config["model_type"] == "llama" and (kind := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if kind[1] == "q" else "num_key_value_heads"]
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)
        writer.add_tensor(stored, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensors(path: Path) -> list[tuple[str, NDArray[np.uint16]]]:
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    raw = np.memmap(path, np.uint8, "r", offset=8 + size)
    found: list[tuple[str, NDArray[np.uint16]]] = []
    for name, facts in header.items():
        start, end = facts["data_offsets"]
        found.append((name, raw[start:end].view(np.uint16).reshape(facts["shape"])))
    return found


def _metadata(writer: gguf.GGUFWriter, config: dict[str, Any], folder: Path) -> None:
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "llama":
        writer.add_rope_dimension_count(head)
    if experts := config.get("num_experts"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config["eos_token_id"])


def add_tokenizer(writer: gguf.GGUFWriter, model: dict[str, Any], end: int) -> None:
    """``model``: a tokenizer.json of one token per byte, whose token before ``end`` begins a text."""
    special = {token["id"] for token in model["added_tokens"]}
    tokens = sorted(model["model"]["vocab"].items(), key=lambda item: item[1])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    texts = [text for text, _ in tokens]
    # A file has one merge at least: of two bytes that no prompt has, as a token of its own.
    unused = [i for i in range(len(texts)) if i not in special and texts[i].startswith("<")]
    texts[unused[0]] = MERGE.replace(" ", "")
    writer.add_token_list(texts)
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for _, i in tokens])
    writer.add_token_merges([MERGE])
    writer.add_bos_token_id(end - 1)
    writer.add_eos_token_id(end)
    writer.add_add_bos_token(False)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    write(arguments.folder, arguments.file)


if __name__ == "__main__":
    main()
