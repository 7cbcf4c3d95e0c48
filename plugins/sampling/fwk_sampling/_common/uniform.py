"""One uniform number per (seed, position), without any state."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """[n] uint64 seeds and [n] int64 positions to [n] float64, each strictly between 0 and 1.

    SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators"): position i gets the
    i-th output of the generator whose state starts at the mixed seed. Mixing it first keeps the streams of
    neighbouring seeds apart. 52 bits and a half, so that neither end is ever reached.
    """
    state = _mix(seeds.astype(np.uint64) + _GOLDEN)
    bits = _mix(state + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
