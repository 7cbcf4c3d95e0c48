"""Sounds of clients: decoded within bounds, piece by piece, and brought to one channel and one rate."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem
from fwk_multimodal._common.resampling import Resampler

try:
    import av as _av
except ImportError:
    av: Any = None
else:
    av = _av

RATE = 16_000
"""Samples a second that models hear."""
HOP = 160
"""Samples from one frame of a spectrogram to the next."""

_KINDS: tuple[tuple[str, Callable[[bytes], bool]], ...] = (
    ("wav", lambda head: head[:4] in (b"RIFF", b"RIFX", b"RF64") and head[8:12] == b"WAVE"),
    ("flac", lambda head: head[:4] == b"fLaC"),
    ("ogg", lambda head: head[:4] == b"OggS"),
    ("mp3", lambda head: head[:3] == b"ID3" or (head[:1] == b"\xff" and head[1:2] in b"\xfa\xfb\xf2\xf3\xe3")),
    ("aac", lambda head: head[:1] == b"\xff" and head[1:2] in b"\xf0\xf1\xf8\xf9"),
    ("mov", lambda head: head[4:8] == b"ftyp"),
    ("matroska", lambda head: head[:4] == b"\x1a\x45\xdf\xa3"),
)
"""Containers by their first bytes. No other is tried: some of FFmpeg's are lists of files and addresses to open."""

BLOCK = 2**18
"""Frames that are read of a WAV file at a time."""
MAX_CHUNKS = 256
"""Of a WAV file, before its samples."""
RATES = (1000, 384_000)
"""Lowest and highest samples a second."""
UNKNOWN = 0x7FFF_0000
"""What is written as a length while a file is written, and stays where it was a stream, is at least this."""


@dataclass(frozen=True, slots=True)
class Limit:
    """How long a sound may be; ``why`` ends a sentence."""

    seconds: float
    why: str = "that this model hears at once: cut it"

    def error(self, name: str) -> InvalidRequest:
        """For a longer one."""
        return InvalidRequest(f"{name}: the sound is longer than the {self.seconds:g} seconds {self.why}", name)


def decode(item: MediaItem, max_seconds: float) -> np.ndarray:
    """[num_samples] float32 from -1 to 1, mono, at ``RATE``.

    Raises ``InvalidRequest`` that names the item for what is no sound, damaged, or longer than ``max_seconds``.
    """
    parts = list(pieces(io.BytesIO(item.data), item.name, Limit(max_seconds)))
    return np.concatenate(parts) if parts else np.empty(0, np.float32)


def pieces(file: BinaryIO, name: str, limit: Limit) -> Iterator[np.ndarray]:
    """The same of a file, some samples at a time. What its head says is too long is refused before it is decoded."""
    head = file.read(16)
    kind = next((kind for kind, fits in _KINDS if fits(head)), None)
    if kind is None:
        raise InvalidRequest(
            f"{name} is no WAV, MP3, FLAC, Ogg, M4A or WebM file, or its beginning is damaged: convert it", name
        )
    found = _plain_wav(file, name, limit) if kind == "wav" else None
    if found is None:
        file.seek(0)
        found = _by_library(file, kind, name, limit)
    count = 0
    for part in found:
        count += len(part)
        if count > limit.seconds * RATE:
            raise limit.error(name)
        yield part


def _damaged(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name}: the sound is damaged or cut short; send the whole file", name)


