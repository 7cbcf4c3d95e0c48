"""The transports of K/V, each skipped with a sentence where this machine cannot run it."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import pytest

from fwk.interfaces.declaration import Host
from fwk.plugins import discover, find

LIBRARIES = {"mooncake": ("libnl-3.so.200", "libibverbs.so.1")}
"""Of the system, which a transport's package does not bring."""


@cache
def missing(name: str) -> str | None:
    """What a transport lacks here, and how to get it."""
    refusal = find(discover(), "kv_transfer", name).declaration.needs.refusal(Host())
    for library in LIBRARIES.get(name, ()):
        try:
            ctypes.CDLL(library)
        except OSError:
            refusal = refusal or f"needs {library}: apt-get install libibverbs1 libnl-3-200 libnl-route-3-200"
    return f"kv_transfer.{name} {refusal}" if refusal else None


def transports(*names: str, marks: tuple[pytest.MarkDecorator, ...] = ()) -> list[Any]:
    """Parameters for tests that run with each."""
    return [
        pytest.param(name, marks=[*marks, pytest.mark.skipif(missing(name) is not None, reason=missing(name) or "")])
        for name in names
    ]
