"""One uniform number per (seed, position), without any state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.device import Upload
    from fwk.interfaces.sampling import SamplingRows

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_ALL = 2**64 - 1

FEW = 4
"""Up to so many numbers the interpreter computes alone: after a step numpy's functions are in no cache any more."""


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] uint64 seeds and [n] int64 positions to [n] float64, each strictly between 0 and 1.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): position i gets the
    i-th output of the generator whose state starts at the mixed seed. Mixing it first keeps the streams of
    neighbouring seeds apart. 52 bits and a half, so that neither end is ever reached.
    """
    if len(seeds) <= FEW:
        return np.array([_one(seed, i) for seed, i in zip(seeds.tolist(), positions.tolist(), strict=True)], np.float64)
    state = _mix(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mix(state + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def draws_of(rows: SamplingRows, send: Upload) -> Tensor:
    """What each row draws, where ``send`` brings it: [num_rows] float64.

    Of a position that only the device knows the host sends the numbers of all that it may be.
    """
    if rows.num_fewer is None:
        return send(uniform(rows.seeds, rows.positions))
    count = rows.most_fewer + 1
    positions = rows.positions[:, None] - np.arange(count)
    numbers = uniform(np.repeat(rows.seeds, count), positions.ravel()).reshape(-1, count)
    return send(numbers).gather(1, rows.num_fewer.unsqueeze(1)).squeeze(1)


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _FACTORS[0]
    z = (z ^ (z >> np.uint64(27))) * _FACTORS[1]
    return z ^ (z >> np.uint64(31))


def _one(seed: int, position: int) -> float:
    """The same in integers of any size."""
    golden = int(_GOLDEN)
    bits = _mix_one(_mix_one((seed + golden) & _ALL) + (position + 1) * golden & _ALL)
    return ((bits >> 12) + 0.5) * 2.0**-52


def _mix_one(z: int) -> int:
    z = (z ^ z >> 30) * int(_FACTORS[0]) & _ALL
    z = (z ^ z >> 27) * int(_FACTORS[1]) & _ALL
    return z ^ z >> 31
