"""Errors that are meant for a person to read, for core and the packages alongside it: base classes, exit codes,
and how one is written to a log.

Core has these as ``fwk.errors``, along with its own of requests and engines. Nothing of either is imported here.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class FwkError(Exception):
    """Base of all errors that are meant for a person to read; a command that ends with one has its exit code."""

    exit_code: int = 1


class ConfigError(FwkError):
    """An option is unknown, of the wrong type, out of range, or given for a feature that is not selected."""

    exit_code = 2


class PortTaken(ConfigError):
    """The address to listen on is not to be had."""

    exit_code = 3


class PluginError(FwkError):
    """A plugin could not be loaded, declared or chosen."""

    exit_code = 5


class ModelLoadError(FwkError):
    """The model's files are missing, damaged, or of a kind nobody here can read.

    One printable line of at most 2,000 characters: what files hold, or libraries quote of them, may stand in it.
    """

    exit_code = 4

    def __init__(self, message: str) -> None:
        short = message if len(message) <= 2000 else f"{message[:1500]} ... {message[-490:]}"
        super().__init__("".join(letter if letter.isprintable() else " " for letter in short))


class InvalidRequest(FwkError):
    """A request is wrong; ``param`` names the field as the client wrote it.

    Raised at the door only: nothing has been queued, no block is held.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class NotServed(FwkError):
    """A request is not served: there are too many (429), it took too long (503, 504), its body is too large (413).

    ``retry_after``: seconds after which trying again makes sense; None when it makes none.
    """

    def __init__(self, message: str, status: int, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


def one_line_traceback(error: BaseException) -> str:
    """An exception as one line of a log: its kind, what it says, and the calls that led to it, the outermost first."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = " > ".join(f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} {frame.name}" for frame in frames)
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words} (in {calls})" if words else f"{type(error).__name__} (in {calls})"


def what_is_wrong(details: Mapping[str, Any], given: str = "") -> str:
    """One of pydantic's errors as a sentence: what a validator of ours says as it is, others with what was given."""
    if details["type"] == "value_error":
        return str(details["ctx"]["error"])
    words = re.findall(r"'([^']*)'", str(details["msg"])) if details["type"] == "literal_error" else []
    close = difflib.get_close_matches(str(details["input"]).lower(), words, 1)
    said = f"{details['msg']}, not {given}" if given else str(details["msg"])
    return f"{said} (did you mean {close[0]!r}?)" if close else said
