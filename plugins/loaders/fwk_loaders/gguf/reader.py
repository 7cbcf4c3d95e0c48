"""The GGUF container: a bounds-checked reader of its header.

Layout (little endian): magic ``GGUF``, version u32, number of tensors u64, number of metadata entries u64; then the
metadata (key, type u32, value), the tensor table (name, number of dimensions u32, dimensions u64 innermost first, type
u32, offset u64) and, from the next multiple of ``general.alignment`` on, the tensors' bytes. A string is a u64 length
and that many bytes of UTF-8; an array is its element type u32, a u64 count and the elements.

The file is not trusted. Every count, length and offset is compared with what is left of the file before anything is
read or allocated, so that a damaged header costs milliseconds. Arrays stay in the file until they are asked for.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fwk.errors import ModelLoadError
from fwk_files.regular import open_regular
from fwk_loaders.gguf.types import TENSOR_TYPES, TensorType, describe_unread

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_ENTRIES = 2**16
MAX_TENSORS = 2**17
MAX_KEY_BYTES = 2**16 - 1
MAX_NAME_BYTES = 256
MAX_STRING_BYTES = 2**24
MAX_STRINGS = 2**22  # in all arrays together: the largest vocabularies have 2**18 tokens and 2**19 merges
MAX_DIMS = 4
MAX_ALIGNMENT = 2**20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_STRUCTS = {number: struct.Struct(code) for number, code in _SCALARS.items()}
_BOOL, _STRING, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: ``start`` is from the beginning of the file; ``shape`` is outermost dimension first."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array still in the file: element type, number of elements, position of the first one."""

    type: int
    count: int
    start: int


class GGUFFile:
    """An opened GGUF file: ``metadata`` (arrays as ``StoredArray``), ``tensors`` by name, and the mapped bytes."""

    def __init__(self, path: Path) -> None:
        """Map the file and read its header. Raises ``ModelLoadError`` naming the file and what is damaged."""
        self.path = path
        self.buffer = _map(path)
        header = _Header(path, self.buffer)
        self.version, self.metadata, self.tensors = header.read()

    def strings(self, key: str, most: int | None = None) -> list[str]:
        """The elements of an array of strings, or its first ``most``; its bounds were checked on opening the file."""
        array = self._array(key)
        if array.type != _STRING:
            raise ModelLoadError(f"{self.path}: {key} must be an array of strings")
        buffer, position = self.buffer, array.start
        found: list[str] = []
        try:
            for _ in range(array.count if most is None else min(array.count, most)):
                begin = position + 8
                position = begin + _U64.unpack_from(buffer, position)[0]
                found.append(buffer[begin:position].decode())
        except UnicodeDecodeError:
            raise ModelLoadError(f"{self.path}: element {len(found)} of {key} is not UTF-8 text") from None
        return found

    def numbers(self, key: str) -> list[Any]:
        """The elements of an array of numbers or booleans."""
        array = self._array(key)
        if array.type == _STRING:
            raise ModelLoadError(f"{self.path}: {key} must be an array of numbers")
        return np.frombuffer(self.buffer, np.dtype(_SCALARS[array.type]), array.count, array.start).tolist()

    def release(self, info: TensorInfo) -> None:
        """Let a tensor's pages leave memory. They come back from the file should anybody read them again."""
        if hasattr(mmap, "MADV_DONTNEED"):
            first = info.start // mmap.PAGESIZE * mmap.PAGESIZE
            self.buffer.madvise(mmap.MADV_DONTNEED, first, info.start + info.num_bytes - first)

    def _array(self, key: str) -> StoredArray:
        value = self.metadata.get(key)
        if not isinstance(value, StoredArray):
            what = "is missing" if value is None else "must be an array"
            raise ModelLoadError(f"{self.path}: {key} {what}; the file is damaged or was converted incompletely")
        return value


def _map(path: Path) -> mmap.mmap:
    try:
        with open_regular(path) as file:
            if file.read(4) != MAGIC:
                raise ModelLoadError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise ModelLoadError(f"{path}: truncated: {size} bytes, not even a whole GGUF header")
            # A private mapping: tensors made from it are writable for torch, and the file never changes.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


