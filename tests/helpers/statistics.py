"""Tests of distributions."""

from __future__ import annotations

import numpy as np


def chi_squared(counts: np.ndarray, expected: np.ndarray) -> float:
    """Of observed counts against expected ones, for cells that can be reached."""
    is_possible = expected > 0
    assert (counts[~is_possible] == 0).all()
    return float((((counts - expected) ** 2)[is_possible] / expected[is_possible]).sum())