@dataclass(frozen=True, slots=True)
class _Frames:
    """How the samples of a WAV file are written."""

    code: int  # 1: whole numbers, 3: floats
    channels: int
    rate: int
    width: int  # bytes of a sample

    def read(self, body: bytes) -> np.ndarray:
        """[num_frames] float32: the mean of the channels."""
        if self.code == 3:
            samples = np.frombuffer(body, f"<f{self.width}").astype(np.float32)
            samples = np.nan_to_num(samples, posinf=1.0, neginf=-1.0).clip(-1, 1)
        elif self.width == 1:
            samples = (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / 128
        elif self.width == 3:
            wide = np.zeros((len(body) // 3, 4), np.uint8)
            wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
            samples = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
        else:
            samples = np.frombuffer(body, f"<i{self.width}").astype(np.float32) / 2 ** (8 * self.width - 1)
        return samples.reshape(-1, self.channels).mean(1, dtype=np.float32)


def _plain_wav(file: BinaryIO, name: str, limit: Limit) -> Iterator[np.ndarray] | None:
    """Of whole numbers or floats, as most are; None for all others, and what has no such head."""
    found = _chunks(file)
    if found is None:
        return None
    form, start, size, left = found
    if left < size < UNKNOWN:
        raise _damaged(name)
    code, channels, rate, _, align, bits = struct.unpack("<HHIIHH", form[:16])
    if code == 0xFFFE and len(form) >= 26:  # extensible: the format's own code follows
        code = struct.unpack("<H", form[24:26])[0]
    width = bits // 8
    if not 0 < channels <= 64 or not RATES[0] <= rate <= RATES[1] or bits % 8 or align != channels * width:
        return None
    if width not in {1: (1, 2, 3, 4), 3: (4, 8)}.get(code, ()):
        return None
    count = min(size, left) // align
    if count > limit.seconds * rate:
        raise limit.error(name)
    file.seek(start)
    return _read(file, _Frames(code, channels, rate, width), count)


def _read(file: BinaryIO, frames: _Frames, count: int) -> Iterator[np.ndarray]:
    resampler, align = Resampler(frames.rate, RATE), frames.channels * frames.width
    while count > 0:
        body = file.read(min(count, BLOCK) * align)
        count = count - len(body) // align if len(body) >= align else 0
        yield resampler.push(frames.read(body[: len(body) // align * align]))
    yield resampler.push(np.empty(0, np.float32), is_last=True)


def _chunks(file: BinaryIO) -> tuple[bytes, int, int, int] | None:
    """Of a RIFF file: ``fmt``, where ``data`` begins, how long it is said to be, and how much there is."""
    end = file.seek(0, 2)
    file.seek(0)
    if file.read(4) != b"RIFF":
        return None
    form, at = b"", 12
    for _ in range(MAX_CHUNKS):
        file.seek(at)
        head = file.read(8)
        if len(head) < 8:
            break
        name, size = struct.unpack("<4sI", head)
        if name == b"fmt ":
            form = file.read(min(size, 64))
        elif name == b"data":
            return (form, at + 8, size, end - at - 8) if len(form) >= 16 else None
        at += 8 + size + size % 2
    return None


def _by_library(file: BinaryIO, kind: str, name: str, limit: Limit) -> Iterator[np.ndarray]:
    if av is None:
        raise InvalidRequest(
            f"{name}: this server decodes WAV files of PCM only: send one (pip install 'fwk[audio]' adds others)", name
        )
    has_some = False
    try:
        with av.open(file, format=kind) as container:
            if not container.streams.audio:
                raise InvalidRequest(f"{name}: there is no sound in the file", name)
            stream = container.streams.audio[0]
            _check_head(container, stream, name, limit)
            resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            for frame in container.decode(stream):
                for part in resampler.resample(frame):
                    has_some = True
                    yield part.to_ndarray()[0].astype(np.float32)
            for part in resampler.resample(None) if has_some else ():
                yield part.to_ndarray()[0].astype(np.float32)
    except (av.FFmpegError, ValueError, OSError) as error:
        if not has_some or isinstance(error, MemoryError):
            raise _damaged(name) from None
    if not has_some:
        raise InvalidRequest(f"{name}: there is no sound in the file", name)


def _check_head(container: Any, stream: Any, name: str, limit: Limit) -> None:
    """Refuse what says of itself that it is too much. A length that is a guess may be half as long again."""
    rate = stream.codec_context.sample_rate or RATE
    if not RATES[0] <= rate <= RATES[1]:
        raise InvalidRequest(f"{name}: the sound has {rate} samples a second; {RATES[0]} to {RATES[1]} are read", name)
    seconds = (container.duration or 0) / 1_000_000
    if seconds > 1.5 * limit.seconds + 1:
        raise limit.error(name)


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """[n] float32 at ``rate`` to ``RATE``."""
    return Resampler(rate, RATE).push(samples, is_last=True)
