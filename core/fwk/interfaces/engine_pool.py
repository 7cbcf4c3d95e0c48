"""The engines of a served model behind one object: one engine, several, engines that come and go, engines elsewhere.

Pools are stacked. The lowest one is core's: one engine, started again when it dies. A plugin's pool is made of those
below it, and by default leaves everything to the first of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.config import Config
from fwk.errors import EngineDead, NotServed
from fwk.interfaces.declaration import Declaration
from fwk.interfaces.lifecycle import PluginLifecycle
from fwk.types import EngineReady, EngineStats, Request, TokenEvent

if TYPE_CHECKING:
    from fastapi import FastAPI

Receiver = Callable[[list[TokenEvent] | EngineDead | NotServed], None]
"""Gets a request's events, or once what ended it."""


def _ignore(*_: Any) -> None:
    """What a pool calls until it is told what to call."""


class Engine(ABC):
    """One engine that lives, for what all engines of a model are told. A refusal is an ``InvalidRequest``.

    All raise ``EngineDead`` when it has ended, or ends meanwhile.
    """

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Its process on this machine; None where there is none."""

    @abstractmethod
    async def call_workers(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        """Run an operation on its workers; the answers by rank."""

    @abstractmethod
    async def call_feature(self, feature: str, operation: str, arguments: Sequence[Any]) -> Any:
        """Run an operation of a feature's part."""


@dataclass(frozen=True, slots=True)
class EnginePoolContext:
    """What a pool is built with, on the server's event loop's thread, before any engine is started.

    below: ``below(i)`` makes the ``i``-th of the pools that this one is made of (``EnginePoolSpec.num_pools``).
    choose: ``choose(family, name, context, **fields)`` builds a plugin of another family that the server has, for
        ``auto`` the best one; it is shown at /server_info. Raises ``PluginError``.
    model: the served model as the user named it; name: what requests call it. model_index: among those of the server, 0
        for the first. model_bytes: of its files.
    shared: one dictionary for the pools of this plugin of all models.

    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``lifecycle``: for calls of its own at setup, ready, drain and close, and for work in the background.
    """

    below: Callable[[int], EnginePool]
    choose: Callable[..., Any]
    options: Any = None
    model: str = ""
    name: str = ""
    model_index: int = 0
    model_bytes: int = 0
    shared: dict[str, Any] = field(default_factory=dict[str, Any])
    lifecycle: PluginLifecycle = field(default_factory=PluginLifecycle)


