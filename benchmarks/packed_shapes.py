"""GGUF files of random weights, packed as llama.cpp's files are, in the shapes of models that people run.

    python -m benchmarks.packed_shapes FILE llama-1b Q4_K_M

Every engine reads the same file. Blocks come from one pool of each format, from a place that the name of the tensor
decides: no kernel's time depends on the numbers, and a file takes seconds. The tokeniser has one token per byte.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from benchmarks.shape_gguf import add_tokenizer
from fwk_loaders.dummy.tokenizer import END_ID, build_tokenizer

FORMATS = {"BF16": Type.BF16, "Q8_0": Type.Q8_0, "Q4_K_M": Type.Q4_K}
"""What a file's matrices are in; of Q4_K_M some are in Q6_K (see ``_format``)."""

BLOCKS = {kind: gguf.GGML_QUANT_SIZES[kind] for kind in (Type.Q8_0, Type.Q4_K, Type.Q6_K)} | {Type.BF16: (64, 128)}
"""Numbers and bytes of what is taken from a pool at once."""

POOL_BLOCKS = 2**18 + 257
DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class Shape:
    """One model. inner: the width of its MLP, of one expert where there are experts.

    attends: which layers have attention, counted from one: each ``attends``-th. recurrent: what the others are.
    keys and values: heads of the recurrent layers; state: the width of one.
    """

    architecture: str
    hidden: int
    layers: int
    inner: int = 0
    heads: int = 0
    kv_heads: int = 0
    head: int = 64
    vocab: int = 49152
    theta: float = 1e6
    epsilon: float = 1e-6
    experts: int = 0
    active: int = 0
    attends: int = 1
    keys: int = 0
    values: int = 0
    state: int = 0

    def has_attention(self, layer: int) -> bool:
        return bool(self.attends) and (layer + 1) % self.attends == 0


SHAPES = {
    "llama-1b": Shape("llama", 2048, 16, 8192, 32, 8, 64, vocab=128256, theta=5e5, epsilon=1e-5),
    "llama-3b": Shape("llama", 3072, 28, 8192, 24, 8, 128, vocab=128256, theta=5e5, epsilon=1e-5),
    "qwen3-1.7b": Shape("qwen3", 2048, 28, 6144, 16, 8, 128, vocab=151936),
    "gemma2-2b": Shape("gemma2", 2304, 26, 9216, 8, 4, 256, vocab=256000, theta=1e4),
    "moe": Shape("qwen3moe", 1024, 16, 512, 16, 4, 64, experts=32, active=4),
    "qwen3next-0.8b": Shape(
        *("qwen3next", 1024, 12, 512, 8, 2, 128),
        **{"theta": 1e7, "experts": 32, "active": 4, "attends": 4, "keys": 8, "values": 16, "state": 128},
    ),
    "mamba2-370m": Shape("mamba2", 1024, 48, attends=0, values=32, state=128, epsilon=1e-5),
    "lfm2-350m": Shape("lfm2", 1024, 16, 4608, 16, 8, 64, vocab=65536, epsilon=1e-5, attends=3),
}

Tensor = tuple[str, tuple[int, ...], str]
"""Name, shape with the inputs last, and what it is: matrix, wide (in Q4_K_M half are in Q6_K), head, embedding, or in
float32 norm, small, decay."""


def tensors(shape: Shape) -> Iterator[Tensor]:
    """Of a whole file."""
    hidden = shape.hidden
    yield "token_embd.weight", (shape.vocab, hidden), "embedding" if _has_head(shape) else "head"
    yield "token_embd_norm.weight" if shape.architecture == "lfm2" else "output_norm.weight", (hidden,), "norm"
    if _has_head(shape):
        yield "output.weight", (shape.vocab, hidden), "head"
    for layer in range(shape.layers):
        for name, size, kind in _layer(shape, layer):
            yield f"blk.{layer}.{name}", size, kind


def _has_head(shape: Shape) -> bool:
    return shape.architecture == "qwen3next"


def _layer(shape: Shape, layer: int) -> Iterator[Tensor]:
    hidden = shape.hidden
    yield "attn_norm.weight", (hidden,), "norm"
    if shape.has_attention(layer):
        yield from _attention(shape)
    elif shape.architecture == "mamba2":
        yield from _mamba2(shape)
        return
    elif shape.architecture == "lfm2":
        yield "shortconv.conv.weight", (hidden, 3), "small"
        yield "shortconv.in_proj.weight", (3 * hidden, hidden), "matrix"
        yield "shortconv.out_proj.weight", (hidden, hidden), "matrix"
    else:
        yield from _delta_net(shape)
    if shape.architecture in ("gemma2", "qwen3next"):
        yield "post_attention_norm.weight", (hidden,), "norm"
    if shape.architecture != "qwen3next":
        yield "ffn_norm.weight", (hidden,), "norm"
    if shape.architecture == "gemma2":
        yield "post_ffw_norm.weight", (hidden,), "norm"
    yield from _mlp(shape)


