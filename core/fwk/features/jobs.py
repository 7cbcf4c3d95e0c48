"""The parts of features for jobs."""

from __future__ import annotations

from collections.abc import Callable

from fwk.features.declared import declared
from fwk.interfaces.feature import JobPart, JobPartContext
from fwk.plugins import PluginFactory, build


def build_job_part(factory: PluginFactory, name: str, context: Callable[..., JobPartContext]) -> JobPart:
    """That of a feature that is on. context: lacks name, options and plugins."""
    for item, spec, options in declared(factory):
        if item.name == name:
            return build(item, context(name=name, options=options, plugins=factory), spec.job)
    raise AssertionError(f"no feature {name!r} is on")
