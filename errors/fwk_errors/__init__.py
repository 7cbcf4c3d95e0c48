"""Errors that are meant for a person to read, for core and the packages alongside it: base classes, and exit codes.

Core has these as ``fwk.errors``, along with its own of requests and engines. Nothing is imported here.
"""

from __future__ import annotations


class FwkError(Exception):
    """Base of all errors that are meant for a person to read; a command that ends with one has its exit code."""

    exit_code: int = 1


class ConfigError(FwkError):
    """An option is unknown, of the wrong type, out of range, or given for a feature that is not selected."""

    exit_code = 2


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
