"""The mapped bytes of a safetensors file, whose pages leave memory once a tensor was read.

The safetensors library has checked the header (that offsets follow one another and suit shapes) before this reads it.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk_files.regular import open_regular
from fwk_loaders._common.dtypes import DTYPES


@dataclass(frozen=True, slots=True)
class _Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class MappedFile:
    """Tensors that are views of a private mapping of one file."""

    def __init__(self, path: Path) -> None:
        """Raises ``ModelLoadError``."""
        try:
            with open_regular(path) as file:
                self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            size = struct.unpack_from("<Q", self._memory)[0]
            header = json.loads(self._memory[8 : 8 + size])
        except (OSError, ValueError, struct.error) as error:
            raise ModelLoadError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error
        self._places: dict[str, _Place] = {}
        for name, entry in header.items():
            dtype = DTYPES.get(entry.get("dtype", ""))
            if dtype is None:  # left to the library
                continue
            start = 8 + size + entry["data_offsets"][0]
            if start % dtype.itemsize == 0 and math.prod(entry["shape"]):
                self._places[name] = _Place(dtype, tuple(entry["shape"]), start)

    def tensor(self, name: str) -> Tensor | None:
        """A view of the file, not to be written to; None where the library has to read it."""
        place = self._places.get(name)
        if place is None:
            return None
        count = math.prod(place.shape)
        return torch.frombuffer(self._memory, dtype=place.dtype, count=count, offset=place.start).view(place.shape)

    def counts(self) -> list[tuple[torch.dtype, int]]:
        """The type of each tensor, and its numbers."""
        return [(place.dtype, math.prod(place.shape)) for place in self._places.values()]

    def dtype_of(self, name: str) -> torch.dtype | None:
        """None where ``tensor`` has none."""
        place = self._places.get(name)
        return None if place is None else place.dtype

    def release(self, name: str) -> None:
        """Let a tensor's pages leave memory. They come back from the file should anybody read them again."""
        place = self._places.get(name)
        if place is not None and hasattr(mmap, "MADV_DONTNEED"):
            first = place.start // mmap.PAGESIZE * mmap.PAGESIZE
            self._memory.madvise(mmap.MADV_DONTNEED, first, place.start + place.num_bytes - first)
