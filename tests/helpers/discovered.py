"""Engines within this process look for plugins once for each path of modules: a third of what a start costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

from fwk.engine import llm
from fwk.plugins import PluginSet, discovery


def discover_once() -> None:
    """Have ``fwk.LLM`` begin with a copy of what was found before, as long as nothing else can be found."""
    llm.discover = _discover  # type: ignore[assignment]


def _discover(allow_override: Iterable[str] = ()) -> PluginSet:
    found = _found(tuple(allow_override), tuple(sys.path), discovery.entry_points)
    families = {family: dict(items) for family, items in found.by_family.items()}
    return replace(found, by_family=families, broken=[*found.broken], overridden=[*found.overridden])


@cache
def _found(allow_override: tuple[str, ...], path: tuple[str, ...], entry_points: Callable[..., object]) -> PluginSet:
    return discovery.discover(allow_override)
