"""Tiny models in every quantised form, each with a twin: a plain folder of exactly the numbers its weights stand for.

The numbers are made and packed here with numpy, from the published descriptions of the layouts, and share no code with
the plugins that read them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from fwk_loaders.dummy.tokenizer import TOKENIZER_CONFIG, build_tokenizer
from tests.helpers.lazy import lazy
from tests.helpers.tiny import TINY

gguf = lazy("gguf")

Array = np.ndarray[Any, Any]

CONFIG: dict[str, Any] = {**TINY, "model_type": "llama", "tie_word_embeddings": False}

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Twins:
    """``path`` served with ``options`` must give the tokens that ``plain`` gives."""

    kind: str
    path: Path
    options: dict[str, Any]
    plain: Path


@dataclass
class Encoded:
    """One layer: the tensors below its prefix, and the values they stand for, [out, in] float32."""

    tensors: dict[str, torch.Tensor]
    values: Array


Encoder = Callable[[np.random.Generator, int, int], Encoded]


def layer_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear layer below ``model.layers.I.``."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    return {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def prefixes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(out, in) of every linear layer of the model, the head left out."""
    return {
        f"model.layers.{i}.{name}": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in layer_shapes(config).items()
    }


def others(config: Mapping[str, Any], rng: np.random.Generator) -> dict[str, Array]:
    """Embedding, norms and, unless tied, the head."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    names = [f"model.layers.{i}.{n}layernorm" for i in range(config["num_hidden_layers"]) for n in NORMS]
    found = {f"{name}.weight": np.ones(hidden, np.float32) for name in [*names, "model.norm"]}
    found["model.embed_tokens.weight"] = rng.normal(0, 0.5, (vocab, hidden)).astype(np.float32)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = rng.normal(0, 0.3, (vocab, hidden)).astype(np.float32)
    return found


NORMS = ("input_", "post_attention_")


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> Path:
    """A checkpoint as on model hubs, with a tokeniser of bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(TOKENIZER_CONFIG))
    build_tokenizer(config["vocab_size"], "test").save(str(folder / "tokenizer.json"))
    save_file(
        {name: (torch.from_numpy(x) if isinstance(x, np.ndarray) else x).contiguous() for name, x in tensors.items()},
        folder / "model.safetensors",
    )
    return folder


def pack_words(numbers: Array, axis: int, bits: int) -> torch.Tensor:
    """Unsigned numbers to int32 words, the first in the lowest bits; zeros fill the last word."""
    per_word = 32 // bits
    moved = np.moveaxis(numbers, axis, -1).astype(np.uint32)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_word)])
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // per_word), np.uint32)
    for place in range(per_word):
        words |= moved[..., place::per_word] << np.uint32(bits * place)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


@dataclass
class Ints:
    """Known integers of one layer: q [out, in], scales [out, groups] float16 values, zeros [out, groups]."""

    q: Array
    scales: Array
    zeros: Array
    group_of: Array

    @property
    def values(self) -> Array:
        s, z = self.scales[:, self.group_of], self.zeros[:, self.group_of]
        return ((self.q - z).astype(np.float32) * s.astype(np.float32)).astype(np.float32)

    @staticmethod
    def random(
        rng: np.random.Generator, out: int, inp: int, bits: int, group: int, *, zero: int | None, shuffle: bool = False
    ) -> Ints:
        groups, high = inp // group, 2**bits
        scales = (rng.uniform(0.5, 1.5, (out, groups)) * 0.2 / high).astype(np.float16)
        zeros = rng.integers(1, high, (out, groups)) if zero is None else np.full((out, groups), zero)
        group_of = np.arange(inp) // group
        return Ints(
            rng.integers(0, high, (out, inp)), scales, zeros, rng.permutation(group_of) if shuffle else group_of
        )


