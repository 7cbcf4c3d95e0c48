"""Plugins that are known without being installed: whose flag it is that nobody here has, and how to get it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from fwk_errors import ConfigError
from fwk_files.regular import read_text


@dataclass(frozen=True, slots=True)
class Known:
    """A package, and patterns of the flags it brings (``--lmcache-*``)."""

    package: str
    flags: tuple[str, ...]
    install: str

    def owns(self, flag: str) -> bool:
        return any(fnmatchcase(flag, pattern) for pattern in self.flags)


def read_catalogue(path: str) -> list[Known]:
    """The packages of a TOML file: tables ``[[plugin]]`` with ``package``, ``flags`` and perhaps ``install``.

    Raises ``ConfigError`` when the file cannot be read, or holds something else.
    """
    try:
        data: dict[str, Any] = tomllib.loads(read_text(Path(path).expanduser()))
        return [
            Known(
                str(row["package"]),
                tuple(map(str, row["flags"])),
                str(row.get("install", f"pip install {row['package']}")),
            )
            for row in data.get("plugin", [])
        ]
    except OSError as error:
        raise ConfigError(f"--plugin-catalogue: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"--plugin-catalogue: {path} must be TOML with tables [[plugin]] of package and flags: {error!r}"
        ) from None
