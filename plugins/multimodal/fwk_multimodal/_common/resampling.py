"""From one rate to another, piece by piece."""

from __future__ import annotations

import math

import numpy as np

ZERO_CROSSINGS = 32
BLOCK = 2**15
"""Samples at a time: windows of so many are copied."""
MAX_KEPT = 2048
"""Phases whose weights are kept."""


class Resampler:
    """A sinc of 32 zero crossings under a Hann window, cut below both rates; a row of weights for each phase."""

    def __init__(self, rate: int, target: int) -> None:
        """Both in samples a second."""
        common = math.gcd(rate, target)
        self._up, self._down = target // common, rate // common
        self._cut = min(1.0, target / rate) * 0.97
        self._reach = math.ceil(ZERO_CROSSINGS / self._cut)
        self._weights: dict[int, np.ndarray] = {}
        self._held = np.zeros(self._reach)
        self._first = -self._reach  # place of ``_held``'s first sample
        self._next = self._count = 0  # samples that came out, and that went in

    def push(self, samples: np.ndarray, *, is_last: bool = False) -> np.ndarray:
        """[n] float32 to what can be told with them; is_last: silence follows."""
        if self._up == self._down:
            return samples
        parts = [self._pushed(samples[at : at + BLOCK]) for at in range(0, len(samples), BLOCK)]
        if is_last:
            parts.append(self._pushed(np.zeros(self._reach + 1, np.float32), self._count * self._up // self._down))
        return np.concatenate(parts) if parts else np.empty(0, np.float32)

    def _pushed(self, samples: np.ndarray, stop: int | None = None) -> np.ndarray:
        held = self._held = np.concatenate((self._held, samples))
        self._count += len(samples)
        if stop is None:
            known = self._first + len(held) - self._reach
            stop = max(-(-known * self._up // self._down), self._next)
        out = np.empty(max(stop - self._next, 0), np.float32)
        if len(out):
            windows = np.lib.stride_tricks.sliding_window_view(held, 2 * self._reach + 1)
            for j in range(min(self._up, len(out))):
                place, phase = divmod((self._next + j) * self._down, self._up)
                own = out[j :: self._up]
                own[:] = windows[place - self._reach - self._first :: self._down][: len(own)] @ self._of(phase)
        self._next += len(out)
        drop = max(self._next * self._down // self._up - self._reach - self._first, 0)
        self._held, self._first = held[drop:], self._first + min(drop, len(held))
        return out

    def _of(self, phase: int) -> np.ndarray:
        """[2 * reach + 1] for samples that lie ``phase / up`` behind one."""
        found = self._weights.get(phase)
        if found is None:
            distance = np.arange(-self._reach, self._reach + 1) - phase / self._up
            hann = 0.5 + 0.5 * np.cos(np.pi * np.clip(distance / (self._reach + 1), -1, 1))
            found = np.sinc(self._cut * distance) * self._cut * hann
            if len(self._weights) < MAX_KEPT:
                self._weights[phase] = found
        return found
