"""Images of a prompt for the Qwen-VL family, as transformers' ``Qwen2VLImageProcessorPil`` makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from PIL import Image

from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.multimodal import (
    POSITION_PLANES,
    MediaItem,
    MultimodalContext,
    MultimodalProcessor,
    Placed,
    PlacedMedia,
)
from fwk_multimodal._common.images import check_places, decode
from fwk_multimodal._common.scaling import CLIP_MEAN, CLIP_STD, Scaling, check_steps, naming_fields

LONGEST = 200
"""How many times as long as wide an image may be."""


class QwenProcessor(MultimodalProcessor):
    """Replaces each image's place by a token for each square of patches."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        raw, config = context.config.raw, context.processor_config
        check_steps(config, "do_resize", "do_rescale", "do_normalize")
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        with naming_fields():
            sizes = cast("Mapping[str, Any]", config.get("size") or {})
            self._least = _pixels(config.get("min_pixels") or sizes.get("shortest_edge") or 56 * 56)
            self._most = _pixels(config.get("max_pixels") or sizes.get("longest_edge") or 28 * 28 * 1280)
            self._resample = Image.Resampling(config.get("resample", Image.Resampling.BICUBIC))
            self._scaling = Scaling.of(config, CLIP_MEAN, CLIP_STD)
            self._patch, self._merge, self._times = (
                int(config.get(name) or default)
                for name, default in (("patch_size", 14), ("merge_size", 2), ("temporal_patch_size", 2))
            )
        for name, own in (
            ("patch_size", self._patch),
            ("spatial_merge_size", self._merge),
            ("temporal_patch_size", self._times),
        ):
            if vision.get(name, own) not in (own, [own] * 2):
                raise ModelLoadError(
                    f"preprocessor_config.json cuts images by {own}, and config.json's {name!r} is {vision[name]!r}"
                )
        self._image = context.config.integer("image_token_id", 151_655, 0)

    def process(self, token_ids: list[int], items: Sequence[MediaItem]) -> Placed:
        check_places(token_ids.count(self._image), items)
        out: list[int] = []
        media: list[PlacedMedia] = []
        for token in token_ids:
            if token != self._image:
                out.append(token)
                continue
            arrays = self._patches(items[len(media)])
            length = arrays[POSITION_PLANES].shape[1]
            media.append(PlacedMedia(len(media), len(out), length, arrays))
            out += [token] * length
        return Placed(out, media)

    def _patches(self, item: MediaItem) -> dict[str, np.ndarray]:
        image = decode(item, self.context.max_pixels)
        width, height = self._scaled(image, item.name)
        pixels = self._scaling.numbers(image.resize((width, height), self._resample))
        side, merge = self._patch, self._merge
        rows, columns = height // side, width // side
        squares = pixels.reshape(3, rows // merge, merge, side, columns // merge, merge, side)
        squares = squares.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]  # an image is a film of equal frames
        shape = (*squares.shape[:5], self._times, side, side)
        patches = np.broadcast_to(squares, shape).reshape(rows * columns, -1)
        places = np.indices((1, rows // merge, columns // merge)).reshape(3, -1)
        return {"pixel_values": patches, "grid": np.array([rows, columns]), POSITION_PLANES: places}

    def _scaled(self, image: Image.Image, name: str) -> tuple[int, int]:
        """Width and height: multiples of a square's side, of as many pixels as the model is to see."""
        width, height, side = image.width, image.height, self._patch * self._merge
        if max(width, height) > LONGEST * min(width, height):
            raise InvalidRequest(
                f"{name}: the image of {width} x {height} is more than {LONGEST} times as long as wide: crop it", name
            )
        rows, columns = (round(edge / side) * side for edge in (height, width))
        if rows * columns > self._most:
            factor = math.sqrt(height * width / self._most)
            rows, columns = (max(side, math.floor(edge / factor / side) * side) for edge in (height, width))
        elif rows * columns < self._least:
            factor = math.sqrt(self._least / (height * width))
            rows, columns = (math.ceil(edge * factor / side) * side for edge in (height, width))
        return columns, rows


def _pixels(value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= 2**26:
        raise ValueError(f"a number of pixels must be 1 to {2**26}, not {value!r}")
    return value
