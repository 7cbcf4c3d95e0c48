"""Grey pictures in PGM (``P5 WIDTH HEIGHT 255`` and a byte for each point): a token for each point."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem, MultimodalProcessor, ProcessedMedia


class MineProcessor(MultimodalProcessor):
    """Replaces each placeholder by as many of them as its picture has points."""

    def process(self, prompt_token_ids: list[int], items: Sequence[MediaItem]) -> ProcessedMedia:
        placeholder = int(self.context.processor_config["image_token_id"])
        if prompt_token_ids.count(placeholder) != len(items):
            raise InvalidRequest(f"{prompt_token_ids.count(placeholder)} placeholders, but {len(items)} images")
        pictures, out = [self._picture(item) for item in items], list[int]()
        left = iter(pictures)
        for token in prompt_token_ids:
            out += [token] * (next(left).size if token == placeholder else 1)
        key = hashlib.sha256(b"".join(hashlib.sha256(item.data).digest() for item in items)).hexdigest()
        return ProcessedMedia(out, {"points": np.concatenate([picture.ravel() for picture in pictures])}, key)

    def _picture(self, item: MediaItem) -> np.ndarray:
        found = re.match(rb"P5 ([1-9][0-9]{0,3}) ([1-9][0-9]{0,3}) 255\n", item.data)
        points = item.data[found.end() :] if found else b""
        width, height = (int(part) for part in found.groups()) if found else (0, 0)
        if item.kind != "image" or not found or len(points) != width * height:
            raise InvalidRequest("the image is no PGM of 8 bits, or is cut short")
        return np.frombuffer(points, np.uint8).reshape(height, width)
