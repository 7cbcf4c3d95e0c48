"""The parts of features in a server, and what they do for one request."""

from __future__ import annotations

import asyncio
import types
from collections.abc import (
    AsyncGenerator,
    Callable,
    Container,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fwk.errors import InvalidRequest, NotServed, PluginFault
from fwk.features.declared import declared
from fwk.features.wire import Reader, packed
from fwk.interfaces.dialect import FEATURE_FIELDS, EmbedInput, GenerateInput, OutputDelta
from fwk.interfaces.feature import Exclusive, FeatureSpec, Jobs, RequestPart, ServerPart, ServerPartContext
from fwk.interfaces.grammar import GrammarChecker
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.plugins import PluginFactory, PluginSet, Registered
from fwk.plugins.options import flag
from fwk.types import Features
from fwk.types.sampling import FEATURE_FIELDS as SAMPLING_FIELDS
from fwk.types.sampling import SamplingParams

T = TypeVar("T")

NO_PART = "it has no part in this process"


@dataclass(frozen=True, slots=True)
class _Built:
    """One feature's part."""

    item: Registered
    part: ServerPart
    params: type[Any] | None


_UNSET = SamplingParams()


class ServerFeatures:
    """All that take part in serving a model."""

    def __init__(
        self,
        built: Sequence[_Built] = (),
        events: Reader | None = None,
        plugins: PluginSet | None = None,
        on: Iterable[str] = (),
    ) -> None:
        """plugins: all that are installed, for what is said of those that are off. on: names of those that are not."""
        self._built = built
        self._plugins = plugins
        self._on = set(on)
        self._refused = {} if plugins is None else _refused(plugins, self._on)
        self._checking = [one.part for one in built if type(one.part).check is not ServerPart.check]
        self._answering = [one.part for one in built if type(one.part).answer is not ServerPart.answer]
        self.events = events or Reader({})
        self.grammars = GrammarChecker()
        read = [one.params for one in built if one.params is not None]
        off = [] if plugins is None else _off(plugins, self._on)
        self.params = [*read, *(params for params, _ in off)]
        """Models of the request fields that they read, or would if they were on."""
        own = {name for params in read for name in params.model_fields}
        self._off = {name: why for params, why in off for name in params.model_fields if name not in own}

    def __iter__(self) -> Iterator[tuple[Registered, ServerPart]]:
        return iter([(one.item, one.part) for one in self._built])

    def service(self, kind: type[T]) -> T | None:
        """The first part that is a ``kind``."""
        return next((one.part for one in self._built if isinstance(one.part, kind)), None)

    def check(self, item: GenerateInput | EmbedInput) -> None:
        """Raise ``InvalidRequest`` for an input that asks for what is off, or that a part knows to be wrong."""
        for field, (feature, idle) in FEATURE_FIELDS.items():
            if getattr(item, field, idle) != idle:
                self.require(feature, field)
        if isinstance(item, GenerateInput):
            for feature in item.extras:
                self.require(feature, feature)
            for name, why in self._refused.items():
                if getattr(item.sampling, name) != getattr(_UNSET, name):
                    raise InvalidRequest(f"{name} {why}", name)
            for name, value in item.sampling.extra.items():
                if value is not None and name in self._off:
                    raise InvalidRequest(f"{name} {self._off[name]}", name)
        for part in self._checking:
            part.check(item)

    def use_grammars(self, backend: str) -> frozenset[str]:
        """Check grammars with the backend that the engines have settled on; the kinds that can be asked for."""
        found = None if backend == "none" else self.service(GrammarChecker)
        self.grammars = found or GrammarChecker()
        return self.grammars.use_backend(backend)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
        """Messages as chat templates read them, and the fields that parts have taken out of them."""
        fields: dict[str, Any] = {}
        for one in self._built:
            messages, own = one.part.conversation(messages)
            fields |= own
        return messages, fields

    def complete(self, item: GenerateInput) -> GenerateInput:
        """An input of ``fwk.LLM``, before its length is checked."""
        for one in self._built:
            item = one.part.complete(item)
        return item

    def require(self, feature: str, what: str) -> None:
        """Raise ``InvalidRequest`` with what to do about it unless a feature is on. what: needs it."""
        if feature in self._on:
            return
        item = None if self._plugins is None else self._plugins.by_family.get("features", {}).get(feature)
        how = "none of that name is installed: install a package that has it"
        if item is not None:
            flags = " or ".join(map(flag, item.declaration.enabled_by))
            how = f"start with {flags}" if flags else NO_PART
        raise InvalidRequest(f"{what} needs the feature {feature!r}: {how}", what)

    def open(self, item: GenerateInput | EmbedInput, caller: str = "", *, waits: bool = True) -> RequestFeatures | None:
        """What they do for a request; None where none has to do with it. waits: whether they may, in an event loop."""
        found = [(one, own) for one in self._built if (own := one.part.open(item, caller)) is not None]
        if not found:
            return None
        parts = [(one.item.name, one.part.max_seconds, own) for one, own in found]
        return RequestFeatures(parts, self.events, waits=waits)

    def answer(self, item: GenerateInput | EmbedInput) -> AsyncGenerator[list[OutputDelta], None] | None:
        """The reply to an input that a part makes in a way of its own; None: none does."""
        return next(filter(None, (part.answer(item) for part in self._answering)), None)

    def operation(self, feature: str, name: str) -> Callable[..., Any] | None:
        """What a server part does by a name; None where it has none."""
        found = next((one.part for one in self._built if one.item.name == feature), None)
        return None if found is None else found.operations().get(name)

    async def ready(self) -> None:
        """The engines serve for the first time. Raises ``ConfigError`` for one that cannot."""
        for one in self._built:
            await one.part.engines_ready()

    def first_pause(self) -> None:
        """No request is under way since the engines serve."""
        for one in self._built:
            with suppress(PluginFault):
                one.part.first_pause()

    def trouble(self) -> str | None:
        """What of them cannot be used."""
        return "; ".join(filter(None, (_trouble(one.part) for one in self._built))) or None

    def close(self) -> None:
        """The server stops."""
        for one in self._built:
            with suppress(PluginFault):
                one.part.close()


class RequestFeatures:
    """What features do for one request, in the order of their ranks."""

    def __init__(self, parts: Sequence[tuple[str, float, RequestPart]], events: Reader, *, waits: bool) -> None:
        self._parts = parts
        self._waits = waits
        self.num_open = 1
        """Uses of it, which ``leave`` counts down."""
        self._events = events
        self._checking = [(n, s, p) for n, s, p in parts if type(p).check is not RequestPart.check]
        self._listeners = [(n, s, p) for n, s, p in parts if type(p).output is not RequestPart.output]
        self.features: Features = {}
        """What goes to the engine."""
        self.namespace = ""

    async def enter(self, item: Any) -> Any:
        """Have them check and complete an input; what became of it. Raises ``InvalidRequest`` and ``NotServed``."""
        for name, seconds, part in self._checking:
            item = await self._within(seconds, name, part.check(item))
        others: tuple[str, ...] = ()
        for name, seconds, part in self._parts:
            part.others = others
            told = await self._within(seconds, name, part.enter(item))
            if told is not None:
                self.features[name] = packed(told)
            if told is not None or part.namespace:
                others = (*others, name)
        spaces = [f"{name}:{part.namespace}\0" for name, _, part in self._parts if part.namespace]
        self.namespace = "".join(spaces)
        return item

    @property
    def changes_output(self) -> bool:
        """Whether one of them looks at the reply."""
        return bool(self._listeners)

    async def output(self, delta: OutputDelta) -> OutputDelta:
        """A piece of the reply, past all of them."""
        for name, seconds, part in self._listeners:
            told = self._events.read(delta.features, name) if delta.features else None
            delta = await self._within(seconds, name, part.output(delta, told))
        return delta

    def leave(self) -> None:
        """A use of it has ended; with the last one, the request has."""
        self.num_open -= 1
        if self.num_open:
            return
        for _, _, part in self._parts:
            with suppress(PluginFault):
                part.ended()

    async def _within(self, seconds: float, name: str, call: Coroutine[Any, Any, T]) -> T:
        try:
            waits_for = call.send(None)
        except StopIteration as done:  # most wait for nothing, and a timeout costs more than they do
            return done.value
        if not self._waits:
            return await _rest(call, waits_for)
        try:
            async with asyncio.timeout(seconds):
                return await _rest(call, waits_for)
        except TimeoutError:
            raise NotServed(f"the feature {name!r} took more than {seconds:g} seconds; try again", 503) from None


@types.coroutine
def _rest(call: Coroutine[Any, Any, T], waits_for: Any) -> Generator[Any, Any, T]:
    """What a call answers that has begun, and waits."""
    try:
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:
                waits_for = call.throw(error)
            else:
                waits_for = call.send(sent)
    except StopIteration as done:
        return done.value


def _trouble(part: ServerPart) -> str | None:
    try:
        return part.trouble()
    except PluginFault as error:
        return str(error)


def build_server_features(
    factory: PluginFactory,
    context: Callable[..., ServerPartContext],
    ask: Callable[..., Any],
    lifecycle: Callable[[str], PluginLifecycle] = PluginLifecycle,
    jobs: Callable[[str], Jobs] = lambda name: Jobs(),
    exclusive: Callable[[str], AbstractAsyncContextManager[Exclusive]] | None = None,
) -> ServerFeatures:
    """The parts of all features that are on.

    context: lacks name, ask, options, lifecycle, plugins, jobs and exclusive. ask: takes the feature's name first.
    lifecycle: for a plugin. jobs, exclusive: for a feature.
    """
    built: list[_Built] = []
    events: dict[str, Any] = {}
    for item, spec, options in declared(factory):
        events[item.name] = spec.wire.event
        if spec.server:
            life = lifecycle(item.source)
            own = context(
                name=item.name,
                ask=partial(ask, item.name),
                options=options,
                lifecycle=life,
                plugins=factory,
                jobs=jobs(item.name),
                exclusive=None if exclusive is None else partial(exclusive, item.name),
            )
            part = factory.build_or_leave_out(item, own, spec.server)
            if part is None:
                del events[item.name]
                continue
            built.append(_Built(item, part, spec.params))
    return ServerFeatures(built, Reader(events), factory.plugins, events)


def _refused(plugins: PluginSet, on: Container[str]) -> dict[str, str]:
    """Why requests may not set a field of ``SamplingParams``, for those that are of no feature that is ``on``."""
    specs = [item.declaration for item in plugins.family("features")]
    owners = {name: spec for spec in specs if isinstance(spec, FeatureSpec) for name in spec.fields}
    found: dict[str, str] = {}
    for name in SAMPLING_FIELDS:
        owner = owners.get(name)
        if owner is None:
            found[name] = "needs a feature that is not installed (fwk plugins list): install the plugin that has it"
        elif owner.name not in on:
            found[name] = _remedy(owner)
    return found


def _off(plugins: PluginSet, on: Container[str]) -> list[tuple[type[Any], str]]:
    """Models of the request fields of features that are not ``on``, and what they need."""
    specs = [item.declaration for item in plugins.family("features")]
    off = [spec for spec in specs if isinstance(spec, FeatureSpec) and spec.name not in on]
    return [(spec.params, _remedy(spec)) for spec in off if spec.params is not None]


def _remedy(spec: FeatureSpec) -> str:
    flags = " or ".join(map(flag, spec.enabled_by))
    return f"needs an engine started with {flags}" if flags else f"needs the feature {spec.name!r}: {NO_PART}"
