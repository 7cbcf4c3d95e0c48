"""Videos as Qwen2-VL and Qwen2.5-VL read them: one run of tokens, whose planes of time count from the first frame."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fwk.interfaces.multimodal import POSITION_PLANES
from fwk_multimodal._common.videos import Sample, Video

MAX_TOKENS = 128_000
"""Of a video: nine tenths of them, each of a square of pixels, are what all its frames together may have."""
SLACK = 1.05
"""How many times the fewest pixels a frame may have, in a video however long."""


@dataclass(frozen=True, slots=True)
class Joined:
    """How frames become pieces.

    side: of a square of pixels that is a token. times: frames in a piece. per_second: positions that a second of the
    video takes; None: one that each piece takes.
    """

    side: int
    times: int
    per_second: float | None

    def count(self, video: Video, rate: float, least: int, most: int) -> int:
        """How many frames are read: whole pieces, of ``rate`` frames a second. As transformers' ``sample_frames``."""
        wanted = min(max(video.num_frames / video.rate * rate, least), most // self.times * self.times)
        count = math.floor(min(wanted, video.num_frames) / self.times) * self.times
        return max(count, min(self.times, video.num_frames))

    def sample(self, video: Video, count: int, least_pixels: int, most_pixels: int) -> Sample:
        """The frames, evenly, each in a size near its own: that of an image, and within the bound of all of them."""
        whole = int(MAX_TOKENS * self.side**2 * 0.9)
        most = max(min(most_pixels, whole * self.times // count), int(least_pixels * SLACK))
        height, width = _size(video.height, video.width, self.side, least_pixels, most)
        return Sample([int(i * (video.num_frames / count)) for i in range(count)], width=width, height=height)

    def place(self, pieces: Sequence[dict[str, np.ndarray]], video: Video, count: int) -> None:
        """Set the planes of pieces as those of one whole. Those of a piece begin behind the largest of the one before:
        what that is too much is taken off.
        """
        rate = count / video.num_frames * video.rate
        step = 1.0 if self.per_second is None else self.per_second * self.times / rate
        behind = 0  # the first position of the next piece, where it begins by itself
        for number, piece in enumerate(pieces):
            planes = piece[POSITION_PLANES].copy()
            planes[0] = int(number * step)
            piece[POSITION_PLANES] = planes - behind
            behind = int(planes.max()) + 1


def _size(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """transformers' ``smart_resize``."""
    rows, columns = (round(edge / side) * side for edge in (height, width))
    if rows * columns > most:
        factor = math.sqrt(height * width / most)
        return (
            max(side, math.floor(height / factor / side) * side),
            max(side, math.floor(width / factor / side) * side),
        )
    if rows * columns < least:
        factor = math.sqrt(least / (height * width))
        return math.ceil(height * factor / side) * side, math.ceil(width * factor / side) * side
    return rows, columns
