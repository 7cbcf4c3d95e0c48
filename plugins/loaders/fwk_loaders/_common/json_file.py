"""Files of a model folder that is not trusted: their sizes are checked before they are read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fwk.config.files import read_regular
from fwk.errors import ModelLoadError

MAX_JSON_BYTES = 64 * 2**20


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ``ModelLoadError`` naming the file when it is missing, damaged or something else."""
    text = read_bytes(path, MAX_JSON_BYTES)
    try:
        value = json.loads(text)
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
