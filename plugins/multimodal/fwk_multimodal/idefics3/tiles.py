"""From an image to tiles: the steps of transformers' ``Idefics3ImageProcessorPil``, whose numbers these are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from fwk_multimodal._common.scaling import Scaling, check_steps, naming_fields

MAX_SIDE = 4096
"""Of an image, whatever the config says."""


@dataclass(frozen=True, slots=True)
class Settings:
    """``preprocessor_config.json``, with transformers' defaults."""

    longest: int
    tile: int
    resample: Image.Resampling
    scaling: Scaling
    splits: bool

    @staticmethod
    def of(config: Mapping[str, Any]) -> Settings:
        """Raises ``ModelLoadError`` naming the field that is wrong."""
        check_steps(config, "do_resize", "do_rescale", "do_normalize")
        with naming_fields():
            return Settings(
                longest=_positive(config.get("size", {"longest_edge": 4 * 364})["longest_edge"]),
                tile=_positive(config.get("max_image_size", {"longest_edge": 364})["longest_edge"]),
                resample=Image.Resampling(config.get("resample", Image.Resampling.LANCZOS)),
                scaling=Scaling.of(config, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
                splits=bool(config.get("do_image_splitting", True)),
            )


def _positive(value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= MAX_SIDE:
        raise ValueError(f"an edge must be 1 to {MAX_SIDE} pixels, not {value!r}")
    return value


def tiles(image: Image.Image, settings: Settings) -> tuple[list[np.ndarray], int, int]:
    """The tiles in rows, the small copy of the whole last: [3, tile, tile] float32 each; rows and columns.

    An image that fits into one tile has no rows nor columns: it is its own small copy.
    """
    size, resample = settings.tile, settings.resample
    image = image.resize(_scaled(*image.size, settings.longest), resample)
    rows = columns = 0
    frames: list[Image.Image] = []
    if settings.splits:
        image = image.resize(_whole_tiles(*image.size, size), resample)
        if max(image.size) > size:
            rows, columns = image.height // size, image.width // size
            places = [(x * size, y * size) for y in range(rows) for x in range(columns)]
            frames = [image.crop((x, y, x + size, y + size)) for x, y in places]
    whole = image.resize((size, size), resample)
    frames.append(whole)
    return [settings.scaling.numbers(frame) for frame in frames], rows, columns


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """The longer edge becomes ``longest``, the other one even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    height, width = max(height, 1), max(width, 1)
    ratio = width / height
    if width >= height and width > MAX_SIDE:
        width, height = MAX_SIDE, int(MAX_SIDE / ratio)
    elif height > width and height > MAX_SIDE:
        height, width = MAX_SIDE, int(MAX_SIDE * ratio)
    return max(width, 1), max(height, 1)


def _whole_tiles(width: int, height: int, size: int) -> tuple[int, int]:
    """The longer edge becomes a multiple of ``size``, the other one, scaled with it, the next multiple."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        height = math.ceil(int(width / ratio) / size) * size
    else:
        height = math.ceil(height / size) * size
        width = math.ceil(int(height * ratio) / size) * size
    return width, height
