"""Videos of clients: some of their frames, decoded within bounds."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from PIL import Image

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem

try:
    import av as _av
except ImportError:
    av: Any = None
else:
    av = _av

_KINDS: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("mov", lambda head: head[4:8] == b"ftyp"),
    ("matroska", lambda head: head[:4] == b"\x1a\x45\xdf\xa3"),
    ("avi", lambda head: head[:4] == b"RIFF" and head[8:12] == b"AVI "),
)
"""Containers by their first bytes. No other is tried: some of FFmpeg's are lists of files and addresses to open."""

MAX_FRAMES = 200_000
"""Of a video, read or not."""
RATE = 24.0
"""Frames a second where a file does not say."""


class Video(NamedTuple):
    """What is known of a video before a frame of it is decoded."""

    num_frames: int
    rate: float  # frames a second
    width: int
    height: int


class Sample(NamedTuple):
    """Which frames are wanted, and in what size."""

    indices: Sequence[int]  # in order
    width: int
    height: int


def decode(
    item: MediaItem, choose: Callable[[Video], Sample], resample: Image.Resampling, max_pixels: int
) -> tuple[list[Image.Image], Video, Sample]:
    """The frames that ``choose`` asks for, in RGB. Where decoding ends too soon, the last one stands for the rest.

    Raises ``InvalidRequest`` naming the item and what to do about it.
    """
    if av is None:
        raise InvalidRequest(
            f"{item.name}: this server decodes no videos (pip install 'fwk[audio]'): send frames as images", item.name
        )
    kind = next((name for name, fits in _KINDS if fits(item.data[:16])), None)
    if kind is None:
        raise InvalidRequest(
            f"{item.name} is no MP4, MOV, WebM, Matroska or AVI file, or its beginning is damaged: convert it",
            item.name,
        )
    frames: list[Image.Image] = []
    try:
        video = _video(item, kind, max_pixels)
    except (av.FFmpegError, ValueError, OSError):
        raise _damaged(item) from None
    sample = choose(video)
    try:
        _read(item, kind, sample, resample, max_pixels, frames)
    except (av.FFmpegError, ValueError, OSError) as error:
        if not frames or isinstance(error, MemoryError):
            raise _damaged(item) from None
    if not frames:
        raise _damaged(item)
    frames += [frames[-1]] * (len(sample.indices) - len(frames))
    return frames, video, sample


def _video(item: MediaItem, kind: str, max_pixels: int) -> Video:
    """Packets are counted: few files say how many frames there are."""
    with av.open(io.BytesIO(item.data), format=kind) as container:
        if not container.streams.video:
            raise InvalidRequest(f"{item.name}: there is no picture in the file", item.name)
        stream = container.streams.video[0]
        count = 0
        for packet in container.demux(stream):
            count += packet.size > 0
            if count > MAX_FRAMES:
                raise InvalidRequest(f"{item.name}: the video has more than {MAX_FRAMES} frames: cut it", item.name)
        width, height = stream.codec_context.width, stream.codec_context.height
        rate = float(stream.average_rate or stream.guessed_rate or RATE)
    if not count or not min(width, height):
        raise _damaged(item)
    _check_size(item, width, height, max_pixels)
    return Video(count, rate if rate > 0 else RATE, width, height)


def _read(
    item: MediaItem,
    kind: str,
    sample: Sample,
    resample: Image.Resampling,
    max_pixels: int,
    frames: list[Image.Image],
) -> None:
    with av.open(io.BytesIO(item.data), format=kind) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        counts = Counter(sample.indices)
        for number, frame in enumerate(container.decode(stream)):
            if not (count := counts[number]):
                continue
            _check_size(item, frame.width, frame.height, max_pixels)
            frames += [frame.to_image().resize((sample.width, sample.height), resample)] * count
            if len(frames) == len(sample.indices):
                return


def _check_size(item: MediaItem, width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise InvalidRequest(
            f"{item.name}: the video of {width} x {height} pixels has more than the {max_pixels} that this server "
            "decodes (--max-image-pixels): scale it down",
            item.name,
        )


def _damaged(item: MediaItem) -> InvalidRequest:
    return InvalidRequest(f"{item.name}: the video is damaged or cut short; send the whole file", item.name)
