"""Where the tensors of safetensors files lie, read off their headers without torch."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fwk.config.files import open_regular
from fwk.errors import ModelLoadError
from fwk.interfaces.loader import StoredTensor
from fwk_loaders._common.bits import BITS

MAX_HEADER_BYTES = 100_000_000
"""The library's own limit."""

MAX_TENSORS = 2**18
"""Of one file; the largest models there are have half as many in all of theirs."""


def stored_tensors(files: Mapping[Path, list[str] | None]) -> dict[str, StoredTensor]:
    """Of files and the tensors that the index promises in each (None: all). Raises ``ModelLoadError``."""
    found: dict[str, StoredTensor] = {}
    for path, promised in files.items():
        try:
            held = _header(path)
            found |= held if promised is None else {name: held[name] for name in promised}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError) as error:
            raise ModelLoadError(f"{path}: not a whole safetensors file ({error}); fetch it again") from error
    return found


def _header(path: Path) -> dict[str, StoredTensor]:
    with open_regular(path) as file:
        (size,) = struct.unpack("<Q", file.read(8))
        if size > MAX_HEADER_BYTES:
            raise ValueError("the header is too large")
        text = file.read(size)
        if text.count(b"{") > MAX_TENSORS:  # before it is read, which takes ten times its size
            raise ValueError(f"the header has more than {MAX_TENSORS} tensors")
        header: dict[str, Any] = json.loads(text)
        end = file.seek(0, 2)
    found: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        shape = tuple(entry["shape"])
        if not 0 <= first <= last <= end - 8 - size or math.prod(shape) * BITS[entry["dtype"]] != 8 * (last - first):
            raise ValueError(f"tensor {name!r} does not fit into the file")
        found[name] = StoredTensor(path, 8 + size + first, last - first, entry["dtype"], shape)
    return found
