"""Images of a prompt for InternVL, as transformers' ``GotOcr2ImageProcessorPil`` makes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from PIL import Image

from fwk.errors import ModelLoadError
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

START, END = "<img>", "</img>"


class InternVLProcessor(MultimodalProcessor):
    """Replaces each image's place by the tokens of its tiles, between two that say where it begins and ends."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        raw, config = context.config.raw, context.processor_config
        check_steps(config, "do_resize", "do_rescale", "do_normalize")
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        with naming_fields():
            size = cast("Mapping[str, Any]", config.get("size") or {"height": 384, "width": 384})
            self._side = int(size["height"])
            if size["width"] != self._side or not 0 < self._side <= 4096:
                raise ValueError("size must be a square of 1 to 4096 pixels")
            # The processor cuts images unless it is told not to, whatever the image processor's own file says.
            self._most = int(config.get("max_patches", 12)) if config.get("crop_to_patches", True) else 1
            self._least = int(config.get("min_patches", 1))
            if not 1 <= self._least <= self._most <= 64:
                raise ValueError("min_patches and max_patches must be 1 to 64")
            self._resample = Image.Resampling(config.get("resample", Image.Resampling.BICUBIC))
            self._scaling = Scaling.of(config, CLIP_MEAN, CLIP_STD)
        patch, whole = (_side(vision.get(name, default)) for name, default in (("patch_size", 14), ("image_size", 448)))
        if whole != self._side:
            raise ModelLoadError(f"preprocessor_config.json cuts tiles of {self._side}, the model reads {whole} pixels")
        self._length = round(whole // patch * float(raw.get("downsample_ratio", 0.5))) ** 2
        self._image = context.config.integer("image_token_id", 151_667, 0)
        self._grids = sorted(
            (
                (columns, rows)
                for columns in range(1, self._most + 1)
                for rows in range(1, self._most + 1)
                if self._least <= columns * rows <= self._most
            ),
            key=lambda grid: grid[0] * grid[1],
        )

    def prepare(self, item: MediaItem) -> PreparedItem:
        tiles = self._tiles(item)
        return PreparedItem([self._length] * len(tiles), [{"pixel_values": tile} for tile in tiles])

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        check_places(token_ids.count(self._image), items)
        start, end = (self.context.text.encode(mark, add_special_tokens=False) for mark in (START, END))
        out: list[int] = []
        media: list[PlacedMedia] = []
        number = 0
        for token in token_ids:
            if token != self._image:
                out.append(token)
                continue
            out += start
            for tile in range(len(prepared[number].lengths)):
                media.append(prepared[number].piece(number, tile, len(out)))
                out += [token] * self._length
            out += end
            number += 1
        return Placed(out, media)

    def _tiles(self, item: MediaItem) -> list[np.ndarray]:
        """Row by row, and the whole behind them where there are several."""
        image, side = decode(item, self.context.max_pixels), self._side
        columns, rows = self._grid(image.width, image.height)
        whole = image.resize((columns * side, rows * side), self._resample)
        boxes = [(x * side, y * side, (x + 1) * side, (y + 1) * side) for y in range(rows) for x in range(columns)]
        tiles = [whole.crop(box) for box in boxes]
        if len(tiles) > 1:
            tiles.append(image.resize((side, side), self._resample))
        return [self._scaling.numbers(tile) for tile in tiles]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Columns and rows nearest to the image's proportions; of equals more tiles, while they cover half its area."""
        best, least = (1, 1), float("inf")
        for columns, rows in self._grids:
            off = abs(width / height - columns / rows)
            if off < least or (off == least and width * height > 0.5 * self._side**2 * columns * rows):
                best, least = (columns, rows), off
        return best


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list | tuple) else value)
