"""Log-mel spectrograms, as models hear sounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from fwk.errors import ModelLoadError
from fwk_multimodal._common.scaling import naming_fields
from fwk_multimodal._common.sound import HOP, RATE

FRAME = 400
"""Samples of a frame."""
WORKS_WITH = {"sampling_rate": RATE, "hop_length": HOP, "n_fft": FRAME, "padding_value": 0.0, "dither": 0.0}
"""Of preprocessor_config.json, what spectrograms are made with."""


class SoundWindow:
    """How much a model hears at once, and in what: transformers' ``WhisperFeatureExtractor``."""

    def __init__(self, config: Mapping[str, Any], num_bins: int) -> None:
        """config: preprocessor_config.json. num_bins: that the model hears. Raises ``ModelLoadError``."""
        for name, value in WORKS_WITH.items():
            if config.get(name, value) != value:
                raise ModelLoadError(
                    f"preprocessor_config.json: {name!r} is {config[name]!r}; sounds are heard with {value!r}"
                )
        with naming_fields():
            self.seconds = int(config.get("chunk_length", 30))
            self.num_bins = int(config.get("feature_size", 80))
            if not 0 < self.seconds <= 300 or not 0 < self.num_bins <= 1024:
                raise ValueError("chunk_length must be 1 to 300 seconds, feature_size 1 to 1024")
        if num_bins != self.num_bins:
            raise ModelLoadError(f"preprocessor_config.json makes {self.num_bins} bins, and the model hears {num_bins}")

    def spectrogram(self, samples: np.ndarray) -> np.ndarray:
        """[num_bins, seconds * RATE / HOP] float32 of [n] samples, with silence behind them."""
        whole = np.zeros(self.seconds * RATE, np.float32)
        whole[: len(samples)] = samples
        return log_mel(whole, self.num_bins)


def log_mel(samples: np.ndarray, num_bins: int) -> np.ndarray:
    """[num_bins, num_samples / HOP] float32, as Whisper hears (arXiv:2212.04356, 2.2).

    The power of frames under a Hann window, by ``num_bins`` triangles on Slaney's mel scale; its logarithm at most 8
    below the largest, scaled to about -1 to 1.
    """
    window = np.hanning(FRAME + 1)[:-1]
    padded = np.pad(samples.astype(np.float64), FRAME // 2, "reflect")
    filters = _mel_filters(num_bins).T
    out = np.empty((num_bins, len(samples) // HOP))
    for start in range(0, out.shape[1], 3000):
        firsts = np.arange(start, min(start + 3000, out.shape[1])) * HOP
        frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[firsts]
        power = np.abs(np.fft.rfft(frames * window)) ** 2
        out[:, start : start + len(firsts)] = np.log10(np.maximum(filters @ power.T, 1e-10))
    out = np.maximum(out, out.max() - 8.0)
    return ((out + 4.0) / 4.0).astype(np.float32)


def _mel_filters(num_bins: int) -> np.ndarray:
    """[FRAME / 2 + 1, num_bins]: triangles of equal area between neighbours on the mel scale, up to 8 kHz."""
    step = 200 / 3  # below 1 kHz the scale is linear, above it logarithmic
    log_step = math.log(6.4) / 27

    def mel(hertz: float) -> float:
        return hertz / step if hertz < 1000 else 15 + math.log(hertz / 1000) / log_step

    mels = np.linspace(mel(0.0), mel(8000.0), num_bins + 2)
    edges = np.where(mels < 15, mels * step, 1000 * np.exp((mels - 15) * log_step))
    bins = np.linspace(0, RATE / 2, FRAME // 2 + 1)
    slopes = edges - bins[:, None]
    widths = np.diff(edges)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return triangles * (2 / (edges[2:] - edges[:-2]))