class EnginePool:
    """The engines of one served model, on the server's event loop.

    ``below``: the pools that it is made of; what is not overridden is done by the first of them. The calls below are
    set by who uses the pool.

    - ``on_stats``: called with the engines' numbers together, whenever there are new ones.
    - ``on_death``: an engine has died, and why.
    - ``on_given_up``: no engine lives, and none will be started again.
    - ``on_ready``: awaited when engines were started again for a request, before it is served.
    """

    on_stats: Callable[[EngineStats], None] = staticmethod(_ignore)
    on_death: Callable[[str], None] = staticmethod(_ignore)
    on_given_up: Callable[[], None] = staticmethod(_ignore)
    on_ready: Callable[[EngineReady], Awaitable[None]] | None = None

    def __init__(self, context: EnginePoolContext, num_pools: int = 1) -> None:
        self.context = context
        self.below = [context.below(i) for i in range(num_pools)]
        for pool in self.below:
            pool.on_stats = lambda stats: self.on_stats(stats)
            pool.on_death = lambda why: self.on_death(why)
            pool.on_given_up = lambda: self.on_given_up()

    # From start to end.

    async def start(self) -> None:
        """Start the engines; ``wait_ready`` tells when they serve."""
        await self.below[0].start()

    async def wait_ready(self) -> EngineReady:
        """What the engines have in common. Raises ``EngineDead`` when one could not start; may be called again."""
        return await self.below[0].wait_ready()

    async def stop(self) -> None:
        """End the engines until ``start_again``. What they had done stays counted."""
        await self.below[0].stop()

    async def start_again(self) -> EngineReady:
        """Start the engines that were stopped, and have them know what those before them were told.

        Raises ``EngineDead``, and ``InvalidRequest`` where one refuses it; then all are stopped.
        """
        return await self.below[0].start_again()

    async def close(self) -> None:
        """End the engines for good: open requests get ``EngineDead``."""
        await self.below[0].close()

    # What can be served.

    @property
    def max_open(self) -> int:
        """Sequences that may run or wait, over all engines."""
        return self.below[0].max_open

    @property
    def has_started(self) -> bool:
        """Whether the start of all engines has come to an end, good or bad."""
        return self.below[0].has_started

    @property
    def is_loaded(self) -> bool:
        """Whether a request is served at once; if not, it waits in ``use`` until the engines run."""
        return self.below[0].is_loaded

    def trouble(self) -> str | None:
        """Why nothing can be served now; None while something can, perhaps after a wait in ``use``."""
        return self.below[0].trouble()

    def degraded(self) -> str | None:
        """What cannot serve, while other engines can."""
        return self.below[0].degraded()

    def use(self) -> AbstractAsyncContextManager[None]:
        """The engines run while it is open; a request that was submitted meanwhile keeps them running until it ends.

        Raises ``EngineDead`` when they cannot be started, or may not.
        """
        return self.below[0].use()

    # Requests. Each is submitted inside ``use``, and forgotten however it ends.

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Send a request to an engine.

        Raises ``EngineDead``, and ``NotServed`` when all that can serve have as many open sequences as they may.
        """
        self.below[0].submit(request, receiver)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Have the request's engine stop working on it, or on one of its sequences. An unknown one is ignored."""
        self.below[0].abort(request_id, index)

    def pause(self, request_id: str, is_on: bool) -> None:
        """Have the request's engine keep it from running, or let it continue."""
        self.below[0].pause(request_id, is_on)

    def forget(self, request_id: str) -> None:
        """The request has ended; events still on their way are dropped."""
        self.below[0].forget(request_id)

    # What is told of them, and to them.

    @property
    def engines(self) -> Sequence[Engine]:
        """Those that live."""
        return self.below[0].engines

    @property
    def stats(self) -> EngineStats:
        """Their numbers together, with what ended engines had done."""
        return self.below[0].stats

    def info(self) -> list[dict[str, Any]]:
        """Of each engine, for /server_info: ``trouble``, ``num_open`` and ``stats``, and what the pool adds."""
        return self.below[0].info()

    def summary(self) -> dict[str, Any]:
        """Of all together, for the list of models that a server of several shows."""
        return self.below[0].summary()

    def admin_routes(self, app: FastAPI) -> None:
        """Add routes for the server's administrator."""


@dataclass(frozen=True, kw_only=True)
class EnginePoolSpec(Declaration):
    """Declares a pool of engines; it takes part when its options turn it on (``enabled_by``).

    Of several that take part, the one of better rank is made of the others.

    router: ``"package.module:Class"`` of an ASGI application in front of those of several models, built with a list of
        ``ModelApp``; needed where ``configs`` makes several.
    """

    family: ClassVar[str] = "engine_pools"

    router: str = ""

    def num_pools(self, options: Any) -> int:
        """How many pools it is made of; options: its own, validated."""
        return 1

    def process(self, options: Any) -> str:
        """The module that is run for each engine (``python -m``) where engines do not run on this machine.

        It is told what an engine's process is told, a line of JSON on standard input, and does what that does: it
        answers at ``address``, and ends when standard input does. Empty: engines are processes of this machine.
        """
        return ""

    def configs(
        self, given: Mapping[str, Any], build: Callable[[Mapping[str, Any]], Config], names: Mapping[str, str]
    ) -> list[Config] | None:
        """The configurations of all models that the options ``given`` to a server ask for; None: it has no say in it.

        build: makes one of options, and raises ``ConfigError``. names: of all options, by each way of writing them.
        """
        return None


class ModelApp(ABC):
    """One of several models of a server, as a router sees it.

    - ``app``: its ASGI application.
    """

    app: Any

    @abstractmethod
    def is_called(self, name: str) -> bool:
        """Whether a request's ``model`` is this one."""
