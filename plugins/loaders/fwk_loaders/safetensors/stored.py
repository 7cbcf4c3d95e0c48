"""Where the tensors of safetensors files lie, read off their headers without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import StoredTensor
from fwk_files.regular import open_regular
from fwk_loaders._common.bits import BITS

MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 2**16
"""Of one file. The largest models there are have 100,000, in more than a hundred files."""

MAX_MEMBERS = 2**18
"""Commas in a header, aside from the 16 of each tensor: of metadata, in which trainers keep their settings."""

MAX_DIMS = 64


def stored_tensors(files: Mapping[Path, list[str] | None]) -> dict[str, StoredTensor]:
    """Of files and the tensors that the index promises in each (None: all). Raises ``ModelLoadError``."""
    found: dict[str, StoredTensor] = {}
    for path, promised in files.items():
        try:
            held = _header(path)
            found |= held if promised is None else {name: held[name] for name in promised}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelLoadError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error
    return found


def check_header(path: Path) -> None:
    """Raise ``ValueError`` for a header that takes far more memory to read than any has, and ``OSError``.

    For a library that reads the file itself, into ten times the header's size and more.
    """
    with open_regular(path) as file:
        _text(file)


def _text(file: BinaryIO) -> bytes:
    start = file.read(8)
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > MAX_HEADER_BYTES:
        raise ValueError(f"the header is of {size} bytes" if start else "it is empty")
    text = file.read(size)
    num_objects = text.count(b"{")
    if num_objects > MAX_TENSORS:
        raise ValueError(f"the header has more than {MAX_TENSORS} tensors")
    if text.count(b",") > MAX_MEMBERS + 16 * num_objects:
        raise ValueError("the header has more members than any has")
    return text


def _header(path: Path) -> dict[str, StoredTensor]:
    with open_regular(path) as file:
        text = _text(file)
        header: dict[str, Any] = json.loads(text)
        end = file.seek(0, 2)
    start = 8 + len(text)
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        is_shape = len(shape) <= MAX_DIMS and all(type(size) is int and 0 <= size < 2**63 for size in shape)
        if not is_shape or type(first) is not int or type(last) is not int or not 0 <= first <= last <= end - start:
            raise ValueError(f"tensor {name!r} does not fit into the file")
        if math.prod(shape) * BITS[entry["dtype"]] != 8 * (last - first):
            raise ValueError(f"tensor {name!r} does not fit into the file")
        found[name] = StoredTensor(path, start + first, last - first, entry["dtype"], shape)
    return found