def _attention(shape: Shape) -> Iterator[Tensor]:
    hidden, queries, keys = shape.hidden, shape.heads * shape.head, shape.kv_heads * shape.head
    gated = 2 if shape.architecture == "qwen3next" else 1
    yield "attn_q.weight", (gated * queries, hidden), "matrix"
    yield "attn_k.weight", (keys, hidden), "matrix"
    yield "attn_v.weight", (keys, hidden), "wide"
    yield "attn_output.weight", (hidden, queries), "matrix"
    if shape.architecture.startswith(("qwen3", "lfm2")):
        yield "attn_q_norm.weight", (shape.head,), "norm"
        yield "attn_k_norm.weight", (shape.head,), "norm"


def _mamba2(shape: Shape) -> Iterator[Tensor]:
    """Dao & Gu 2024, of one group: the inner width is twice the hidden one."""
    inner = 2 * shape.hidden
    convolved = inner + 2 * shape.state
    yield "ssm_in.weight", (inner + convolved + shape.values, shape.hidden), "matrix"
    yield "ssm_conv1d.weight", (convolved, 4), "small"
    yield "ssm_conv1d.bias", (convolved,), "small"
    yield "ssm_dt.bias", (shape.values,), "small"
    yield "ssm_a", (shape.values, 1), "decay"
    yield "ssm_d", (shape.values, 1), "norm"
    yield "ssm_norm.weight", (1, inner), "norm"
    yield "ssm_out.weight", (shape.hidden, inner), "matrix"


def _delta_net(shape: Shape) -> Iterator[Tensor]:
    """The gated delta rule (Yang et al. 2024) as Qwen3-Next has it."""
    keys, values = shape.keys * shape.state, shape.values * shape.state
    yield "attn_qkv.weight", (2 * keys + values, shape.hidden), "matrix"
    yield "attn_gate.weight", (values, shape.hidden), "matrix"
    yield "ssm_conv1d.weight", (2 * keys + values, 4), "small"
    yield "ssm_dt.bias", (shape.values,), "small"
    yield "ssm_a", (shape.values,), "decay"
    yield "ssm_ba.weight", (2 * shape.values, shape.hidden), "matrix"
    yield "ssm_norm.weight", (shape.state,), "norm"
    yield "ssm_out.weight", (shape.hidden, values), "matrix"


def _mlp(shape: Shape) -> Iterator[Tensor]:
    hidden, inner = shape.hidden, shape.inner
    if not shape.experts:
        for name, size, kind in _projections((), hidden, inner):
            yield f"ffn_{name}.weight", size, kind
        return
    yield "ffn_gate_inp.weight", (shape.experts, hidden), "small"
    for name, size, kind in _projections((shape.experts,), hidden, inner):
        yield f"ffn_{name}_exps.weight", size, kind
    if shape.architecture == "qwen3next":
        yield "ffn_gate_inp_shexp.weight", (hidden,), "small"
        for name, size, kind in _projections((), hidden, inner):
            yield f"ffn_{name}_shexp.weight", size, kind


def _projections(experts: tuple[int, ...], hidden: int, inner: int) -> list[Tensor]:
    rising, falling = (*experts, inner, hidden), (*experts, hidden, inner)
    return [("gate", rising, "matrix"), ("up", rising, "matrix"), ("down", falling, "wide")]


def _format(shape: Shape, name: str, size: tuple[int, ...], kind: str, mix: str) -> Type:
    """As llama.cpp's program chooses: of Q4_K_M in Q6_K are the head, and of ``wide`` matrices those of the first and
    last eighth of the layers and a third of the others."""
    if kind in ("norm", "small", "decay"):
        return Type.F32
    if mix != "Q4_K_M":
        return FORMATS[mix]
    if size[-1] % 256:
        return Type.Q8_0
    eighth = shape.layers // 8
    layer = int(name.split(".")[1]) if kind == "wide" else -1
    is_long = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
    return Type.Q6_K if kind == "head" or (kind == "wide" and is_long) else Type.Q4_K


