"""The parts of features in an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from fwk.errors import FwkError, InvalidRequest, PluginFault, RequestFailed, one_line_traceback
from fwk.features.declared import declared, moved_by
from fwk.features.guarded import guarded
from fwk.features.wire import Reader, packed
from fwk.interfaces.feature import Blocks, EnginePart, EnginePartContext, FeatureSequence, Plugins
from fwk.interfaces.prefix_cache import BlockTransfer
from fwk.interfaces.schedule import SchedulePolicy
from fwk.plugins import PluginFactory, load_object
from fwk.types import Features, Request

log = logging.getLogger(__name__)

Parts = tuple[EnginePart, ...]


class EngineFeatures:
    """All that take part, by name. A sequence carries those that it concerns."""

    def __init__(
        self, parts: Sequence[EnginePart] = (), troubles: Sequence[str] = (), labels: Mapping[str, str] | None = None
    ) -> None:
        """troubles: what is not as was asked, for ``EngineStats.troubles``. labels: what messages call each feature."""
        self.troubles = tuple(troubles)
        self.failed: dict[str, str] = {}
        """Features that failed since it started, and why: their sequences are to end."""
        self._parts = {part.name: part for part in parts}
        parts = [guarded(part, (labels or {}).get(part.name, f"feature {part.name!r}"), self._fail) for part in parts]
        self._results = Reader({part.name: part.context.wire.result for part in parts})
        self.all = tuple(parts)
        self._busy = _overriding(parts, "is_busy")
        self._counting = _overriding(parts, "stats")
        self.troubled = _overriding(parts, "trouble")
        self._planning, self._timing = _overriding(parts, "planning"), _overriding(parts, "takes_longer")
        self.polled, self.waiting = _overriding(parts, "poll"), _overriding(parts, "wait")
        """Those that have something to do when the waiting are looked at, and when nothing can run."""

    def of(self, request: Request) -> Parts:
        """Those that have a part in a request. Raises ``InvalidRequest`` in the name of one that refuses it."""
        found = tuple(part for part in self.all if part.concerns(request))
        for name in request.features if self.failed else ():
            if name in self.failed:
                raise RequestFailed(self.failed[name])
        if not self.all:
            if request.features:
                raise InvalidRequest(f"this engine has no feature {next(iter(request.features))!r}")
            return ()
        for i, part in enumerate(found):
            try:
                part.check(request)
            except InvalidRequest:
                for other in found[:i]:
                    other.left(request)
                raise
        return found

    def _fail(self, part: EnginePart, why: str) -> None:
        self.failed[part.name] = why
        self.trouble(f"{why}; requests for it are refused")

    def trouble(self, why: str) -> None:
        """Add to ``troubles``."""
        self.troubles = (*self.troubles, why)

    def why_failed(self, parts: Parts) -> str | None:
        """Why one of these has failed; None: none has."""
        return next((self.failed[part.name] for part in parts if part.name in self.failed), None)

    def took(self, sequence: FeatureSequence, parts: Parts, features: Features) -> None:
        """A step's result of a sequence has come, and its tokens are in the text."""
        for part in parts:
            result = self._results.read(features, part.name)
            if result is not None:
                part.took(sequence, result)

    def planning(self) -> None:
        """A step is about to be planned."""
        for part in self._planning:
            part.planning()

    def takes_longer(self) -> bool:
        """Whether the step that was planned takes longer than its tokens tell."""
        return any(part.takes_longer() for part in self._timing)

    def stats(self) -> dict[str, dict[str, float]]:
        """The numbers of all that have some."""
        return {
            part.name: msgspec.structs.asdict(told) for part in self._counting if (told := part.stats()) is not None
        }

    def prove(self, running: Collection[FeatureSequence], waiting: Collection[FeatureSequence]) -> None:
        """``EnginePart.prove`` of all."""
        for part in self.all:
            part.prove(running, waiting)

    @property
    def is_busy(self) -> bool:
        """Whether one is."""
        return any(part.is_busy for part in self._busy)

    def call(self, name: str, operation: str, arguments: Sequence[Any]) -> Any:
        """Run an operation; of the worker parts where the engine part has none of that name.

        Raises ``InvalidRequest``, and what the workers refuse it with.
        """
        part = self._parts.get(name)
        if part is None:
            raise InvalidRequest(f"this engine has no feature {name!r}")
        own = part.operations().get(operation)
        if own is None:
            return part.context.call(operation, *arguments)
        try:
            return own(*arguments)
        except FwkError:
            raise
        except (Exception, SystemExit) as error:
            who = getattr(part.operations, "who", f"feature {name!r}")
            told = f"{who} raised {type(error).__name__} in {operation}"
            log.error("%s: %s", told, one_line_traceback(error))
            raise PluginFault(told) from error

    def close(self) -> None:
        """The engine stops."""
        for part in self.all:
            part.close()


