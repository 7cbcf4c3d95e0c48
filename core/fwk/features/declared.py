"""The features of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fwk.interfaces.feature import FeatureSpec
from fwk.plugins import PluginFactory, Registered, taking_part


def declared(factory: PluginFactory) -> Iterator[tuple[Registered, FeatureSpec, Any]]:
    """Each feature that is on, best rank first, with its validated options; judged when the run was settled."""
    for item, options in taking_part(factory.plugins, "features", factory.given, host=None):
        spec, run = item.declaration, factory.resolution
        assert isinstance(spec, FeatureSpec)
        if run is None or spec.enabled_by or run.refusal(item, options) is None:
            yield item, spec, options
