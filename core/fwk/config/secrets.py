"""Keeping secrets out of what people and programs get to read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from fwk.config.options import Options, is_secret
from fwk.errors import ConfigError
from fwk_files.regular import open_regular
from fwk_process.hiding import HIDDEN

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096

_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]{1,512}@")
"""A user's name and password in a URL."""


def without_secrets(model: type[Options], values: Mapping[str, object]) -> dict[str, Any]:
    """Options as they may be shown: whether a secret is set, but not what it is; URLs without their passwords."""
    return {
        name: HIDDEN
        if value is not None and (field := model.model_fields.get(name)) is not None and is_secret(field)
        else _shown(value)
        for name, value in values.items()
    }


def _shown(value: object) -> object:
    if isinstance(value, str):
        return _CREDENTIALS.sub(f"{HIDDEN}@", value)
    if isinstance(value, list | tuple):
        return [_shown(item) for item in cast("Iterable[object]", value)]
    return value


def read_secret(path: str, option: str) -> bytes:
    """What is in the file of an option, without white space around it. Raises ``ConfigError``."""
    try:
        with open_regular(Path(path).expanduser()) as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{option}: cannot read {path}: {error.strerror or error}") from None
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{option} {path}: must hold {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, not {len(secret)} "
            "(openssl rand -hex 32 makes a good secret)"
        )
    return secret
