"""Images of a prompt for Pixtral and Mistral 3, as transformers' ``PixtralProcessor`` makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

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

BREAK, END = "[IMG_BREAK]", "[IMG_END]"


class PixtralProcessor(MultimodalProcessor):
    """Replaces each image's place by a token for each square of patches, and one behind each row of them."""

    merge: ClassVar[int] = 1
    """Patches along a side of a square, where the config does not say."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        raw, config = context.config.raw, context.processor_config
        check_steps(config, "do_resize", "do_rescale", "do_normalize")
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        with naming_fields():
            size = cast("Mapping[str, Any]", config.get("size") or {"longest_edge": 1024})
            edge = size.get("longest_edge")
            self._height, self._width = (int(edge or size[name]) for name in ("height", "width"))
            if not 0 < min(self._height, self._width) <= max(self._height, self._width) <= 2**14:
                raise ValueError("size must be edges of 1 to 16384 pixels")
            self._resample = Image.Resampling(config.get("resample", Image.Resampling.BICUBIC))
            self._scaling = Scaling.of(config, CLIP_MEAN, CLIP_STD)
        patch = vision.get("patch_size", 16)
        self._side = int(patch[0] if isinstance(patch, list | tuple) else patch) * int(
            raw.get("spatial_merge_size", self.merge)
        )
        self._image = context.config.integer("image_token_index", 10, 0)
        self._marks = self._mark(BREAK), self._mark(END)

    def _mark(self, text: str) -> int:
        ids = self.context.text.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise ModelLoadError(f"tokenizer.json has no token {text}, which stands between an image's rows")
        return ids[0]

    def prepare(self, item: MediaItem) -> PreparedItem:
        pixels = self._pixels(item)
        rows, columns = (edge // self._side for edge in pixels.shape[1:])
        arrays = {"pixel_values": pixels, "marks": np.array(self._row_marks(rows), np.int64)}
        return PreparedItem([rows * (columns + 1)], [arrays], [rows, columns])

    def _row_marks(self, rows: int) -> list[int]:
        """What stands behind each row."""
        return [*[self._marks[0]] * (rows - 1), self._marks[1]]

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        check_places(token_ids.count(self._image), items)
        out: list[int] = []
        media: list[PlacedMedia] = []
        for token in token_ids:
            if token != self._image:
                out.append(token)
                continue
            found = prepared[len(media)]
            rows, columns = found.layout
            media.append(found.piece(len(media), 0, len(out)))
            for mark in self._row_marks(rows):
                out += [*[token] * columns, mark]
        return Placed(out, media)

    def _pixels(self, item: MediaItem) -> np.ndarray:
        """[3, height, width] float32: no larger than it may be, in whole squares."""
        image = decode(item, self.context.max_pixels)
        width, height = image.size
        ratio = max(height / self._height, width / self._width)
        if ratio > 1:
            width, height = (math.floor(edge / ratio) for edge in (width, height))
        width, height = (((edge - 1) // self._side + 1) * self._side for edge in (max(width, 1), max(height, 1)))
        return self._scaling.numbers(image.resize((width, height), self._resample))
