"""Images of a prompt for LLaVA: scaled by the shorter edge, cut to the middle, a token for each patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

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
from fwk_multimodal._common.pixtral import PixtralProcessor
from fwk_multimodal._common.scaling import Scaling, check_steps, naming_fields

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""CLIP's."""


class LlavaProcessor(MultimodalProcessor):
    """That of CLIP's images or of Pixtral's, by the model's config."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        vision = cast("Mapping[str, Any]", context.config.raw["vision_config"])
        make = PixtralProcessor if vision.get("model_type") == "pixtral" else ClipProcessor
        self._of_kind = make(context)

    def prepare(self, item: MediaItem) -> PreparedItem:
        return self._of_kind.prepare(item)

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        return self._of_kind.place(token_ids, items, prepared)


class ClipProcessor(MultimodalProcessor):
    """Replaces each ``<image>`` by a token for each patch, as transformers' ``LlavaProcessor`` does."""

    def __init__(self, context: MultimodalContext) -> None:
        super().__init__(context)
        config, raw = context.processor_config, context.config.raw
        check_steps(config, "do_resize", "do_center_crop", "do_rescale", "do_normalize")
        if config.get("do_pad"):
            raise ModelLoadError("preprocessor_config.json: images are read with do_pad false only")
        with naming_fields():
            self._edge = _edge(config.get("size", {"shortest_edge": 224}), "shortest_edge")
            self._size = _edge(config.get("crop_size", 224), "height")
            if _edge(config.get("crop_size", 224), "width") != self._size or self._edge < self._size:
                raise ValueError("crop_size must be a square, no larger than size")
            self._resample = Image.Resampling(config.get("resample", Image.Resampling.BICUBIC))
            self._scaling = Scaling.of(config, MEAN, STD)
        vision = cast("dict[str, Any]", raw["vision_config"])
        is_cut = raw.get("vision_feature_select_strategy", "default") == "default"
        self._length = (self._size // int(vision.get("patch_size", 14))) ** 2 + (not is_cut)
        self._image = int(raw.get("image_token_index", raw.get("image_token_id", 32000)))

    def prepare(self, item: MediaItem) -> PreparedItem:
        return PreparedItem([self._length], [{"pixel_values": self._scaling.numbers(self._square(item))}])

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        check_places(token_ids.count(self._image), items)
        out: list[int] = []
        media: list[PlacedMedia] = []
        for token in token_ids:
            if token != self._image:
                out.append(token)
                continue
            media.append(prepared[len(media)].piece(len(media), 0, len(out)))
            out += [token] * self._length
        return Placed(out, media)

    def _square(self, item: MediaItem) -> Image.Image:
        image = decode(item, self.context.max_pixels)
        short, long = sorted(image.size)
        longer = int(self._edge * long / short)
        if self._edge * longer > self.context.max_pixels:
            raise InvalidRequest(f"{item.name}: the image of {image.width} x {image.height} is too long", item.name)
        width, height = (self._edge, longer) if image.width <= image.height else (longer, self._edge)
        left, top = (width - self._size) // 2, (height - self._size) // 2
        scaled = image.resize((width, height), self._resample)
        return scaled.crop((left, top, left + self._size, top + self._size))


def _edge(value: int | Mapping[str, int], name: str) -> int:
    found = value if isinstance(value, int) else value[name]
    if not 0 < found <= 4096:
        raise ValueError(f"an edge must be 1 to 4096 pixels, not {found!r}")
    return found
