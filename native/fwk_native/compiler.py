"""The system's C++ compiler, as the environment names it or the search path has it."""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import subprocess

from fwk_errors import PluginError

COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 120
"""Seconds; a kernel should take a few."""


def find() -> tuple[str, ...] | None:
    """The command that compiles, with the arguments ``CXX`` may hold."""
    return _search(os.environ.get("CXX", ""), os.environ.get("PATH"), COMPILERS)


@functools.cache
def _search(named: str, path: str | None, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """Cached: dozens of declarations ask in a start."""
    command = tuple(shlex.split(named))
    if command:
        return command if shutil.which(command[0], path=path) else None
    found = (shutil.which(name, path=path) for name in known)
    return next(((name,) for name in found if name), None)


@functools.cache
def version(command: tuple[str, ...]) -> str:
    """What tells one compiler from another: the command, and what it says of itself."""
    try:
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"the C++ compiler {command[0]} does not run: {error}") from None
    return " ".join(command) + done.stdout
