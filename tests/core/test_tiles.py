"""Products of blocks by AMX, emulated and by the machine where it can, against Intel's manual in exact numbers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import fwk_native as native

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

PLUGINS = Path(__file__).parents[2] / "plugins"
FLOATS = "quant/fwk_quant/_linear_cpu/floats.cpp"
INTEGERS = "quant/fwk_quant/_linear_cpu/integers.cpp"
ATTENTION = "attention/fwk_attention/cpu/attention_bfloat16.cpp"

SOURCE = """
#include "fwk/tiles.h"
using namespace fwk;

#define SIZES int64_t rows, int64_t columns, int64_t words, int64_t steps
#define ARGUMENTS SIZES, const char* x, const int32_t* w, void* sums

template <class Numbers>
void multiply(ARGUMENTS) {
    const tiles::Region region;
    tiles::begin(rows, 32, 1 + words % 16);  // laid out for another step
    tiles::begin(rows, columns, words);
    tiles::read(sums, 128);
    tiles::steps<Numbers>(steps, steps * words * 4, 128, [&](int64_t k) {
        const int32_t* left = w + k * words * 32;
        return tiles::Operands{x + k * words * 4, left, left + 16};
    });
    tiles::write(sums, 128);
}

template <bool IS_FEW, int N>
void multiply_strip(ARGUMENTS) {
    const tiles::Region region;
    tiles::begin(rows, 32, 16);  // laid out for a block
    tiles::lay_strips(rows, IS_FEW ? 16 : words, IS_FEW ? words : 1);
    tiles::read_strip<N>((float*)sums, 128);
    tiles::strip_steps<tiles::Bytes, N, IS_FEW>(
        steps, steps * words * 4, 128, [&](int64_t k) { return x + k * words * 4; },
        [&](int64_t k, int tile) { return w + k * words * 32 + tile * 16; });
    tiles::write_strip<N>((float*)sums, 128);
    tiles::begin(rows, 32, 16);  // and again
}

template <bool IS_FEW>
void multiply_strips(ARGUMENTS) {
    if (columns == 16) multiply_strip<IS_FEW, 1>(rows, columns, words, steps, x, w, sums);
    else multiply_strip<IS_FEW, 2>(rows, columns, words, steps, x, w, sums);
}

extern "C" {
void strips(ARGUMENTS) { multiply_strips<false>(rows, columns, words, steps, x, w, sums); }
void strips_of_fewer(ARGUMENTS) { multiply_strips<true>(rows, columns, words, steps, x, w, sums); }
void pairs(ARGUMENTS) { multiply<tiles::Pairs>(rows, columns, words, steps, x, w, sums); }
void bytes(ARGUMENTS) { multiply<tiles::Bytes>(rows, columns, words, steps, x, w, sums); }
#ifdef FWK_EMULATED_TILES
int64_t held() {
    const tiles::Region region;
    tiles::begin(1, 32, 1);
    return tiles::emulated_tiles_in_use();
}
void too_many_rows() { tiles::begin(33, 32, 16); }
void rows_of_no_bytes() { tiles::begin(4, 32, 0); }
void before_they_are_configured() { tiles::steps<tiles::Pairs>(1, 0, 0, [](int64_t) { return tiles::Operands{}; }); }
void after_they_are_released() {
    { const tiles::Region region; tiles::begin(1, 32, 1); }
    tiles::zero<0>();
}
void lower_half_of_a_low_block() { tiles::begin(16, 32, 1); tiles::zero<2>(); }
#endif
}
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiles") / "tiles.cpp"
    path.write_text(SOURCE)
    return path


@pytest.fixture(scope="module", params=[native.EMULATED_AMX, "amx"])
def library(request: pytest.FixtureRequest, source: Path) -> ctypes.CDLL:
    if request.param not in native.testable_isas():
        pytest.skip(native.amx_refusal() or "")
    return native.load(source, request.param)


SHAPES = [(1, 32, 16, 1), (16, 32, 4, 3), (17, 32, 5, 2), (18, 16, 3, 1), (32, 32, 16, 1)]
"""Rows, columns, words of a step, steps."""


def run(
    library: ctypes.CDLL, name: str, shape: tuple[int, int, int, int], x: np.ndarray, w: np.ndarray, sums: np.ndarray
) -> None:
    """sums: [rows + 1, 32]; what is behind the block's rows and columns stays as it is."""
    below, alongside = sums[-1].copy(), sums[:, shape[1] :].copy()
    getattr(library, name)(*map(ctypes.c_int64, shape), *(ctypes.c_void_p(a.ctypes.data) for a in (x, w, sums)))
    assert np.array_equal(below, sums[-1])
    assert np.array_equal(alongside, sums[:, shape[1] :])


STRIPS = [*SHAPES[:2], (3, 16, 8, 2)]
INTEGERS_BY = [*(("bytes", shape) for shape in SHAPES), *((f"strips{x}", y) for x in ("", "_of_fewer") for y in STRIPS)]


