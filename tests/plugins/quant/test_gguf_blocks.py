"""Blocks of GGUF files, bit for bit as the gguf package reads them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.lazy import lazy
from tests.helpers.quantised import random_blocks

from fwk.errors import ModelLoadError
from fwk.interfaces.quant import LinearShape, QuantContext
from fwk_native.thread_pool import ThreadPool
from fwk_quant.gguf import GGUFOptions
from fwk_quant.gguf.blocks import BLOCK_TYPES, BlockType
from fwk_quant.gguf.method import GGUFMethod

gguf = lazy("gguf")

CPU = torch.device("cpu")


def unpacked(kind: BlockType, data: np.ndarray) -> np.ndarray:
    """Through the form kept in memory, in as many bytes as the file's."""
    fields = kind.split(torch.from_numpy(data).view(data.shape[0], -1, kind.num_bytes))
    assert sum(field.untyped_storage().nbytes() for field in fields) == data.nbytes
    return kind.unpack(fields).numpy()


@pytest.mark.parametrize("layout", BLOCK_TYPES)
def test_random_blocks(layout: str) -> None:
    kind, name = BLOCK_TYPES[layout], layout.partition(":")[2]
    data = random_blocks(np.random.default_rng(1), name, 70, 1024)
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(unpacked(kind, data), wanted)


@pytest.mark.parametrize("layout", BLOCK_TYPES)
def test_crafted_blocks(layout: str) -> None:
    """All bits set, none, one at a time; factors of every size, subnormal ones and negative ones."""
    kind, name = BLOCK_TYPES[layout], layout.partition(":")[2]
    single = np.packbits(np.eye(8 * kind.num_bytes, dtype=np.uint8), axis=1)
    data = np.concatenate([single, 255 - single, np.zeros_like(single[:1]), np.full_like(single[:1], 255)])
    for seed, start in enumerate(kind.factors):
        rng = np.random.default_rng(seed)
        factors = (rng.choice([-1, 1], len(data)) * 2.0 ** rng.uniform(-24, 10, len(data))).astype("<f2")
        data[:, start : start + 2] = factors.view(np.uint8).reshape(-1, 2)
    if kind.exponent is not None:
        data[:, kind.exponent] = np.arange(len(data)) % 252  # larger ones overflow float32
    wanted = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    np.testing.assert_array_equal(unpacked(kind, data), wanted)


def test_what_the_package_quantises() -> None:
    values = np.random.default_rng(0).normal(size=(8, 256)).astype(np.float32)
    for name in ("Q8_0", "Q4_0", "Q4_1"):
        kind = BLOCK_TYPES[f"gguf:{name}"]
        data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])
        mine = unpacked(kind, data)
        assert np.abs(mine - values).max() < {"Q8_0": 0.02, "Q4_0": 0.3, "Q4_1": 0.3}[name]


@pytest.mark.parametrize("layout", BLOCK_TYPES)
def test_infinite_factors_are_refused(layout: str) -> None:
    kind = BLOCK_TYPES[layout]
    method = GGUFMethod(QuantContext(CPU, torch.float32, {}, GGUFOptions(), ThreadPool()))
    shape = LinearShape(kind.num_values, (2,), torch.float32, CPU, "layer", layout)
    for start in kind.factors:
        for value in (np.inf, np.nan):
            blocks = torch.zeros(2, 1, kind.num_bytes, dtype=torch.uint8)
            blocks[1, 0, start : start + 2] = torch.from_numpy(np.array([value], "<f2").view(np.uint8))
            with pytest.raises(ModelLoadError, match="layer: the scale of a block is infinite or not a number"):
                method.finish({"weight": blocks}, shape)
    if kind.exponent is not None:
        with pytest.raises(ModelLoadError, match="layer: the scale of a block is infinite or not a number"):
            method.finish({"weight": torch.full((2, 1, kind.num_bytes), 255, dtype=torch.uint8)}, shape)