def _overriding(parts: Sequence[EnginePart], name: str) -> Parts:
    return tuple(part for part in parts if getattr(type(part), name) is not getattr(EnginePart, name))


def new(sequence: FeatureSequence, parts: Parts) -> Features:
    """What the workers are told as a sequence takes a slot."""
    return {part.name: packed(told) for part in parts if (told := part.new(sequence)) is not None}


def step(sequence: FeatureSequence, parts: Parts, start: int, count: int) -> Features:
    """What they are told with a step of it."""
    told = ((part, part.step(sequence, start, count)) for part in parts if part.wants_steps)
    return {part.name: packed(struct) for part, struct in told if struct is not None}


def event(sequence: FeatureSequence, parts: Parts) -> Features:
    """What the server is told with tokens of it."""
    return {part.name: packed(told) for part in parts if (told := part.event(sequence)) is not None}


def cached(sequence: FeatureSequence, parts: Parts, count: int) -> int:
    """How many of the tokens that it starts with the client is told were cached."""
    for part in parts:
        count = min(count, part.cached(sequence, count))
    return count


def build_engine_features(
    factory: PluginFactory,
    call: Callable[..., list[Any]],
    *,
    block_size: int,
    max_running: int,
    is_host: bool,
    blocks: Blocks | None = None,
    num_running: Callable[[], int] = lambda: 0,
    use_policy: Callable[[SchedulePolicy, str], None] | None = None,
) -> EngineFeatures:
    """The parts of all features that are on. call: of all workers (``Executor.call``)."""
    parts: list[EnginePart] = []
    labels: dict[str, str] = {}
    left_out: list[str] = []
    for item, spec, options in declared(factory):
        context = EnginePartContext(
            name=item.name,
            call=partial(_call_own, call, item.key),
            wire=spec.wire,
            options=options,
            block_size=block_size,
            max_running=max_running,
            is_host=is_host,
            blocks=blocks,
            num_running=num_running,
            moved_by=moved_by(factory),
            plugins=cast("Plugins", factory),
            use_policy=use_policy,
        )
        part = factory.build_or_leave_out(item, context, spec.engine) if spec.engine else EnginePart(context)
        if part is None:
            left_out.append(item.name)
        else:
            parts.append(part)
            labels[item.name] = f"feature {item.label}"
    found = EngineFeatures(parts, factory.plugins.left_out, labels)
    found.failed |= {name: f"feature {name!r} failed to start" for name in left_out}
    return found


def block_transfer(factory: PluginFactory, call: Callable[..., list[Any]]) -> BlockTransfer | None:
    """The way from a prefix cache to what features keep its blocks in; None where none does. call: as above."""
    found = next(((item, spec.transfer) for item, spec, _ in declared(factory) if spec.transfer), None)
    return None if found is None else load_object(*found)(partial(_call_own, call, found[0].key))


def _call_own(call: Callable[..., list[Any]], key: str, operation: str, *args: Any) -> list[Any]:
    return call(f"{key}.{operation}", *args)