@pytest.mark.parametrize(("name", "shape"), INTEGERS_BY, ids=str)
def test_integers_are_exact(name: str, shape: tuple[int, int, int, int], library: ctypes.CDLL) -> None:
    rows, columns, words, steps = shape
    random = np.random.default_rng(rows)
    x = random.integers(-128, 128, (rows, steps * words * 4)).astype(np.int8)
    w = random.integers(0, 256, (steps * words, 32, 4)).astype(np.uint8)
    sums = random.integers(-(2**31), 2**31, (rows + 1, 32)).astype(np.int32)  # which products may overflow
    exact = sums[:rows] + x.astype(np.int64) @ w.astype(np.int64).transpose(0, 2, 1).reshape(-1, 32)
    run(library, name, shape, x, w, sums)
    assert np.array_equal(sums[:rows, :columns], exact.astype(np.int32)[:, :columns])


def as_float32(x: Fraction) -> Fraction:
    """To the nearest, ties to even; numbers below the normal ones become zero."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    exponent -= abs(x) < Fraction(2) ** exponent
    step = Fraction(2) ** (exponent - 23)
    return round(x / step) * step if exponent >= -126 else Fraction(0)


def wide(x: np.ndarray) -> list[list[Fraction]]:
    """bfloat16, as its bits; denormal numbers are zero."""
    bits = np.where(x & 0x7F80, x, 0).astype(np.uint32) << 16
    return [[Fraction(float(number)) for number in row] for row in bits.view(np.float32)]


def by_the_manual(x: list[list[Fraction]], w: list[list[Fraction]], sums: np.ndarray, words: int) -> np.ndarray:
    """Of each step, even and odd numbers are summed apart by fused multiply-adds, then all of it with what was there.

    w: [numbers of a row, 32].
    """
    found = np.zeros_like(sums)
    for i, row in enumerate(x):
        for j in range(sums.shape[1]):
            start = Fraction(float(sums[i, j]))
            total = start if abs(start) >= Fraction(2) ** -126 else Fraction(0)
            for first in range(0, len(row), 2 * words):
                parts = [Fraction(0), Fraction(0)]
                for k in range(first, first + 2 * words):
                    parts[k % 2] = as_float32(parts[k % 2] + row[k] * w[k][j])
                total = as_float32(total + as_float32(parts[0] + parts[1]))
            found[i, j] = float(total)
    return found


@pytest.mark.gate(4)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_pairs_are_summed_as_the_manual_says(shape: tuple[int, int, int, int], library: ctypes.CDLL) -> None:
    rows, columns, words, steps = shape
    random = np.random.default_rng(rows)

    def numbers(*size: int) -> np.ndarray:
        """Bits of bfloat16 of either sign: many of like size, some whose products are denormal, some that are."""
        exponents = np.where(
            random.random(size) < 0.8, random.integers(124, 131, size), random.choice([0, 1, 60, 66], size)
        )
        return (random.integers(0, 2, size) << 15 | exponents << 7 | random.integers(0, 128, size)).astype(np.uint16)

    x, w = numbers(rows, steps * words * 2), numbers(steps * words, 32, 2)
    x[0] = x[0] & 0x807F | 62 << 7  # a row of sums that all are near the least normal number
    w[:, 0] = w[:, 0] & 0x807F | 66 << 7
    sums = random.standard_normal((rows + 1, 32)).astype(np.float32)
    sums[0] = 1e-39
    if rows > 1:  # all denormal
        x[rows - 1] &= 0x807F
        sums[rows - 1] = 0
    exact = by_the_manual(wide(x), wide(w.transpose(0, 2, 1).reshape(-1, 32)), sums[:rows], words)
    run(library, "pairs", shape, x, w, sums)
    assert np.array_equal(sums[:rows, :columns], exact[:, :columns])


def test_tiles_are_given_back(source: Path) -> None:
    library = native.load(source, native.EMULATED_AMX)
    assert library.held() == 1
    assert library.emulated_tiles_in_use() == 0


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        ("too_many_rows", "too large"),
        ("rows_of_no_bytes", "rows of no bytes"),
        ("before_they_are_configured", "before they are configured"),
        ("after_they_are_released", "before they are configured"),
        ("lower_half_of_a_low_block", "a tile that is not configured"),
    ],
)
def test_the_emulation_faults_where_the_machine_would(misuse: str, said: str, source: Path) -> None:
    code = f"import ctypes; ctypes.CDLL({str(native.build_library(source, native.EMULATED_AMX))!r}).{misuse}()"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode < 0
    assert said in done.stderr


@pytest.mark.skipif(native.amx.refused_by_compiler(("c++",)) is not None, reason="c++ does not know AMX")
@pytest.mark.parametrize(
    ("kernel", "product"),
    [
        (FLOATS, "tdpbf16ps"),
        pytest.param(INTEGERS, "tdpbsud", marks=pytest.mark.sweep),
        pytest.param(ATTENTION, "tdpbf16ps", marks=pytest.mark.sweep),
    ],
)
def test_kernels_are_built_with_the_instructions(kernel: str, product: str) -> None:
    """On any machine: nothing is run."""
    built = native.build_library(PLUGINS / kernel, "amx")
    if shutil.which("objdump") is None:
        pytest.skip("no objdump to look into the library")
    code = subprocess.run(["objdump", "-d", built], capture_output=True, text=True, timeout=60, check=True).stdout
    for instruction in ("ldtilecfg", "tileloadd", product, "tilestored", "tilerelease"):
        assert instruction in code
