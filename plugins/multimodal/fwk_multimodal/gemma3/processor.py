"""Images of a prompt for Gemma 3, as transformers' ``Gemma3Processor`` makes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from PIL import Image

from fwk.errors import ModelLoadError
from fwk.interfaces.dialect import TextTools
from fwk.interfaces.multimodal import (
    MediaItem,
    MultimodalContext,
    MultimodalProcessor,
    Placed,
    PlacedMedia,
    PreparedItem,
)
from fwk_multimodal._common.images import check_places, decode
from fwk_multimodal._common.scaling import Scaling, check_steps, naming_fields

WHOLE, PARTS = "Here is the original image ", " and here are some crops to help you see better "
"""What the model reads around an image of which it is given parts, too."""
AROUND = "\n\n"
"""What stands before and behind each image and part."""


class Gemma3Processor(MultimodalProcessor):
    """Replaces each image's place by its tokens, between two that say where it begins and ends."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        raw, config = context.config.raw, context.processor_config
        check_steps(config, "do_resize", "do_rescale", "do_normalize")
        vision = cast("Mapping[str, Any]", raw["vision_config"])
        with naming_fields():
            size = cast("Mapping[str, Any]", config.get("size") or {"height": 224, "width": 224})
            self._side = int(size["height"])
            if size["width"] != self._side or not 0 < self._side <= 4096:
                raise ValueError("size must be a square of 1 to 4096 pixels")
            # Published files have null where the processor's own values count.
            self._least = int(config.get("pan_and_scan_min_crop_size") or 256)
            self._most = int(config.get("pan_and_scan_max_num_crops") or 4)
            self._ratio = float(config.get("pan_and_scan_min_ratio_to_activate") or 1.2)
            if not 0 < self._least <= 2**20 or not 1 <= self._most <= 64 or not self._ratio >= 1:
                raise ValueError("pan and scan needs a crop's size, 1 to 64 crops, and a ratio of at least 1")
            self._scans = bool(config.get("do_pan_and_scan"))
            self._resample = Image.Resampling(config.get("resample", Image.Resampling.BILINEAR))
            self._scaling = Scaling.of(config, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        if (side := int(vision.get("image_size", self._side))) != self._side:
            raise ModelLoadError(
                f"preprocessor_config.json scales images to {self._side}, the model reads {side} pixels"
            )
        self._length = context.config.integer("mm_tokens_per_image", 256, 1)
        self._start, self._end, self._image = (
            context.config.integer(f"{name}_token_index", default, 0)
            for name, default in (("boi", 255_999), ("eoi", 256_000), ("image", 262_144))
        )

    def prepare(self, item: MediaItem) -> PreparedItem:
        image, size = decode(item, self.context.max_pixels), (self._side, self._side)
        seen = [self._scaling.numbers(part.resize(size, self._resample)) for part in (image, *self._parts(image))]
        return PreparedItem([self._length] * len(seen), [{"pixel_values": pixels} for pixels in seen])

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        check_places(token_ids.count(self._start), items)
        prompt = _Prompt(self.context.text)
        media: list[PlacedMedia] = []
        number = 0

        def put(part: int) -> None:
            prompt.write(AROUND)
            prompt.put(self._start)
            media.append(prepared[number].piece(number, part, len(prompt.ids)))
            prompt.put(*[self._image] * self._length, self._end)
            prompt.write(AROUND)

        for token in token_ids:
            if token != self._start:
                prompt.follow(token)
                continue
            count = len(prepared[number].lengths)
            if count > 1:
                prompt.write(WHOLE)
            put(0)
            for part in range(1, count):
                prompt.write(" " if part > 1 else PARTS)
                put(part)
            number += 1
        return Placed(prompt.ids, media)

    def _parts(self, image: Image.Image) -> list[Image.Image]:
        """Side by side along the longer edge; none of an image that is nearly a square, or small."""
        if not self._scans:
            return []
        short, long = sorted(image.size)
        if long / short < self._ratio:
            return []
        count = min(max(min(math.floor(long / short + 0.5), long // self._least), 2), self._most)
        step = math.ceil(long / count)
        if min(step, short) < self._least:
            return []
        edges = [(step * i, min(step * (i + 1), long)) for i in range(count)]
        is_wide = image.width >= image.height
        return [image.crop((a, 0, b, short) if is_wide else (0, a, short, b)) for a, b in edges if a < b]


class _Prompt:
    """Token ids, among which text is written as if all around it had been tokenised with it.

    Of what is next to it, white space alone makes one token with it.
    """

    def __init__(self, text: TextTools) -> None:
        self._text = text
        self.ids: list[int] = []
        self._is_open = False  # text was written last, or white space behind it
        self._num_fixed = 0  # that stay as they are

    def put(self, *ids: int) -> None:
        """Tokens that stay as they are, as all before them."""
        self.ids += ids
        self._is_open, self._num_fixed = False, len(self.ids)

    def write(self, text: str) -> None:
        """Text, behind white space that is there."""
        while len(self.ids) > self._num_fixed and (space := self._space(self.ids[-1])):
            text = space + text
            self.ids.pop()
        self.ids += self._text.encode(text, add_special_tokens=False)
        self._is_open = True

    def follow(self, token: int) -> None:
        """A token of the prompt, which may be white space behind what was written."""
        space = self._space(token) if self._is_open else ""
        if space:
            self.write(space)
        else:
            self.ids.append(token)
            self._is_open = False

    def _space(self, token: int) -> str:
        text = self._text.decode([token])
        return text if text.isspace() else ""