def _pool(kind: Type) -> NDArray[np.uint8]:
    """[blocks, bytes of one]: numbers around zero, with about ``DEVIATION``."""
    random = np.random.default_rng(0)
    numbers, bytes_each = BLOCKS[kind]
    if kind is Type.BF16:
        values = random.normal(0, DEVIATION, (POOL_BLOCKS // 8, numbers)).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
    blocks = random.integers(0, 256, (POOL_BLOCKS, bytes_each), np.uint8)
    if kind is Type.Q8_0:  # a scale, 32 numbers from -128 to 127
        blocks[:, :2] = _half(DEVIATION / 73.9)
    elif kind is Type.Q4_K:  # two scales, scales and offsets of 32 each in 6 bits, 256 numbers from 0 to 15
        blocks[:, 0:2], blocks[:, 2:4] = _half(DEVIATION / (4.61 * 32)), _half(7.5 * DEVIATION / (4.61 * 32))
        blocks[:, 4:12], blocks[:, 12:16] = 0xA0, 0
    else:  # Q6_K: 256 numbers from -32 to 31, 16 scales in 8 bits, a scale
        blocks[:, 192:208], blocks[:, 208:210] = 16, _half(DEVIATION / (18.5 * 16))
    return blocks


def _half(value: float) -> NDArray[np.uint8]:
    return np.array([value], np.float16).view(np.uint8)


def write(path: Path, shape: Shape, mix: str) -> None:
    """A whole file in ``mix``, one of ``FORMATS``."""
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name("random weights")
    for key, value in _metadata(shape).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{shape.architecture}.{key}", value)
    if shape.architecture == "lfm2":
        heads = [shape.kv_heads if shape.has_attention(layer) else 0 for layer in range(shape.layers)]
        writer.add_head_count_kv(heads)
    add_tokenizer(writer, json.loads(build_tokenizer(shape.vocab, path.name).to_str()), END_ID)
    pools: dict[Type, NDArray[np.uint8]] = {}
    for name, size, kind in tensors(shape):
        stored = _format(shape, name, size, kind, mix)
        if stored is Type.F32:
            writer.add_tensor(name, _floats(name, size, kind))
            continue
        pool = pools.setdefault(stored, _pool(stored))
        numbers, bytes_each = BLOCKS[stored]
        count = int(np.prod(size)) // numbers
        blocks = np.take(pool, range(offset := zlib.crc32(name.encode()) % len(pool), offset + count), 0, mode="wrap")
        writer.add_tensor(name, blocks.reshape(*size[:-1], size[-1] // numbers * bytes_each), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _floats(name: str, size: tuple[int, ...], kind: str) -> NDArray[np.float32]:
    random = np.random.default_rng(zlib.crc32(name.encode()))
    values = random.normal(0, DEVIATION, size)
    if kind == "decay":
        values = -(1 + 15 * random.random(size))
    return (values + (kind == "norm")).astype(np.float32)


def _metadata(shape: Shape) -> dict[str, Any]:
    found: dict[str, Any] = {
        "context_length": 32768 if shape.architecture != "gemma2" else 8192,
        "embedding_length": shape.hidden,
        "block_count": shape.layers,
        "feed_forward_length": shape.inner,
        "vocab_size": shape.vocab,
        "attention.head_count": shape.heads,
        "attention.layer_norm_rms_epsilon": shape.epsilon,
    }
    if shape.heads:
        found |= {
            "attention.key_length": shape.head,
            "attention.value_length": shape.head,
            "rope.freq_base": shape.theta,
            "rope.dimension_count": shape.head // 4 if shape.architecture == "qwen3next" else shape.head,
        }
        found |= {} if shape.architecture == "lfm2" else {"attention.head_count_kv": shape.kv_heads}
    if shape.experts:
        found |= {"expert_count": shape.experts, "expert_used_count": shape.active}
        found |= {"expert_feed_forward_length": shape.inner}
    match shape.architecture:
        case "gemma2":
            found |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
            found |= {"attention.sliding_window": 4096}
        case "qwen3next":
            found |= {"ssm.group_count": shape.keys, "ssm.inner_size": shape.values * shape.state}
            found |= {"expert_shared_feed_forward_length": shape.inner, "full_attention_interval": shape.attends}
        case "mamba2":
            found |= {"ssm.group_count": 1, "ssm.inner_size": 2 * shape.hidden}
        case "lfm2":
            found |= {"shortconv.l_cache": 3}
        case _:
            pass
    if shape.values:
        found |= {"ssm.conv_kernel": 4, "ssm.state_size": shape.state, "ssm.time_step_rank": shape.values}
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("mix", choices=list(FORMATS))
    arguments = parser.parse_args()
    write(arguments.file, SHAPES[arguments.shape], arguments.mix)


if __name__ == "__main__":
    main()
