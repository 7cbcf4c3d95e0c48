"""Images and videos of a prompt for the Qwen-VL family.

Images are as transformers' ``Qwen2VLImageProcessorPil`` makes them; videos as ``Qwen3VLVideoProcessor`` does, scaled by
Pillow, and for the models before Qwen3-VL as ``Qwen2VLVideoProcessor`` (``joined``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    PreparedItem,
)
from fwk_multimodal._common import videos
from fwk_multimodal._common.images import check_places, decode
from fwk_multimodal._common.scaling import CLIP_MEAN, CLIP_STD, Scaling, check_steps, naming_fields
from fwk_multimodal.qwen_vl.joined import Joined

MAX_FRAMES = 768
"""Of a video, where no file says fewer; no file may say more."""
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
        self._video, self._start, self._end = (
            context.config.integer(name, default, 0)
            for name, default in (
                ("video_token_id", 151_656),
                ("vision_start_token_id", 151_652),
                ("vision_end_token_id", 151_653),
            )
        )
        with naming_fields():
            self._joined = _joined(context.config.architecture, vision, self._patch * self._merge, self._times)
            self._videos = _Videos.of(config, is_joined=self._joined is not None)

    def prepare(self, item: MediaItem) -> PreparedItem:
        """Of a video the times of its pieces, too."""
        pieces, times = ([self._patches([self._scaled_image(item)])], []) if item.kind == "image" else self._seen(item)
        return PreparedItem([arrays[POSITION_PLANES].shape[1] for arrays in pieces], pieces, times)

    def place(self, token_ids: list[int], items: Sequence[MediaItem], prepared: Sequence[PreparedItem]) -> Placed:
        kinds = {self._image: "image", self._video: "video"}
        check_places(sum(token in kinds for token in token_ids), items)
        out: list[int] = []
        media: list[PlacedMedia] = []
        number = 0
        tokens = iter(token_ids)
        for token in tokens:
            if token not in kinds:
                out.append(token)
                continue
            item = items[number]
            if item.kind != kinds[token]:
                raise InvalidRequest(f"{item.name}: the chat template has a place for another kind of media", item.name)
            if item.kind == "image":
                self._put(out, media, prepared[number].piece(number, 0, len(out)), token)
            elif self._joined is not None:
                for nth in range(len(prepared[number].lengths)):
                    self._put(out, media, prepared[number].piece(number, nth, len(out)), token)
            else:
                is_framed = bool(out) and out[-1] == self._start
                if is_framed:  # each frame has its own marks, in place of those around all of it
                    out.pop()
                self._put_video(out, media, number, prepared[number])
                if is_framed and (after := next(tokens, None)) not in (None, self._end):
                    out.append(after)
            number += 1
        return Placed(out, media)

    @staticmethod
    def _put(out: list[int], media: list[PlacedMedia], piece: PlacedMedia, token: int) -> None:
        media.append(piece)
        out += [token] * piece.length

    def _put_video(self, out: list[int], media: list[PlacedMedia], number: int, item: PreparedItem) -> None:
        """Each piece behind the time of its middle."""
        for nth, time in enumerate(item.layout):
            out += [*self.context.text.encode(f"<{time:.1f} seconds>", add_special_tokens=False), self._start]
            self._put(out, media, item.piece(number, nth, len(out)), self._video)
            out.append(self._end)

    def _seen(self, item: MediaItem) -> tuple[list[dict[str, np.ndarray]], list[float]]:
        """A video's pieces, as many frames at once as a patch has, and the times of their middles."""
        pieces: list[dict[str, np.ndarray]] = []
        middles: list[float] = []
        frames, video, sample = videos.decode(item, self._sampled, self._videos.resample, self.context.max_pixels)
        times = [index / video.rate for index in sample.indices]
        for start in range(0, len(frames), self._times):
            last = min(start + self._times, len(frames)) - 1
            middles.append((times[start] + times[last]) / 2)
            pixels = [self._videos.scaling.numbers(frame) for frame in frames[start : last + 1]]
            pixels += [pixels[-1]] * (self._times - len(pixels))
            pieces.append(self._patches(pixels))
        if self._joined is not None:
            self._joined.place(pieces, video, len(frames))
        return pieces, middles

    def _sampled(self, video: videos.Video) -> videos.Sample:
        """So many frames a second, within bounds; in a size in which all of them have no more pixels than may be."""
        given, side = self._videos, self._patch * self._merge
        if self._joined is not None:
            _check_proportions(video)
            count = self._joined.count(video, given.rate, given.least, given.most)
            return self._joined.sample(video, count, given.least_pixels, given.most_pixels)
        count = min(max(int(video.num_frames / video.rate * given.rate), given.least), given.most, video.num_frames)
        indices = np.linspace(0, video.num_frames - 1, count).round().astype(int).tolist()
        height, width = video.height, video.width
        if min(height, width) < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        _check_proportions(video)
        edges = [round(edge / side) * side for edge in (height, width)]
        planes = max(round(count / self._times) * self._times, self._times)
        if planes * edges[0] * edges[1] > given.most_pixels:
            factor = math.sqrt(count * height * width / given.most_pixels)
            edges = [max(side, math.floor(edge / factor / side) * side) for edge in (height, width)]
        elif planes * edges[0] * edges[1] < given.least_pixels:
            factor = math.sqrt(given.least_pixels / (count * height * width))
            edges = [math.ceil(edge * factor / side) * side for edge in (height, width)]
        return videos.Sample(indices, width=edges[1], height=edges[0])

    def _scaled_image(self, item: MediaItem) -> np.ndarray:
        image = decode(item, self.context.max_pixels)
        return self._scaling.numbers(image.resize(self._scaled(image, item.name), self._resample))

    def _patches(self, frames: list[np.ndarray]) -> dict[str, np.ndarray]:
        """frames: [3, height, width] each, as many as a patch has, or one that stands for all."""
        side, merge = self._patch, self._merge
        rows, columns = (edge // side for edge in frames[0].shape[1:])
        squares = np.stack(frames).reshape(-1, 3, rows // merge, merge, side, columns // merge, merge, side)
        squares = squares.transpose(2, 5, 3, 6, 1, 0, 4, 7)
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


def _check_proportions(video: videos.Video) -> None:
    if max(video.height, video.width) > LONGEST * min(video.height, video.width):
        raise InvalidRequest(
            f"the video of {video.width} x {video.height} is more than {LONGEST} times as long as wide"
        )


def _joined(architecture: str, vision: Mapping[str, Any], side: int, times: int) -> Joined | None:
    """How the models before Qwen3-VL have videos; None: of another one."""
    if architecture == "Qwen2VLForConditionalGeneration":
        return Joined(side, times, None)
    if architecture == "Qwen2_5_VLForConditionalGeneration":
        return Joined(side, times, float(vision.get("tokens_per_second") or 4))
    return None


@dataclass(frozen=True, slots=True)
class _Videos:
    """How videos are sampled and scaled: video_preprocessor_config.json, and what ``--mm-processor-kwargs`` says."""

    rate: float  # frames a second
    least: int  # frames
    most: int
    least_pixels: int  # of all frames together; of each where ``Joined`` has them
    most_pixels: int
    resample: Image.Resampling
    scaling: Scaling

    @staticmethod
    def of(config: Mapping[str, Any], *, is_joined: bool) -> _Videos:
        """Raises ``ValueError`` and its like."""
        given = cast("Mapping[str, Any]", config.get("video_processor") or {})
        given = {**given, **{name: config[name] for name in ("fps", "min_frames", "max_frames") if config.get(name)}}
        sizes = cast("Mapping[str, Any]", given.get("size") or {})
        rate, least, most = float(given.get("fps") or 2), int(given.get("min_frames") or 4), given.get("max_frames")
        most = int(most or MAX_FRAMES)
        if not 0 < rate <= 1000 or not 1 <= least <= most <= MAX_FRAMES:
            raise ValueError(f"fps must be up to 1000, and min_frames and max_frames 1 to {MAX_FRAMES}")
        square, half = (28 * 28 if is_joined else 32 * 32), (0.5, 0.5, 0.5)
        mean, std = (CLIP_MEAN, CLIP_STD) if is_joined else (half, half)
        return _Videos(
            rate,
            least,
            most,
            _pixels(sizes.get("shortest_edge") or 128 * square),
            _pixels(sizes.get("longest_edge") or square * 768),
            Image.Resampling(given.get("resample") or Image.Resampling.BICUBIC),
            Scaling.of(given, mean, std),
        )


def _pixels(value: Any) -> int:
    if not isinstance(value, int) or not 0 < value <= 2**26:
        raise ValueError(f"a number of pixels must be 1 to {2**26}, not {value!r}")
    return value
