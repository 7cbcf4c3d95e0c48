"""Grey pictures in PGM (``P5 WIDTH HEIGHT 255`` and a byte for each point): a token for each point."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem, MultimodalProcessor, Placed, PlacedMedia


class MineProcessor(MultimodalProcessor):
    """Replaces each mark by as many of them as its picture has points."""

    def process(self, token_ids: list[int], items: Sequence[MediaItem]) -> Placed:
        mark = int(self.context.processor_config["image_token_id"])
        if token_ids.count(mark) != len(items):
            raise InvalidRequest(f"{token_ids.count(mark)} marks, but {len(items)} images")
        out, media = list[int](), list[PlacedMedia]()
        for token in token_ids:
            if token != mark:
                out.append(token)
                continue
            points = self._picture(items[len(media)]).ravel()
            media.append(PlacedMedia(len(media), len(out), len(points), {"points": points}))
            out += [mark] * len(points)
        return Placed(out, media)

    def _picture(self, item: MediaItem) -> np.ndarray:
        found = re.match(rb"P5 ([1-9][0-9]{0,3}) ([1-9][0-9]{0,3}) 255\n", item.data)
        points = item.data[found.end() :] if found else b""
        width, height = (int(part) for part in found.groups()) if found else (0, 0)
        if item.kind != "image" or not found or len(points) != width * height:
            raise InvalidRequest(f"{item.name} is no PGM of 8 bits, or is cut short", item.name)
        return np.frombuffer(points, np.uint8).reshape(height, width)
