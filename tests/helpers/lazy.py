"""Libraries that only some tests need, imported when a test first uses one.

transformers, peft, openai, anthropic and mcp take nine seconds of CPU to import: at the head of a test file every
process of every run would pay that before its first test.
"""

from __future__ import annotations

import importlib
from typing import Any


class LazyModule:
    """Stands for a module, which is imported at the first look at one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for marks and fixtures at everything it finds in a test file
            raise AttributeError(attribute)
        found = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, found)
        return found


def lazy(name: str) -> Any:
    """The module ``name``, for ``name.attribute`` within functions: ``openai = lazy("openai")``."""
    return LazyModule(name)
