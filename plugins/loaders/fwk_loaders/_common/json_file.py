"""Files of a model folder that is not trusted: their sizes are checked before they are read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from fwk.errors import ModelLoadError
from fwk_files.regular import read_regular

MAX_JSON_BYTES = 64 * 2**20
MAX_JSON_MEMBERS = 2**20
"""Commas: a few bytes each in a file, and a hundred once read. The largest index there is has 100,000."""
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``ModelLoadError`` naming the file when it is missing, damaged or something else."""
    text = read_bytes(path, MAX_JSON_BYTES)
    if text.count(b",") > MAX_JSON_MEMBERS:
        raise ModelLoadError(f"{path}: it has more than {MAX_JSON_MEMBERS} members, which no such file has")
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # half a pair is no text, and no library takes it
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON ({error}); fetch the file again") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """A file of at most ``max_bytes``. Raises ``ModelLoadError`` naming it when it cannot be read or is larger."""
    try:
        return read_regular(path, max_bytes)
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror or error}") from error
