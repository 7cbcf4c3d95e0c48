"""Sounds of clients: decoded within bounds, brought to one channel and one rate, and seen as a log-mel spectrogram."""

from __future__ import annotations

import io
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.multimodal import MediaItem

try:
    import av as _av
except ImportError:
    av: Any = None
else:
    av = _av

RATE = 16_000
"""Samples a second that models hear."""
FRAME, HOP = 400, 160
"""Samples of a frame of the spectrogram, and from one to the next."""

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


def decode(item: MediaItem, max_seconds: float) -> np.ndarray:
    """[num_samples] float32 from -1 to 1, mono, at ``RATE``.

    Raises ``InvalidRequest`` that names the item for what is no sound, damaged, or longer than ``max_seconds``.
    """
    kind = next((name for name, fits in _KINDS if fits(item.data[:16])), None)
    if kind is None:
        raise InvalidRequest(
            f"{item.name} is no WAV, MP3, FLAC, Ogg, M4A or WebM file, or its beginning is damaged: convert it",
            item.name,
        )
    found = _plain_wav(item, max_seconds) if kind == "wav" else None
    samples = _by_library(item, kind, max_seconds) if found is None else found
    if len(samples) > max_seconds * RATE:
        raise InvalidRequest(
            f"{item.name}: the sound is longer than the {max_seconds:g} seconds that this model hears at once: cut it",
            item.name,
        )
    return samples