def gptq(
    bits: int = 4,
    group: int = 32,
    *,
    zero: int | None = None,
    act_order: bool = False,
    has_order: bool = True,
    v2: bool = False,
) -> Encoder:
    """Packed as by AutoGPTQ: along inputs, zeros less one (v2: as they are)."""

    def encode(rng: np.random.Generator, out: int, inp: int) -> Encoded:
        x = Ints.random(rng, out, inp, bits, inp if group == -1 else group, zero=zero, shuffle=act_order)
        tensors = {
            "qweight": pack_words(x.q.T, 0, bits),
            "qzeros": pack_words(x.zeros.T - (0 if v2 else 1), 1, bits),
            "scales": torch.from_numpy(np.ascontiguousarray(x.scales.T)),
        }
        if has_order:
            tensors["g_idx"] = torch.from_numpy(x.group_of.astype(np.int32))
        return Encoded(tensors, x.values)

    return encode


def awq(group: int = 32) -> Encoder:
    """Packed as by AutoAWQ's GEMM version: along outputs, in its order."""

    def ordered(numbers: Array) -> Array:
        return numbers.reshape(numbers.shape[0], -1, 8)[:, :, AWQ_ORDER].reshape(numbers.shape)

    def encode(rng: np.random.Generator, out: int, inp: int) -> Encoded:
        x = Ints.random(rng, out, inp, 4, group, zero=None)
        return Encoded(
            {
                "qweight": pack_words(ordered(x.q.T), 1, 4),
                "qzeros": pack_words(ordered(x.zeros.T), 1, 4),
                "scales": torch.from_numpy(np.ascontiguousarray(x.scales.T)),
            },
            x.values,
        )

    return encode


