"""Images of a prompt for Idefics3: each tile's tokens stand behind one that says in which row and column it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

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
from fwk_multimodal.idefics3.tiles import Settings, tiles

MARK = "<fake_token_around_image>"
WHOLE = "<global-img>"


class Idefics3Processor(MultimodalProcessor):
    """Replaces each ``<image>`` by the tokens of its image's tiles, as transformers' ``Idefics3Processor`` does."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        raw = context.config.raw
        self._settings = Settings.of(context.processor_config)
        vision = cast("dict[str, Any]", raw["vision_config"])
        side = self._settings.tile // int(vision.get("patch_size", 32)) // int(raw.get("scale_factor", 2))
        self._length = side**2
        self._image = context.config.integer("image_token_id", 128_257, 0)
        if not self._length:
            raise ModelLoadError("preprocessor_config.json: 'max_image_size' is less than one patch of the model's")

    def prepare(self, item: MediaItem) -> PreparedItem:
        found, rows, columns = tiles(decode(item, self.context.max_pixels), self._settings)
        arrays = [{"pixel_values": pixels} for pixels in found]
        return PreparedItem([self._length] * len(found), arrays, [rows, columns])

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        check_places(token_ids.count(self._image), items)
        out: list[int] = []
        media: list[PlacedMedia] = []
        number = 0
        for token in token_ids:
            if token != self._image:
                out.append(token)
                continue
            self._put(prepared[number], number, out, media)
            number += 1
        return Placed(out, media)

    def _put(self, item: PreparedItem, number: int, out: list[int], media: list[PlacedMedia]) -> None:
        rows, columns = item.layout

        def tile(text: str, nth: int) -> None:
            out.extend(self._ids(text))
            media.append(item.piece(number, nth, len(out)))
            out.extend([self._image] * self._length)

        before = ""
        for row in range(rows):
            for column in range(columns):
                tile(f"{before}{MARK}<row_{row + 1}_col_{column + 1}>", row * columns + column)
                before = ""
            before = "\n"
        tile(f"{before}{before}{MARK}{WHOLE}", rows * columns)
        out.extend(self._ids(MARK))

    def _ids(self, text: str) -> list[int]:
        return self.context.text.encode(text, add_special_tokens=False)