def _plain_wav(item: MediaItem, max_seconds: float) -> np.ndarray | None:
    """Of whole numbers or floats, as most are; None for all others, and what has no such head."""
    found = _chunks(item.data)
    if found is None or item.data[:4] != b"RIFF":
        return None
    form, body, size = found
    if len(body) < size < UNKNOWN:
        raise InvalidRequest(f"{item.name}: the sound is damaged or cut short; send the whole file", item.name)
    code, channels, rate, _, align, bits = struct.unpack("<HHIIHH", form[:16])
    if code == 0xFFFE and len(form) >= 26:  # extensible: the format's own code follows
        code = struct.unpack("<H", form[24:26])[0]
    width = bits // 8
    if not 0 < channels <= 64 or not 1000 <= rate <= 384_000 or bits % 8 or align != channels * width:
        return None
    body = body[: int((max_seconds + 1) * rate) * align]
    body = body[: len(body) // align * align]
    if code == 3 and width in (4, 8):
        samples = np.frombuffer(body, f"<f{width}").astype(np.float32)
        samples = np.nan_to_num(samples, posinf=1.0, neginf=-1.0).clip(-1, 1)
    elif code == 1 and width == 1:
        samples = (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / 128
    elif code == 1 and width == 3:
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        samples = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    elif code == 1 and width in (2, 4):
        samples = np.frombuffer(body, f"<i{width}").astype(np.float32) / 2 ** (bits - 1)
    else:
        return None
    return resampled(samples.reshape(-1, channels).mean(1, dtype=np.float32), rate)


UNKNOWN = 0x7FFF_0000
"""What is written as a length while a file is written, and stays where it was a stream, is at least this."""


def _chunks(data: bytes) -> tuple[bytes, bytes, int] | None:
    """``fmt`` and ``data`` of a RIFF file, and how long the latter is said to be."""
    form, at = b"", 12
    while at + 8 <= len(data):
        name, size = struct.unpack("<4sI", data[at : at + 8])
        if name == b"fmt ":
            form = data[at + 8 : at + 8 + size]
        elif name == b"data":
            return (form, data[at + 8 : at + 8 + size], size) if len(form) >= 16 else None
        at += 8 + size + size % 2
    return None


def _by_library(item: MediaItem, kind: str, max_seconds: float) -> np.ndarray:
    if av is None:
        raise InvalidRequest(
            f"{item.name}: this server decodes WAV files of PCM only: send one (pip install 'fwk[audio]' adds others)",
            item.name,
        )
    most = int((max_seconds + 1) * RATE)
    parts: list[np.ndarray] = []
    count = 0
    try:
        with av.open(io.BytesIO(item.data), format=kind) as container:
            if not container.streams.audio:
                raise InvalidRequest(f"{item.name}: there is no sound in the file", item.name)
            resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
            for frame in container.decode(container.streams.audio[0]):
                for part in resampler.resample(frame):
                    parts.append(part.to_ndarray()[0])
                    count += len(parts[-1])
                if count > most:
                    break
            else:
                parts += [part.to_ndarray()[0] for part in resampler.resample(None)]
    except (av.FFmpegError, ValueError, OSError) as error:
        if not parts or isinstance(error, MemoryError):
            raise InvalidRequest(
                f"{item.name}: the sound is damaged or cut short; send the whole file", item.name
            ) from None
    if not parts:
        raise InvalidRequest(f"{item.name}: there is no sound in the file", item.name)
    return np.concatenate(parts).astype(np.float32)


def resampled(samples: np.ndarray, rate: int) -> np.ndarray:
    """[n] float32 at ``rate`` to ``RATE``: a sinc of 32 zero crossings under a Hann window, cut below both rates."""
    if rate == RATE or not len(samples):
        return samples
    cut = min(1.0, RATE / rate) * 0.97
    reach = math.ceil(32 / cut)
    count = len(samples) * RATE // rate
    padded = np.pad(samples.astype(np.float64), (reach, reach + 1))
    out = np.empty(count, np.float32)
    taps = np.arange(-reach, reach + 1)
    for start in range(0, count, 1 << 14):
        places = np.arange(start, min(start + (1 << 14), count)) * (rate / RATE)
        whole = np.floor(places).astype(np.int64)
        distance = taps - (places - whole)[:, None]
        weights = np.sinc(cut * distance) * cut * (0.5 + 0.5 * np.cos(np.pi * np.clip(distance / (reach + 1), -1, 1)))
        out[start : start + len(places)] = (padded[whole[:, None] + taps + reach] * weights).sum(1)
    return out


def log_mel(samples: np.ndarray, num_bins: int) -> np.ndarray:
    """[num_bins, num_samples / HOP] float32, as Whisper hears (arXiv:2212.04356, 2.2).

    The power of frames under a Hann window, by ``num_bins`` triangles on Slaney's mel scale; its logarithm at most 8
    below the largest, scaled to about -1 to 1.
    """
    window = np.hanning(FRAME + 1)[:-1]
    padded = np.pad(samples.astype(np.float64), FRAME // 2, "reflect")
    filters = _mel_filters(num_bins).T
    out = np.empty((num_bins, len(samples) // HOP))
    for start in range(0, out.shape[1], 3000):
        firsts = np.arange(start, min(start + 3000, out.shape[1])) * HOP
        frames = np.lib.stride_tricks.sliding_window_view(padded, FRAME)[firsts]
        power = np.abs(np.fft.rfft(frames * window)) ** 2
        out[:, start : start + len(firsts)] = np.log10(np.maximum(filters @ power.T, 1e-10))
    out = np.maximum(out, out.max() - 8.0)
    return ((out + 4.0) / 4.0).astype(np.float32)


def _mel_filters(num_bins: int) -> np.ndarray:
    """[FRAME / 2 + 1, num_bins]: triangles of equal area between neighbours on the mel scale, up to 8 kHz."""
    step = 200 / 3  # below 1 kHz the scale is linear, above it logarithmic
    log_step = math.log(6.4) / 27

    def mel(hertz: float) -> float:
        return hertz / step if hertz < 1000 else 15 + math.log(hertz / 1000) / log_step

    mels = np.linspace(mel(0.0), mel(8000.0), num_bins + 2)
    edges = np.where(mels < 15, mels * step, 1000 * np.exp((mels - 15) * log_step))
    bins = np.linspace(0, RATE / 2, FRAME // 2 + 1)
    slopes = edges - bins[:, None]
    widths = np.diff(edges)
    triangles = np.maximum(0, np.minimum(-slopes[:, :-2] / widths[:-1], slopes[:, 2:] / widths[1:]))
    return triangles * (2 / (edges[2:] - edges[:-2]))