def compressed_packed(bits: int = 4, group: int = 32, *, symmetric: bool = True, act_order: bool = False) -> Encoder:
    """compressed-tensors' pack-quantized."""

    def encode(rng: np.random.Generator, out: int, inp: int) -> Encoded:
        middle = 2 ** (bits - 1)
        size = inp if group == -1 else group
        x = Ints.random(rng, out, inp, bits, size, zero=middle if symmetric else None, shuffle=act_order)
        tensors = {
            "weight_packed": pack_words(x.q, 1, bits),
            "weight_scale": torch.from_numpy(x.scales),
            "weight_shape": torch.tensor([out, inp]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack_words(x.zeros, 0, bits)
        if act_order:
            tensors["weight_g_idx"] = torch.from_numpy(x.group_of.astype(np.int32))
        return Encoded(tensors, x.values)

    return encode


def compressed_int8(*, symmetric: bool = True) -> Encoder:
    """compressed-tensors' int-quantized, a scale per output."""

    def encode(rng: np.random.Generator, out: int, inp: int) -> Encoded:
        x = Ints.random(rng, out, inp, 8, inp, zero=128 if symmetric else None)
        tensors = {
            "weight": torch.from_numpy((x.q - 128).astype(np.int8)),
            "weight_scale": torch.from_numpy(x.scales),
        }
        if not symmetric:
            tensors["weight_zero_point"] = torch.from_numpy((x.zeros - 128).astype(np.int8))
        return Encoded(tensors, x.values)

    return encode


def float8(per: str = "tensor", *, has_input_scale: bool = False) -> Encoder:
    """e4m3 numbers with a scale per tensor, stored as [1] or [], or per channel, stored as [out, 1] or [out]."""

    def encode(rng: np.random.Generator, out: int, inp: int) -> Encoded:
        numbers = torch.from_numpy(rng.normal(0, 60, (out, inp)).astype(np.float32)).to(torch.float8_e4m3fn)
        is_per_channel = per in ("channel", "vector")
        scale = rng.uniform(0.5, 1.5, (out, 1) if is_per_channel else (1,)).astype(np.float32) * 0.001
        tensors = {"weight": numbers, "weight_scale": torch.from_numpy(scale)}
        if per in ("scalar", "vector"):
            tensors["weight_scale"] = tensors["weight_scale"].squeeze()
        if has_input_scale:
            tensors["input_scale"] = torch.tensor(0.01)
        return Encoded(tensors, e4m3(numbers.view(torch.uint8).numpy()) * scale)

    return encode


def float8_blocks(name: str, *, is_four_dimensional: bool = False) -> Encoder:
    """e4m3 numbers with a scale for each block of 128 x 128, as DeepSeek-V3 and Qwen3-FP8 are stored."""

    def encode(rng: np.random.Generator, out: int, inp: int) -> Encoded:
        numbers = torch.from_numpy(rng.normal(0, 60, (out, inp)).astype(np.float32)).to(torch.float8_e4m3fn)
        scale = rng.uniform(0.2, 1.8, (-(-out // 128), -(-inp // 128))).astype(np.float32) * 0.0005
        of_values = np.kron(scale, np.ones((128, 128), np.float32))[:out, :inp]
        stored = scale[:, None, :, None] if is_four_dimensional else scale
        tensors = {"weight": numbers, name: torch.from_numpy(stored)}
        return Encoded(tensors, e4m3(numbers.view(torch.uint8).numpy()) * of_values)

    return encode


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def float4(form: str) -> Encoder:
    """e2m1 numbers, two in a byte, the first in the low half. form: ``modelopt`` or ``compressed`` (NVFP4: e4m3 scales
    for each 16, and a factor, which compressed-tensors stores as its reciprocal), or ``mx`` (powers of two for 32).
    """

    def encode(rng: np.random.Generator, out: int, inp: int) -> Encoded:
        codes = rng.integers(0, 16, (out, inp), dtype=np.uint8)
        packed = torch.from_numpy(codes[:, ::2] | codes[:, 1::2] << 4)
        numbers = np.where(codes > 7, -1, 1).astype(np.float32) * E2M1[codes & 7]
        if form == "mx":
            exponents = rng.integers(120, 124, (out, inp // 32), dtype=np.uint8)
            scales = 2.0 ** (exponents.astype(np.float32) - 127)
            tensors = {"weight_packed": packed, "weight_scale": torch.from_numpy(exponents)}
            return Encoded(tensors, numbers * np.repeat(scales, 32, 1))
        scales = torch.from_numpy(rng.uniform(50, 448, (out, inp // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
        factor = np.float32(2.0 ** -rng.integers(12, 14))
        names = ("weight", "weight_scale_2") if form == "modelopt" else ("weight_packed", "weight_global_scale")
        stored = torch.tensor(factor) if form == "modelopt" else torch.tensor([1 / factor])
        input_scale = {"input_scale": torch.tensor(0.01)} if form == "modelopt" else {}
        tensors = {names[0]: packed, "weight_scale": scales, names[1]: stored, **input_scale}
        return Encoded(tensors, numbers * np.repeat(e4m3(scales.view(torch.uint8).numpy()) * factor, 16, 1))

    return encode


def e4m3(codes: Array) -> Array:
    """By the definition: sign, four bits of exponent with bias 7, three of fraction, and subnormals."""
    sign, exponent, fraction = codes >> 7, (codes >> 3) & 15, codes & 7
    size = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7.0), fraction / 8 * 2.0**-6)
    return np.where(sign > 0, -size, size).astype(np.float32)


def compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    """A ``quantization_config`` of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "actorder": None, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


GPTQ_CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}


@dataclass(frozen=True)
class Kind:
    """A quantised form of a safetensors checkpoint and the method that reads it."""

    method: str
    encoder: Encoder
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])  # of the model, where it cannot be as small as others


WHOLE_BLOCKS = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}

CHECKPOINTS: dict[str, Kind] = {
    "int4-gptq": Kind("int4", gptq(), GPTQ_CONFIG),
    "int4-gptq-act-order": Kind("int4", gptq(act_order=True), {**GPTQ_CONFIG, "desc_act": True}),
    "int4-gptq-v2": Kind("int4", gptq(v2=True), {**GPTQ_CONFIG, "checkpoint_format": "gptq_v2"}),
    "int4-gptq-one-group": Kind("int4", gptq(group=-1, has_order=False), {**GPTQ_CONFIG, "group_size": -1}),
    "int4-awq": Kind(
        "int4", awq(), {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    ),
    "int4-compressed": Kind(
        "int4",
        compressed_packed(),
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "int4-compressed-zeros": Kind(
        "int4",
        compressed_packed(symmetric=False),
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    ),
    "int4-compressed-act-order": Kind(
        "int4",
        compressed_packed(act_order=True),
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
    ),
    "int8-compressed": Kind(
        "int8", compressed_int8(), compressed_config("int-quantized", num_bits=8, strategy="channel")
    ),
    "int8-compressed-zeros": Kind(
        "int8",
        compressed_int8(symmetric=False),
        compressed_config("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    ),
    "int8-packed": Kind(
        "int8", compressed_packed(8, -1), compressed_config("pack-quantized", num_bits=8, strategy="channel")
    ),
    "int8-gptq": Kind("int8", gptq(8), {**GPTQ_CONFIG, "bits": 8}),
    "fp8": Kind("fp8", float8("scalar", has_input_scale=True), {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-compressed-tensor": Kind(
        "fp8", float8("tensor"), compressed_config("float-quantized", num_bits=8, type="float", strategy="tensor")
    ),
    "fp8-compressed-channel": Kind(
        "fp8", float8("channel"), compressed_config("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "fp8-block": Kind(
        "fp8",
        float8_blocks("weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]},
        WHOLE_BLOCKS,
    ),
    "fp8-compressed-block": Kind(
        "fp8",
        float8_blocks("weight_scale"),
        compressed_config("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        WHOLE_BLOCKS,
    ),
    "fp8-modelopt": Kind("fp8", float8("scalar", has_input_scale=True), {"quant_method": "modelopt"}),
    "fp8-modelopt-channel": Kind("fp8", float8("vector"), {"quant_method": "modelopt"}),
    "fp8-modelopt-block": Kind(
        "fp8", float8_blocks("weight_scale", is_four_dimensional=True), {"quant_method": "modelopt"}, WHOLE_BLOCKS
    ),
    "fp4-modelopt": Kind("fp4", float4("modelopt"), {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    "fp4-compressed": Kind(
        "fp4",
        float4("compressed"),
        compressed_config("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
    "fp4-compressed-mx": Kind(
        "fp4",
        float4("mx"),
        compressed_config("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
    ),
}


def checkpoint_twins(name: str, folder: Path, seed: int = 0, **changes: Any) -> Twins:
    """A quantised safetensors checkpoint (``CHECKPOINTS``) and its twin. changes: of config.json."""
    kind, rng = CHECKPOINTS[name], np.random.default_rng(seed)
    config = {**CONFIG, **kind.sizes, **changes}
    rest = others(config, rng)
    layers = {prefix: kind.encoder(rng, *shape) for prefix, shape in prefixes(config).items()}
    stored = {f"{prefix}.{part}": x for prefix, layer in layers.items() for part, x in layer.tensors.items()}
    values = {f"{prefix}.weight": layer.values for prefix, layer in layers.items()}
    path = write_folder(folder / "quantised", {**config, "quantization_config": kind.config}, {**rest, **stored})
    return Twins(name, path, {}, write_folder(folder / "plain", config, {**rest, **values}))


def round_int8(x: Array) -> Array:
    """Symmetric, a scale per row."""
    scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
    return np.round(x / scale) * scale


def round_int4(x: Array, group: int = 64) -> Array:
    """With a zero point per group."""
    grouped = x.reshape(x.shape[0], -1, group)
    low, high = np.minimum(grouped.min(-1, keepdims=True), 0), np.maximum(grouped.max(-1, keepdims=True), 0)
    scale = (high - low) / np.float32(15)
    zero = np.round(-low / scale)
    return ((np.clip(np.round(grouped / scale) + zero, 0, 15) - zero) * scale).reshape(x.shape)


def round_fp8(x: Array) -> Array:
    """A scale per row; rounds to the nearest e4m3 number, to even ones from the middle."""
    scale = np.abs(x).max(1, keepdims=True) / np.float32(448)
    levels = np.sort(e4m3(np.arange(127, dtype=np.uint8)))
    size = np.abs(x / scale)
    right = np.clip(np.searchsorted(levels, size), 1, 126)
    down, up = size - levels[right - 1], levels[right] - size
    nearest = np.where((down < up) | ((down == up) & (right % 2 == 1)), right - 1, right)
    return (np.sign(x) * levels[nearest] * scale).astype(np.float32)


def round_fp4(x: Array) -> Array:
    """NVFP4: to the nearest e2m1 number, to the even one from the middle, with e4m3 scales for each 16."""
    factor = np.abs(x).max() / np.float32(6 * 448)
    grouped = x.reshape(x.shape[0], -1, 16)
    wanted = torch.from_numpy(np.abs(grouped).max(-1, keepdims=True) / (6 * factor)).to(torch.float8_e4m3fn)
    scale = e4m3(wanted.view(torch.uint8).numpy()) * factor
    size = np.abs(grouped) / scale
    distance = np.abs(size[..., None] - E2M1)
    # Of two at the same distance the even code: codes are tried in that order.
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    nearest = E2M1[order][distance[..., order].argmin(-1)]
    return (np.sign(grouped) * nearest * scale).reshape(x.shape).astype(np.float32)


ONLINE: dict[str, Callable[[Array], Array]] = {
    "int8": round_int8,
    "int4": round_int4,
    "fp8": round_fp8,
    "fp4": round_fp4,
}


def online_twins(method: str, folder: Path, seed: int = 0, **changes: Any) -> Twins:
    """A plain checkpoint to be quantised while loading, and one that already was. The embedding is left as it is."""
    rng, config = np.random.default_rng(seed), {**CONFIG, **changes}
    rest = others(config, rng)
    weights = {
        f"{prefix}.weight": rng.normal(0, 0.1, shape).astype(np.float32) for prefix, shape in prefixes(config).items()
    }
    rounded = {name: ONLINE[method](x).astype(np.float32) for name, x in weights.items()}
    twin = {**config, "tie_word_embeddings": False}
    rounded["lm_head.weight"] = ONLINE[method](rest.get("lm_head.weight", rest["model.embed_tokens.weight"]))
    return Twins(
        f"{method}-online",
        write_folder(folder / "full", config, {**rest, **weights}),
        {"quantization": method},
        write_folder(folder / "plain", twin, {**rest, **rounded}),
    )


def linears(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The prefixes of a checkpoint's linear layers: all but the head and a mixture's router."""
    return [
        name.removesuffix(".weight")
        for name, x in tensors.items()
        if x.dim() == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", ".mlp.gate.weight"))
    ]


def twins_of(source: Path, name: str, folder: Path, seed: int = 0) -> Twins:
    """Quantise any plain checkpoint: as in ``CHECKPOINTS`` (linear layers get random numbers), or ``online-NAME``.

    All groups are of 32. What MLA multiplies head by head stays plain while loading, as the embedding does.
    """
    tensors = load_file(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    rng = np.random.default_rng(seed)
    kind, method = CHECKPOINTS.get(name), name.removeprefix("online-")
    stored, plain = dict(tensors), dict(tensors)
    options: dict[str, Any] = {}
    if kind is None:
        options = {"quantization": method} | ({"int4_group_size": 32} if method == "int4" else {})
        rounding = partial(round_int4, group=32) if method == "int4" else ONLINE[method]
        head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
        for prefix in linears(tensors):
            if not prefix.endswith("kv_b_proj"):
                plain[f"{prefix}.weight"] = torch.from_numpy(rounding(tensors[f"{prefix}.weight"].numpy()))
        plain["lm_head.weight"] = torch.from_numpy(rounding(head.numpy()).astype(np.float32))
        twin = {**config, "tie_word_embeddings": False}
    else:
        for prefix in linears(tensors):
            layer = kind.encoder(rng, *tensors[f"{prefix}.weight"].shape)
            del stored[f"{prefix}.weight"]
            stored |= {f"{prefix}.{part}": x for part, x in layer.tensors.items()}
            plain[f"{prefix}.weight"] = torch.from_numpy(layer.values)
        twin, config = config, {**config, "quantization_config": kind.config}
    path = write_folder(folder / "quantised", config, stored)
    return Twins(name, path, options, write_folder(folder / "plain", twin, plain))


def random_blocks(rng: np.random.Generator, type_name: str, rows: int, columns: int) -> Array:
    """Blocks of a ggml type with any integers and small finite factors: [rows, bytes]."""
    kind = gguf.GGMLQuantizationType[type_name]
    block_size, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_size, num_bytes), dtype=np.uint8)
    for start in {
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "MXFP4": (),
    }.get(type_name, (0,)):
        size = {
            "Q8_0": 0.001,
            "Q4_K": 3e-4,
            "Q5_K": 3e-4,
            "Q6_K": 5e-5,
            "Q2_K": 3e-3,
            "Q3_K": 1e-3,
            "IQ4_NL": 1e-3,
            "IQ4_XS": 5e-5,
        }.get(type_name, 0.01)
        factors = rng.normal(0, size, len(blocks)).astype("<f2")
        blocks[:, start : start + 2] = factors.view(np.uint8).reshape(-1, 2)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(118, 122, len(blocks))
    return blocks.reshape(rows, -1)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_twins(types: Mapping[str, str] | str, folder: Path, seed: int = 0, **changes: Any) -> Twins:
    """A Llama in a GGUF file with random blocks, and what the gguf package makes of them.

    types: the ggml type of all weights, or by the end of their Hugging Face name (``*`` for the rest).
    """
    rng, config = np.random.default_rng(seed), {**CONFIG, **changes}
    by_name = {"*": types} if isinstance(types, str) else dict(types)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    _write_metadata(writer, config)
    values: dict[str, Array] = {}

    def add(name: str, stored: str, shape: tuple[int, int], heads: int = 0) -> None:
        kind = next((t for end, t in by_name.items() if name.endswith(end)), by_name["*"])
        if kind == "F16":
            data: Array = rng.normal(0, 0.1, shape).astype(np.float16)
            values[f"{name}.weight"] = data.astype(np.float32)
            raw = None
        else:
            data, raw = random_blocks(rng, kind, *shape), gguf.GGMLQuantizationType[kind]
            values[f"{name}.weight"] = gguf.quants.dequantize(data, raw)
        if heads:  # the converter's order of rows: the halves of each head take turns
            data = data.reshape(heads, 2, shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(shape[0], -1)
        writer.add_tensor(f"{stored}.weight", np.ascontiguousarray(data), raw_dtype=raw)

    hidden, vocab = config["hidden_size"], config["vocab_size"]
    add("model.embed_tokens", "token_embd", (vocab, hidden))
    if not config["tie_word_embeddings"]:
        add("lm_head", "output", (vocab, hidden))
    norms = {"model.norm": "output_norm"}
    for i in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config).items():
            heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name[10:], 0)
            add(f"model.layers.{i}.{name}", f"blk.{i}.{GGUF_NAMES[name]}", shape, heads)
        norms |= {
            f"model.layers.{i}.input_layernorm": f"blk.{i}.attn_norm",
            f"model.layers.{i}.post_attention_layernorm": f"blk.{i}.ffn_norm",
        }
    for name, stored in norms.items():
        values[f"{name}.weight"] = np.ones(hidden, np.float32)
        writer.add_tensor(f"{stored}.weight", values[f"{name}.weight"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = write_folder(folder / "plain", config, values)
    return Twins("gguf", path, {"quantization": "gguf", "dtype": "float32"}, plain)


def gguf_of(source: Path, folder: Path, kind: str = "Q8_0") -> Twins:
    """A checkpoint of Qwen3-MoE as llama.cpp's converter writes it, by the gguf package's names; and what it holds."""
    config = json.loads((source / "config.json").read_text())
    tensors = {name: x.float().numpy() for name, x in load_file(source / "model.safetensors").items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "qwen3moe")
    _write_metadata(writer, {**config, "rope_theta": config["rope_parameters"]["rope_theta"]})
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config["num_hidden_layers"])
    stacked: dict[str, list[str]] = {}
    for name in sorted(tensors, key=lambda name: [int(x) if x.isdigit() else x for x in name.split(".")]):
        stacked.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(name)
    raw = gguf.GGMLQuantizationType[kind]
    for name, parts in stacked.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        data = np.stack([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
        if data.ndim == 1 or name.endswith("mlp.gate.weight"):
            writer.add_tensor(stored, data)
            continue
        blocks = gguf.quants.quantize(data, raw)
        values = gguf.quants.dequantize(blocks, raw)
        tensors |= dict(zip(parts, values if len(parts) > 1 else [values], strict=True))
        writer.add_tensor(stored, blocks, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    plain = folder / "plain"
    plain.mkdir()
    for file in source.glob("*.json"):
        (plain / file.name).write_bytes(file.read_bytes())
    save_file(
        {name: torch.from_numpy(np.ascontiguousarray(x)) for name, x in tensors.items()}, plain / "model.safetensors"
    )
    return Twins("gguf", path, {"quantization": "gguf", "dtype": "float32"}, plain)


Change = Callable[[str, Array], "list[tuple[str, Array]]"]


OLDER = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
"""How older configurations spell some fields."""


def gguf_like(
    source: Path,
    path: Path,
    architecture: str,
    numbers: Mapping[str, str],
    *,
    interleaves: bool,
    more: Mapping[str, Any] | None = None,
    change: Change | None = None,
    quantises: str = "",
    of_attention: str = "",
    values: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint as llama.cpp's converter writes it in float32, by the gguf package's names.

    numbers: keys of float metadata and the fields of config.json they are. interleaves: the halves of Q's and K's heads
    take turns. more: further metadata. change: what the converter makes of a tensor: others, by name and data.
    quantises: the type that experts are stored in. of_attention: that of attention's matrices which go by one name here
    and there. ``values`` gets the numbers that leaves, by the names they had.
    """
    config = json.loads((source / "config.json").read_text())
    config = {name: config[old] for name, old in OLDER.items() if old in config} | config
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    tensors: dict[str, Array] = {}
    for name, x in load_file(source / "model.safetensors").items():
        tensors |= dict([(name, x.float().numpy())] if change is None else change(name, x.float().numpy()))
    writer = gguf.GGUFWriter(path, architecture)
    rope: dict[str, Any] = config.get("rope_parameters") or {"rope_theta": 10000.0}
    _write_metadata(writer, {**config, "rope_theta": rope.get("full_attention", rope)["rope_theta"]})
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if f"{architecture}.attention.key_length" not in (more or {}):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    for key, name in numbers.items():
        writer.add_float32(f"{architecture}.{key}", float(config[name]))
    for key, value in (more or {}).items():
        {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            key, value
        )
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    _write_experts(writer, config)
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    stacked: dict[str, list[str]] = {}
    for name in sorted(tensors, key=lambda name: [int(x) if x.isdigit() else x for x in name.split(".")]):
        stacked.setdefault(re.sub(r"experts\.\d+\.", "experts.", name), []).append(name)
    for name, parts in stacked.items():
        stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        data = np.stack([tensors[part] for part in parts]) if len(parts) > 1 else tensors[parts[0]]
        data = np.ascontiguousarray(_as_stored(name, data, architecture, head_dim if interleaves else 0))
        is_attention = ".attn_" in stored and data.ndim == 2 and values is not None and name in values
        kind = quantises if stored.endswith("_exps.weight") else of_attention if is_attention else ""
        if not kind:
            writer.add_tensor(stored, data)
            continue
        raw = gguf.GGMLQuantizationType[kind]
        blocks = gguf.quants.quantize(data, raw)
        writer.add_tensor(stored, blocks, raw_dtype=raw)
        if values is not None and (len(parts) > 1 or is_attention):
            held = gguf.quants.dequantize(blocks, raw)
            values |= dict(zip(parts, held if len(parts) > 1 else [held], strict=True))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _as_stored(name: str, data: Array, architecture: str, interleaved_size: int) -> Array:
    """What the converter does to the numbers. interleaved_size: of heads whose halves take turns; 0: they do not."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return data + 1
    if interleaved_size and re.search(r"\.[qk]_proj\.", name):
        pairs = data.reshape(len(data) // interleaved_size, 2, interleaved_size // 2, -1)
        return pairs.swapaxes(1, 2).reshape(data.shape)
    return data


COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _write_experts(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    count = next((config[name] for name in COUNTS if config.get(name)), 0)
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])


def _write_metadata(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    eps = next(
        (config[name] for name in ("norm_epsilon", "layer_norm_eps", "layer_norm_epsilon") if name in config), None
    )
    if eps is None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(eps)
    writer.add_rope_freq_base(config["rope_theta"])
    write_tokens(writer, config["vocab_size"])


def write_tokens(writer: gguf.GGUFWriter, vocab_size: int) -> None:
    """The tokens of the tiny tokeniser, as byte-level BPE."""
    vocab = build_tokenizer(vocab_size, "test").get_vocab()
    tokens = [*sorted(vocab, key=lambda text: vocab[text])[:-1], "he"]  # the format wants a merge, which wants a token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if 256 <= i < 259 else 1 for i in range(len(tokens))])
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(258)
