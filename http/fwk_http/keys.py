"""The keys a server asks for, from its options and from ``--api-key-file``."""

from __future__ import annotations

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fwk_errors import ConfigError
from fwk_files.regular import read_text

KEY_PATTERN = r"^[\x21-\x7e]*$"
"""What a header can carry."""

MAX_KEYS = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")
_KEY = re.compile(KEY_PATTERN)


class KeyOptions(Protocol):
    """``--api-key``, ``--admin-api-key`` and ``--api-key-file``."""

    @property
    def api_key(self) -> str | None: ...
    @property
    def admin_api_key(self) -> str | None: ...
    @property
    def api_key_file(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys a server asks for; without an administrator's key there are no routes for administrators.

    user: what opens the routes for users. named: more such keys, by the names of their holders.
    """

    user: str | None = None
    admin: str | None = None
    named: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def for_users(self) -> list[str]:
        """All keys that open the routes for users; without one these are open to everybody."""
        return [*([self.user] if self.user else []), *self.named.values()]

    @property
    def secrets(self) -> list[str]:
        """What no log may hold."""
        return [*self.for_users, *([self.admin] if self.admin else [])]


def read_keys(options: KeyOptions) -> Keys:
    """The keys of a server. Raises ``ConfigError`` for a file that cannot be read, or that holds no keys."""
    named = _read_file(options.api_key_file) if options.api_key_file is not None else {}
    admin = (options.admin_api_key or "").encode()
    if admin and any(hmac.compare_digest(admin, key.encode()) for key in named.values()):
        raise ConfigError("--api-key-file holds the --admin-api-key: its holder would be an administrator")
    return Keys(options.api_key, options.admin_api_key, named)


def _read_file(path: str) -> dict[str, str]:
    try:
        lines = read_text(Path(path).expanduser()).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file: cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    named: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        _check_line(f"--api-key-file: {path}, line {number}", words, named)
        named[words[0]] = words[1]
    if not 0 < len(named) <= MAX_KEYS:
        raise ConfigError(f"--api-key-file: {path} must hold 1 to {MAX_KEYS} lines 'NAME KEY', not {len(named)}")
    return named


def _check_line(place: str, words: list[str], named: Mapping[str, str]) -> None:
    """What is wrong is told without the line itself: it holds a key."""
    if len(words) != 2:
        raise ConfigError(f"{place}: must be 'NAME KEY', two words")
    name, key = words
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{place}: a name has 1 to 64 letters, digits and _.@-, and begins with a letter or digit")
    if not _KEY.fullmatch(key) or len(key) > 1024:
        raise ConfigError(f"{place}: a key has at most 1024 printable ASCII characters")
    if name in named or key in named.values():
        raise ConfigError(f"{place}: the {'name' if name in named else 'key'} is in the file already")