class _Header:
    """Walks the header once, front to back."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self._size = len(buffer)
        self._position = 4
        self._num_strings = 0

    def read(self) -> tuple[int, Mapping[str, Any], Mapping[str, TensorInfo]]:
        version = self._u32("the version")
        if version not in VERSIONS:
            hint = " (big-endian file)" if version in (0x02000000, 0x03000000) else ""
            raise self._damaged(f"GGUF version {version}{hint} is not supported; supported: little-endian 2 and 3")
        num_tensors = self._count("the number of tensors", 24, MAX_TENSORS)
        num_entries = self._count("the number of metadata entries", 13, MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for index in range(num_entries):
            key = self._string(f"the key of metadata entry {index}", MAX_KEY_BYTES)
            if not key or key in metadata:
                raise self._damaged(f"metadata entry {index} has {'a repeated' if key else 'an empty'} key {key!r}")
            metadata[key] = self._value(key, self._u32(f"the type of {key}"))
        return version, metadata, self._tensors(num_tensors, metadata)

    def _tensors(self, count: int, metadata: Mapping[str, Any]) -> Mapping[str, TensorInfo]:
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._damaged(
                f"general.alignment must be a power of two from 8 to {MAX_ALIGNMENT}, not {_short(alignment)}"
            )
        tensors: dict[str, TensorInfo] = {}
        for index in range(count):
            info = self._tensor(index, alignment)
            if info.name in tensors:
                raise self._damaged(f"tensor {info.name!r} is listed twice")
            tensors[info.name] = info
        base = -(-self._position // alignment) * alignment
        end, previous = base, "the header"
        placed: dict[str, TensorInfo] = {}
        for info in sorted(tensors.values(), key=lambda item: item.start):
            start = base + info.start
            if start < end:
                raise self._damaged(f"tensor {info.name!r} overlaps {previous}")
            end, previous = start + info.num_bytes, f"tensor {info.name!r}"
            if end > self._size:
                raise self._damaged(
                    f"tensor {info.name!r} ends at byte {end}, but the file has {self._size}: it is truncated or "
                    "damaged; fetch it again"
                )
            placed[info.name] = TensorInfo(info.name, info.shape, info.type, start, info.num_bytes)
        return placed

    def _tensor(self, index: int, alignment: int) -> TensorInfo:
        """One line of the tensor table; ``start`` still counts from the beginning of the data."""
        name = self._string(f"the name of tensor {index}", MAX_NAME_BYTES)
        if not name:
            raise self._damaged(f"tensor {index} has no name")
        where = f"tensor {name!r}"
        num_dims = self._u32(f"the number of dimensions of {where}")
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._damaged(f"{where} has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [self._u64(f"the dimensions of {where}") for _ in range(num_dims)]
        number = self._u32(f"the type of {where}")
        offset = self._u64(f"the offset of {where}")
        stored = TENSOR_TYPES.get(number)
        if stored is None:
            raise self._damaged(f"{where} {describe_unread(number)}")
        if dims[0] % stored.block_size:
            raise self._damaged(f"{where} has rows of {dims[0]} values, not a multiple of {stored.block_size}")
        num_values = 1
        for dim in dims:
            num_values *= dim  # an int of Python: it cannot overflow
        num_bytes = num_values // stored.block_size * stored.block_bytes
        if num_values == 0 or num_bytes > self._size or offset > self._size:
            raise self._damaged(
                f"{where} of dimensions {dims} at offset {offset} does not fit in a file of {self._size} bytes: it is "
                "truncated or damaged; fetch it again"
            )
        if offset % alignment:
            raise self._damaged(f"{where} is at offset {offset}, not a multiple of the alignment {alignment}")
        return TensorInfo(name, tuple(reversed(dims)), stored, offset, num_bytes)

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key, MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._skip_array(key)
        reader = _STRUCTS.get(kind)
        if reader is None:
            raise self._damaged(f"{key} has the unknown value type {kind}")
        value = reader.unpack_from(self._buffer, self._take(reader.size, key))[0]
        if kind == _BOOL:
            if value > 1:
                raise self._damaged(f"{key} is a boolean, but has the value {value}")
            return bool(value)
        return value

    def _skip_array(self, key: str) -> StoredArray:
        kind = self._u32(f"the element type of {key}")
        if kind == _STRING:
            count = self._count(f"the length of {key}", 8, MAX_STRINGS - self._num_strings)
            self._num_strings += count
            start = self._position
            self._skip_strings(key, count)
        elif kind in _STRUCTS:
            count = self._count(f"the length of {key}", _STRUCTS[kind].size, self._size)
            start = self._take(count * _STRUCTS[kind].size, key)
        else:
            raise self._damaged(f"{key} is an array of the unsupported element type {kind}")
        return StoredArray(kind, count, start)

    def _skip_strings(self, key: str, count: int) -> None:
        buffer, position, last = self._buffer, self._position, self._size - 8
        unpack = _U64.unpack_from
        for index in range(count):
            if position > last:
                raise self._damaged(f"element {index} of {key} runs past the end of the file")
            position += 8 + unpack(buffer, position)[0]
        if position > self._size:
            raise self._damaged(f"the last element of {key} runs past the end of the file")
        self._position = position

    def _string(self, what: str, max_bytes: int) -> str:
        length = self._u64(f"the length of {what}")
        if length > min(max_bytes, self._size - self._position):
            raise self._damaged(f"{what} has a length of {length} bytes; at most {max_bytes} are possible and "
                                f"{self._size - self._position} are left in the file")  # fmt: skip
        start = self._take(length, what)
        try:
            return self._buffer[start : start + length].decode()
        except UnicodeDecodeError:
            raise self._damaged(f"{what} is not UTF-8 text") from None

    def _count(self, what: str, min_bytes: int, limit: int) -> int:
        """A count of things that take at least ``min_bytes`` each."""
        count = self._u64(what)
        limit = min(limit, (self._size - self._position) // min_bytes)
        if count > limit:
            raise self._damaged(f"{what} is {count}; in the rest of the file at most {limit} are possible")
        return count

    def _u32(self, what: str) -> int:
        return _U32.unpack_from(self._buffer, self._take(4, what))[0]

    def _u64(self, what: str) -> int:
        return _U64.unpack_from(self._buffer, self._take(8, what))[0]

    def _take(self, num_bytes: int, what: str) -> int:
        """Move past ``num_bytes`` bytes; where they start."""
        start = self._position
        if num_bytes > self._size - start:
            raise self._damaged(f"ends inside {what}: it is truncated; fetch it again")
        self._position = start + num_bytes
        return start

    def _damaged(self, message: str) -> ModelLoadError:
        return ModelLoadError(f"{self._path}: {message}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."
