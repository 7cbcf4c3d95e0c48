"""Parts of features where there is no server: their methods, fields and jobs, and what only a server can have."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

from fwk.config import Config
from fwk.errors import ConfigError, InvalidRequest
from fwk.features.declared import declared
from fwk.interfaces.dialect import FEATURE_FIELDS
from fwk.interfaces.feature import FeatureSpec, JobPart, Jobs
from fwk.plugins import PluginFactory, PluginSet
from fwk.plugins.options import flag
from fwk.plugins.pools import turned_on_by

T = TypeVar("T")


class OwnJobs(Jobs):
    """Runs them in this process."""

    def __init__(self, make: Callable[[], JobPart]) -> None:
        self._make = make
        self._part: JobPart | None = None

    def run(self, body: bytes, what: str, *, cpu_seconds: float, max_bytes: int, is_bounded: bool = True) -> bytes:
        self._part = self._part or self._make()
        self._part.prepare(body)
        return self._part.run(body)


def refuse_without_server(config: Config, plugins: PluginSet) -> None:
    """Raise ``ConfigError`` for one that ``fwk.LLM`` cannot have."""
    for given in turned_on_by(plugins, config):
        raise ConfigError(f"{given} is for fwk serve: fwk.LLM has no server, so leave it out")
    for item, spec, _ in declared(PluginFactory(plugins, config.plugin_options)):
        if spec.needs_server:
            given = config.plugin_options.get(item.key, {})
            shown = [f"{flag(name)} {given[name]}" for name in spec.enabled_by if name in given]
            raise ConfigError(
                f"{' and '.join(shown) or item.key} is for fwk serve: fwk.LLM has no server, so leave it out"
            )


def at_once(call: Coroutine[Any, Any, T]) -> T:
    """What a call answers that waits for nothing, as in ``fwk.LLM``: there is no loop. Raises ``InvalidRequest``."""
    try:
        call.send(None)
    except StopIteration as done:
        return done.value
    except RuntimeError as error:
        if "no running event loop" not in str(error):
            raise
    call.close()
    raise InvalidRequest("a feature waits for something before it lets this request in: that is for fwk serve")


def run(call: Awaitable[T]) -> T:
    """Wait for a call outside of any event loop, or while one runs in this thread, as in a notebook."""

    async def wait() -> T:
        return await call

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def method_owner(plugins: PluginSet, method: str) -> str | None:
    """The feature, on or off, that has the method among its ``FeatureSpec.methods``; None: none has."""
    specs = [item.declaration for item in plugins.family("features")]
    return next((spec.name for spec in specs if isinstance(spec, FeatureSpec) and method in spec.methods), None)


def is_exclusive(plugins: PluginSet, feature: str, operation: str) -> bool:
    """Whether an operation of a feature's server part has the engines to itself."""
    item = plugins.by_family.get("features", {}).get(feature)
    return item is not None and operation in cast("FeatureSpec", item.declaration).exclusive


def check_fields(given: Mapping[str, Any], method: str) -> None:
    """Raise ``TypeError``, as a call of a function does, for keyword arguments that are no ``FEATURE_FIELDS``."""
    for name in given:
        if name not in FEATURE_FIELDS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")


def own_fields(given: dict[str, Any]) -> dict[str, Any]:
    """Take the ``FEATURE_FIELDS`` out of keyword arguments."""
    return {name: given.pop(name) for name in FEATURE_FIELDS if name in given}
