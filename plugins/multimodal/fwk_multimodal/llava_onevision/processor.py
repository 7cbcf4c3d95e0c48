"""Images of a prompt for LLaVA-OneVision, each as transformers' ``LlavaOnevisionProcessor`` makes one alone."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from PIL import Image

from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.multimodal import (
    MediaItem,
    MultimodalContext,
    MultimodalProcessor,
    Placed,
    PlacedMedia,
    PreparedItem,
)
from fwk_multimodal._common.images import check_places, decode
from fwk_multimodal._common.scaling import CLIP_MEAN, CLIP_STD, Scaling, check_steps, naming_fields

SLACK = 1.1
"""How many times more rows and columns of patches than the most may stay as they are."""


class OneVisionProcessor(MultimodalProcessor):
    """Replaces each image's place by a token for each patch of the whole, and for each patch and row of its tiles."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        raw, config = context.config.raw, context.processor_config
        check_steps(config, "do_resize", "do_rescale", "do_normalize", "do_pad")
        if config.get("do_center_crop"):
            raise ModelLoadError("preprocessor_config.json: images are read with do_center_crop false only")
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        with naming_fields():
            size = cast("Mapping[str, Any]", config.get("size") or {"height": 384, "width": 384})
            self._side = int(size["height"])
            if size["width"] != self._side or not 0 < self._side <= 4096:
                raise ValueError("size must be a square of 1 to 4096 pixels")
            given = config.get("image_grid_pinpoints") or raw.get("image_grid_pinpoints")
            steps = [self._side * n for n in range(1, 7)]
            self._sizes = _sizes(given or [[height, width] for height in steps for width in steps], self._side)
            aspect = re.fullmatch(r"anyres_max_([1-9]\d{0,2})", str(raw.get("vision_aspect_ratio", "anyres_max_9")))
            if aspect is None:
                raise ModelLoadError(
                    f"config.json: 'vision_aspect_ratio' is {raw['vision_aspect_ratio']!r}, not 'anyres_max_9'"
                )
            self._most = int(aspect[1])
            self._resample = Image.Resampling(config.get("resample", Image.Resampling.BICUBIC))
            self._scaling = Scaling.of(config, CLIP_MEAN, CLIP_STD)
        if (side := int(vision.get("image_size", self._side))) != self._side:
            raise ModelLoadError(f"preprocessor_config.json cuts tiles of {self._side}, the model reads {side} pixels")
        self._per_side = self._side // int(vision.get("patch_size", 16))
        self._image = context.config.integer("image_token_index", 151_646, 0)

    def prepare(self, item: MediaItem) -> PreparedItem:
        arrays = self._arrays(item)
        rows, columns = (int(count) for count in arrays["scaled"])
        return PreparedItem([self._per_side**2 + rows * (columns + 1)], [arrays])

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        check_places(token_ids.count(self._image), items)
        out: list[int] = []
        media: list[PlacedMedia] = []
        for token in token_ids:
            if token != self._image:
                out.append(token)
                continue
            media.append(prepared[len(media)].piece(len(media), 0, len(out)))
            out += [token] * media[-1].length
        return Placed(out, media)

    def _arrays(self, item: MediaItem) -> dict[str, np.ndarray]:
        """As ``encode`` takes them."""
        image, side = decode(item, self.context.max_pixels), self._side
        height, width = self._best(image)
        rows, columns = height // side, width // side
        shown = self._shown(image, rows * self._per_side, columns * self._per_side)
        many = math.sqrt(shown[2] * shown[3] / (self._most * self._per_side**2))
        scaled = [int(count // many) for count in shown[2:]] if many > SLACK else shown[2:]
        if not min(scaled):
            raise InvalidRequest(
                f"{item.name}: the image of {image.width} x {image.height} leaves no row or column of patches: crop it",
                item.name,
            )
        padded = self._padded(image, height, width)
        boxes = [(x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(rows) for x in range(columns)]
        tiles = [image.resize((side, side), self._resample), *(padded.crop(box) for box in boxes)]
        return {
            "pixel_values": np.stack([self._scaling.numbers(tile) for tile in tiles]),
            "grid": np.array([rows, columns]),
            "shown": np.array(shown),
            "scaled": np.array(scaled),
        }

    def _best(self, image: Image.Image) -> tuple[int, int]:
        """Height and width of all tiles: that lose fewest pixels of the image, and of such the least padding."""
        best, most, least = self._sizes[0], 0, math.inf
        for height, width in self._sizes:
            scale = min(width / image.width, height / image.height)
            kept = min(int(image.width * scale) * int(image.height * scale), image.width * image.height)
            wasted = height * width - kept
            if kept > most or (kept == most and wasted < least):
                best, most, least = (height, width), kept, wasted
        return best

    def _padded(self, image: Image.Image, height: int, width: int) -> Image.Image:
        """The image as large as it fits, in the middle, and black around it."""
        across, down = width / image.width, height / image.height
        if across < down:
            size = width, min(math.ceil(image.height * across), height)
        else:
            size = min(math.ceil(image.width * down), width), height
        padded = Image.new("RGB", (width, height))
        padded.paste(image.resize(size, self._resample), ((width - size[0]) // 2, (height - size[1]) // 2))
        return padded

    def _shown(self, image: Image.Image, rows: int, columns: int) -> list[int]:
        """Of so many patches, the first row and column that is no padding, and how many rows and columns are none."""
        top = left = 0
        if image.width / image.height > columns / rows:
            top = (rows - int(round(image.height * (columns / image.width), 7))) // 2
        else:
            left = (columns - int(round(image.width * (rows / image.height), 7))) // 2
        return [top, left, rows - 2 * top, columns - 2 * left]


def _sizes(given: Any, side: int) -> list[tuple[int, int]]:
    found = [(int(height), int(width)) for height, width in given]
    if not all(0 < edge <= 64 * side and edge % side == 0 for size in found for edge in size) or not found:
        raise ValueError(f"image_grid_pinpoints must be heights and widths of up to 64 tiles of {side} pixels")
    return found
