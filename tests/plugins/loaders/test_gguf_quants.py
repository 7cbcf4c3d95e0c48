"""De-quantisation by torch and by the native operator against the reference of the gguf package, bit for bit."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch
from tests.helpers.lazy import lazy

import fwk_native as native
from fwk_loaders.gguf import quants
from fwk_loaders.gguf.native_blocks import NativeBlocks
from fwk_loaders.gguf.quants import DTYPES, DamagedBlock, dequantise
from fwk_loaders.gguf.types import TENSOR_TYPES, TensorType

gguf = lazy("gguf")

Dequantise = Callable[[torch.Tensor, TensorType, torch.Tensor], None]

QUANTISED = [number for number, stored in TENSOR_TYPES.items() if stored.block_size > 1]
FACTORS = {
    10: (80, 82),
    11: (108,),
    20: (0,),
    23: (0,),
    39: (),
    2: (0,),
    3: (0, 2),
    6: (0,),
    7: (0, 2),
    8: (0,),
    12: (0, 2),
    13: (0, 2),
    14: (208,),
}


def names(number: int) -> str:
    return TENSOR_TYPES[number].name


def reference(blocks: np.ndarray, number: int) -> np.ndarray:
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(number))


def random_blocks(number: int, num_blocks: int, seed: int) -> np.ndarray:
    """Every byte random; only factors that are no finite number are replaced."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (num_blocks, TENSOR_TYPES[number].block_bytes), dtype=np.uint8)
    for start in FACTORS[number]:
        factor = blocks[:, start : start + 2].copy().view("<f2")
        factor[~np.isfinite(factor)] = -0.25
        blocks[:, start : start + 2] = factor.view(np.uint8)
    if names(number) == "MXFP4":
        blocks[:, 0] = np.minimum(blocks[:, 0], 251)  # larger ones overflow float32
    return blocks


@pytest.fixture(params=["torch", "native"])
def way(request: pytest.FixtureRequest) -> Dequantise:
    if request.param == "torch":
        return dequantise
    if native.refusal() is not None:
        pytest.skip("no C++ compiler")
    return NativeBlocks().dequantise


def values_of(way: Dequantise, blocks: np.ndarray, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    values = torch.full((blocks.shape[0] * TENSOR_TYPES[number].block_size,), torch.nan, dtype=dtype)
    way(torch.from_numpy(blocks), TENSOR_TYPES[number], values)
    return values


def assert_same(way: Dequantise, blocks: np.ndarray, number: int) -> None:
    expected = torch.from_numpy(reference(blocks, number).reshape(-1))
    for dtype in DTYPES:
        torch.testing.assert_close(values_of(way, blocks, number, dtype), expected.to(dtype), atol=0, rtol=0)


@pytest.mark.parametrize("number", TENSOR_TYPES, ids=names)
def test_sizes_are_ggmls(number: int):
    expected = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)]
    assert (TENSOR_TYPES[number].block_size, TENSOR_TYPES[number].block_bytes) == expected
    assert TENSOR_TYPES[number].name == gguf.GGMLQuantizationType(number).name


@pytest.mark.parametrize("number", QUANTISED, ids=names)
def test_random_blocks(way: Dequantise, number: int):
    for seed in range(3):
        assert_same(way, random_blocks(number, 1 + 97 * seed, seed), number)


@pytest.mark.parametrize("number", QUANTISED, ids=names)
def test_extreme_blocks(way: Dequantise, number: int):
    for fill in (0x00, 0x0F, 0x55, 0x7F, 0x80, 0xAA, 0xF0, 0xFF):
        blocks = np.full((2, TENSOR_TYPES[number].block_bytes), fill, np.uint8)
        for start in FACTORS[number]:
            blocks[:, start : start + 2] = np.array([0.5, -0.125], "<f2").view(np.uint8).reshape(2, 2)
        if names(number) == "MXFP4" and fill == 0xFF:
            with pytest.raises(DamagedBlock):
                values_of(way, blocks, number)
        else:
            assert_same(way, blocks, number)


@pytest.mark.parametrize("number", QUANTISED, ids=names)
def test_chunks_join(number: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quants, "CHUNK_VALUES", 3 * TENSOR_TYPES[number].block_size)
    assert_same(dequantise, random_blocks(number, 10, 7), number)


@pytest.mark.parametrize("number", [2, 3, 6, 7, 8], ids=names)
def test_quantised_values_come_back_close(number: int):
    """The other direction: ggml's own quantiser, not only its de-quantiser, agrees with us about the layout."""
    values = np.random.default_rng(1).normal(0, 1, (4, 64)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType(number)).reshape(8, -1)
    found = values_of(dequantise, blocks, number).view(4, 64).numpy()
    assert np.abs(found - values).max() < (0.02 if number == 8 else 0.35)


@pytest.mark.parametrize("number", QUANTISED, ids=names)
def test_factors_that_are_no_numbers_are_refused(way: Dequantise, number: int):
    for start, bad in product(FACTORS[number], (np.inf, -np.inf, np.nan)):
        blocks = random_blocks(number, 5, 2)
        blocks[3, start : start + 2] = np.array([bad], "<f2").view(np.uint8)
        with pytest.raises(DamagedBlock):
            values_of(way, blocks, number)
