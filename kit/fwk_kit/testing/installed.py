"""The installed plugins, as suites see them."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points

from fwk.plugins import PluginSet, discover
from fwk.plugins.discovery import GROUP


@functools.cache
def installed() -> PluginSet:
    """The installed plugins, discovered once for the test run."""
    return discover()


@functools.cache
def alongside(package: str) -> PluginSet:
    """The plugins of fwk and of one other package: what else is installed changes no verdict."""
    points = entry_points(group=GROUP)
    return discover(points=[point for point in points if point.dist and point.dist.name in ("fwk", package)])
