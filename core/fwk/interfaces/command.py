"""Commands of ``fwk``, from any package: an entry point of the group ``fwk.commands`` that names a ``Command``."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

GROUP = "fwk.commands"
"""Entry-point group. The entry point's name is the word after ``fwk``; ``plugins.NAME`` is ``fwk plugins NAME``."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command, declared without importing what runs it.

    summary: one line for ``fwk --help``.
    load: ``"module:function"``. The function takes the words after the command's name and returns the exit code; it
        raises ``FwkError`` for what its user can mend.
    is_listed: whether ``fwk --help`` lists it.
    """

    summary: str
    load: str
    is_listed: bool = True

    def function(self) -> Callable[[Sequence[str]], int]:
        """Import the function."""
        module, _, name = self.load.partition(":")
        return getattr(importlib.import_module(module), name)
