"""What the code of other packages' plugins does in this process that they did not declare (``Declaration.touches``).

A report, not a wall: native code, and code that another module runs for a plugin, are not seen.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import Mapping
from types import FrameType

from fwk.plugins.discovery import OWN, PluginSet

log = logging.getLogger(__name__)

_EVENTS: Mapping[str, str] = {
    **dict.fromkeys(("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system"), "processes"),
    "subprocess.Popen": "processes",
    **dict.fromkeys(("os.chmod", "os.chown", "os.link", "os.mkdir", "os.remove", "os.removexattr"), "files"),
    **dict.fromkeys(("os.rename", "os.rmdir", "os.setxattr", "os.symlink", "os.truncate", "os.utime"), "files"),
    "shutil.rmtree": "files",
    **dict.fromkeys(("socket.bind", "socket.connect", "socket.getaddrinfo", "socket.gethostbyaddr"), "network"),
    **dict.fromkeys(("socket.gethostbyname", "socket.sendmsg", "socket.sendto"), "network"),
}
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MAX_FRAMES = 64


class Audit:
    """Watches a process of fwk's own, if a plugin of another package is installed; for good, as audit hooks are."""

    def __init__(self, plugins: PluginSet, *, is_strict: bool) -> None:
        """is_strict: what was not declared is refused (``PermissionError``)."""
        self._is_strict = is_strict
        self._owners: dict[str, str] = {}
        self._declared: dict[str, set[str]] = {}
        for item in plugins.all():
            if item.package != OWN:
                source = f"{item.package} {item.version}"
                self._owners[item.declaration.load.partition(".")[0].partition(":")[0]] = source
                self._declared.setdefault(source, set()).update(item.declaration.touches)
        self._found = plugins.undeclared
        if self._owners:
            sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[object, ...]) -> None:
        word = _EVENTS.get(event)
        if word is None:
            if event != "open" or not _writes(args):
                return
            word = "files"
        owner = self._owner(inspect.currentframe())
        if owner is None or word in self._declared[owner]:
            return
        sentence = f"package {owner} touches {word!r}, which no plugin of it declares ({event})"
        if (owner, word) not in self._found:
            self._found[owner, word] = sentence
            log.warning("%s%s", sentence, ": refused, for --strict is given" if self._is_strict else "")
        if self._is_strict:
            raise PermissionError(f"{sentence}: say touches=frozenset({{{word!r}}}) in its declaration")

    def _owner(self, frame: FrameType | None) -> str | None:
        """The package whose code runs; None where the interpreter imports a module, or none of theirs is near."""
        for _ in range(_MAX_FRAMES):
            frame = None if frame is None else frame.f_back
            if frame is None:
                return None
            name = str(frame.f_globals.get("__name__", ""))
            if name.startswith(("importlib._bootstrap", "_frozen_importlib", "fwk.")):
                return None
            owner = self._owners.get(name.partition(".")[0])
            if owner is not None:
                return owner
        return None


def _writes(args: tuple[object, ...]) -> bool:
    mode, flags = args[1:3] if len(args) > 2 else ("", 0)
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & _WRITING)
