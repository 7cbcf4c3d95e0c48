"""All engines of a server as one: a request goes to the replica the load balancer chooses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import msgspec

from fwk.config import Config
from fwk.errors import EngineDead, InvalidRequest, NotServed
from fwk.interfaces.balance import LoadBalancer, Replica
from fwk.server.admission import RETRY_SECONDS, Deadlines, Receiver
from fwk.server.engine_client import EngineClient
from fwk.server.engine_process import EngineProcess
from fwk.server.engine_sleep import RELEASED, EngineSleep
from fwk.server.slow_start import SlowStart
from fwk.types import EngineReady, EngineStats, Request, TokenEvent

log = logging.getLogger(__name__)

FIRST_DELAY = 0.5
"""Seconds until an engine is started again; twice as many with each death."""

MAX_DEATHS = 5
DEATHS_SECONDS = 60


@dataclass(slots=True)
class _Placed:
    """Where a request is, and whether it may go to another engine when that one dies."""

    request: Request
    receiver: Receiver
    deadlines: Deadlines
    replica: int
    can_move: bool = True

    def receive(self, news: list[TokenEvent] | EngineDead | NotServed) -> None:
        """Pass on what the engine sends; whoever has got something cannot begin anew."""
        self.can_move = False
        self.receiver(news)


FeatureCall = Callable[[str, str, Sequence[Any]], Awaitable[Any]]
"""Runs an operation of a feature's part in one engine: the feature, the operation and its arguments."""

EngineSwitching = tuple[str, str, Mapping[str, object], bool]
"""Family and name of a plugin, its options, and whether it is used from now on or no more."""


@dataclass(frozen=True, slots=True)
class NewWeights:
    """A checkpoint that is served in place of that of the start. fingerprint: of its files, when they were read."""

    model: str
    load_format: str
    fingerprint: str


class Replicas:
    """One or more engine processes. They share nothing; a replica that dies takes only its own requests with it."""

    def __init__(
        self, config: Config, fingerprint: str, balancer: LoadBalancer, started: Sequence[EngineProcess] = ()
    ) -> None:
        """started: a process for each engine; none to have them started by ``start``."""
        self._balancer = balancer
        self._config = config
        self._fingerprint = fingerprint
        processes = started or [None] * config.engine.data_parallel_size
        self._clients = [EngineClient(config, fingerprint, index, process) for index, process in enumerate(processes)]
        self._views = [Replica(index) for index in range(len(self._clients))]
        self._options = config.server
        self._slow_start = SlowStart(len(self._clients), config.server.replica_slow_start)
        self._max_open = config.engine.max_running_requests + config.server.max_queued_requests
        self._placed: dict[str, _Placed] = {}
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_engine_death: Callable[[str], None] | None = None
        self._past = [EngineStats() for _ in self._clients]  # what engines had done that have died since
        self._deaths: list[list[float]] = [[] for _ in self._clients]
        self._switched: dict[tuple[str, str], EngineSwitching] = {}
        self._weights: NewWeights | None = None  # in place of those of the start
        self._first_weights: str | None = None  # the identity of those of the start, once an engine has told it
        self._updating = asyncio.Lock()
        self.on_begin: Callable[[FeatureCall], Awaitable[None]] | None = None
        """Awaited for each engine that has started in another's place, before it serves."""
        self._reviving: dict[int, asyncio.Task[None]] = {}
        self._is_closing = False
        self.given_up = asyncio.Event()
        self.sleep = EngineSleep(self._stop_engines, self._start_engines, lambda: bool(self._placed))

        for index, client in enumerate(self._clients):
            self._install(index, client)

    def _install(self, index: int, client: EngineClient) -> None:
        """From now on this is the replica's engine."""
        self._clients[index] = client
        client.on_stats = partial(self._note, index)
        client.on_death = partial(self._revive, index)

    @property
    def max_open(self) -> int:
        """Sequences that may run or wait, over all engines."""
        return self._max_open * len(self._clients)

    async def start(self) -> None:
        """Start the processes; ``wait_ready`` tells when they serve."""
        await asyncio.gather(*(client.start() for client in self._clients))

    async def wait_ready(self) -> EngineReady:
        """What the engines have in common, and their blocks together. Raises ``EngineDead`` for the first to fail."""
        every = await asyncio.gather(*(client.wait_ready() for client in self._clients))
        for ready in every:
            self._check_weights(ready)
        return msgspec.structs.replace(
            every[0],
            num_blocks=sum(ready.num_blocks for ready in every),
            max_model_len=min(ready.max_model_len for ready in every),
        )

    def _check_weights(self, ready: EngineReady) -> None:
        """Raise ``EngineDead`` for an engine that has begun with other weights than those before it."""
        if self._first_weights is None:
            self._first_weights = ready.weights_identity
        if ready.weights_identity != self._first_weights:
            raise EngineDead(
                "the weights that an engine has read are others than those that this server began with, for their "
                "source has changed: start the server again to serve the new ones"
            )

    @property
    def has_started(self) -> bool:
        """Whether all have come to the end of their start, good or bad."""
        return all(client.has_started for client in self._clients)

    def trouble(self) -> str | None:
        """Why nothing can be served now; None while one engine can, or sleeps until it is asked.

        All must have started before any serves.
        """
        if self.sleep.is_released:
            return RELEASED
        if self.sleep.is_asleep:
            return None
        troubles = self._troubles()
        if self.has_started and len(troubles) < len(self._clients):
            return None
        return "; ".join(troubles) or "the engines are starting"

    def degraded(self) -> str | None:
        """Which engines cannot serve, while others can."""
        return None if self.sleep.is_asleep or self.trouble() is not None else "; ".join(self._troubles()) or None

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Send a request to a replica; ``receiver`` gets its events, or once what ended it.

        Raises ``EngineDead``, and ``NotServed`` when all that can serve have as many open sequences as they may.
        """
        chosen = self._choose(request)
        deadlines = Deadlines(self._options)
        self._place(_Placed(request, deadlines.start(receiver), deadlines, chosen.index))

    def _choose(self, request: Request) -> Replica:
        able = [view for view, can_serve in zip(self._views, self._note_able(), strict=True) if can_serve]
        if not able:
            raise EngineDead(self.trouble() or "no engine can serve")
        able = [view for view in able if not view.num_open or view.num_open + request.n <= self._max_open]
        if not able:
            raise NotServed(
                f"{self._options.max_queued_requests} requests are waiting already; try again", 429, RETRY_SECONDS
            )
        able = [self._views[index] for index in self._slow_start.offered([view.index for view in able])]
        chosen = self._balancer.choose(request, able)
        if not any(view is chosen for view in able):
            raise AssertionError(f"{type(self._balancer).__name__} chose no replica that can serve")
        return chosen

    def _note_able(self) -> list[bool]:
        """Which replicas can serve. Those that could not, and can again, are noticed."""
        able = [client.trouble() is None for client in self._clients]
        if self.has_started:
            self._slow_start.note(able)
        return able

    def _place(self, placed: _Placed) -> None:
        self._clients[placed.replica].submit(placed.request, partial(self._receive, placed))
        self._placed[placed.request.request_id] = placed
        self._views[placed.replica].num_open += placed.request.n

    def _receive(self, placed: _Placed, news: list[TokenEvent] | EngineDead | NotServed) -> None:
        if not (isinstance(news, EngineDead) and placed.can_move and self._moves(placed)):
            placed.receive(news)

    def _moves(self, placed: _Placed) -> bool:
        """Whether a request whose engine has died before it sent anything has gone to another: once.

        If the request is what engines die of, it takes two of them with it, not all.
        """
        if self._is_closing or self._placed.get(placed.request.request_id) is not placed:
            return False
        try:
            chosen = self._choose(placed.request)
            self._clients[chosen.index].submit(placed.request, placed.receive)
        except (EngineDead, NotServed):
            return False
        self._views[placed.replica].num_open -= placed.request.n
        chosen.num_open += placed.request.n
        placed.replica, placed.can_move = chosen.index, False
        return True

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Tell the request's engine to stop working on it, or on one of its sequences."""
        if request_id in self._placed:
            self._clients[self._placed[request_id].replica].abort(request_id, index)

    def pause(self, request_id: str, is_on: bool) -> None:
        """Have the request's engine keep it from running, or let it go on."""
        if request_id in self._placed:
            self._clients[self._placed[request_id].replica].pause(request_id, is_on)

    def forget(self, request_id: str) -> None:
        """The request has ended; events still on their way are dropped."""
        if request_id in self._placed:
            placed = self._placed.pop(request_id)
            placed.deadlines.stop()
            self._views[placed.replica].num_open -= placed.request.n
            self._clients[placed.replica].forget(request_id)
            self.sleep.note_use()

    async def switch(self, new: EngineSwitching, old: EngineSwitching) -> None:
        """Exchange a plugin in every engine that lives, or in none; engines to come get it before they serve.

        Raises ``InvalidRequest`` when an engine cannot: those that could go back to ``old``.
        """
        async with self.sleep.awake():
            await self._switch(new, old)

    async def _switch(self, new: EngineSwitching, old: EngineSwitching) -> None:
        alive = [client for client in self._clients if not client.is_dead]
        results = await asyncio.gather(*(client.switch(*new) for client in alive), return_exceptions=True)
        wrong = next((result for result in results if isinstance(result, InvalidRequest)), None)
        if wrong is None and any(result is None for result in results):
            self._switched[new[:2] if new[0] == "logits_processors" else (new[0], "")] = new
            return
        changed = [client for client, result in zip(alive, results, strict=True) if result is None]
        await asyncio.gather(*(client.switch(*old) for client in changed), return_exceptions=True)
        raise wrong or EngineDead(self.trouble() or "no engine lives")

    async def call_workers(self, name: str, *arguments: Any) -> list[list[Any]]:
        """Run an operation on the workers of every engine that lives; the answers by engine, then by rank.

        Raises ``InvalidRequest`` with the first refusal: other engines may have done it.
        """
        return await self._in_each(lambda client: client.call_workers(name, arguments))

    async def call_feature(self, feature: str, operation: str, *arguments: Any) -> list[Any]:
        """Run an operation of a feature's part in every engine that lives; the answers by engine.

        Raises ``InvalidRequest`` with the first refusal: other engines may have done it.
        """
        return await self._in_each(lambda client: client.call_feature(feature, operation, arguments))

    async def _in_each(self, call: Callable[[EngineClient], Awaitable[Any]]) -> list[Any]:
        async with self.sleep.awake():
            alive = [client for client in self._clients if not client.is_dead]
            results = await asyncio.gather(*map(call, alive), return_exceptions=True)
        wrong = [result for result in results if isinstance(result, BaseException)]
        refusal = next((error for error in wrong if isinstance(error, InvalidRequest)), None)
        if refusal is not None or len(wrong) == len(results):
            raise refusal or (wrong[0] if wrong else EngineDead(self.trouble() or "no engine lives"))
        return [result for result in results if not isinstance(result, BaseException)]

    async def update_weights(self, model: str, load_format: str | None, *, aborts: bool) -> int:
        """Serve another checkpoint of the same kind in every engine that lives, or in none: as ``ChangeWeights``.

        Engines read it while they serve, each between two of its steps. Then requests under way end, by themselves or
        aborted (``aborts``), and those that come meanwhile wait; returns how many did. Engines to come get it before
        they serve. Raises ``InvalidRequest`` with an engine's words, ``EngineDead``; then nothing has changed.
        """
        load_format = load_format or self._config.model.load_format
        async with self._updating:
            async with self.sleep.awake():
                clients = [client for client in self._clients if not client.is_dead]
                found = await self._prepare(clients, model, load_format)
            aborted: set[str] = set()
            try:
                async with self.sleep.quiet(partial(self._abort_open, aborted) if aborts else lambda: None):
                    if clients != [client for client in self._clients if not client.is_dead]:
                        raise EngineDead("an engine has ended or started meanwhile: the weights stay as they are")
                    self._weights = NewWeights(model, load_format, found)  # also of engines that die from here on
                    results = await asyncio.gather(*(c.change_weights("use") for c in clients), return_exceptions=True)
                    for client, result in zip(clients, results, strict=True):
                        if isinstance(result, BaseException):
                            log.error("an engine died when it was given other weights: %s", client.trouble())
                    log.info("the weights are those of %s", model)
                    return self.sleep.num_waiting
            except BaseException:
                await self._discard(clients)
                raise

    async def _prepare(self, clients: list[EngineClient], model: str, load_format: str) -> str:
        """Have engines read a checkpoint; its fingerprint. Raises the first refusal, with nothing kept of it."""
        calls = (client.change_weights("prepare", model, load_format) for client in clients)
        results = await asyncio.gather(*calls, return_exceptions=True)
        wrong = [result for result in results if isinstance(result, BaseException)]
        found = {result for result in results if isinstance(result, str)}
        if not wrong and len(found) == 1:
            return found.pop()
        await self._discard(clients)
        if wrong:
            raise next((error for error in wrong if isinstance(error, InvalidRequest)), wrong[0])
        if not found:
            raise EngineDead(self.trouble() or "no engine lives")
        raise InvalidRequest(f"the weights stay as they are: the files of {model} changed meanwhile", "model_path")

    async def _discard(self, clients: list[EngineClient]) -> None:
        calls = (client.change_weights("discard") for client in clients if not client.is_dead)
        await asyncio.gather(*calls, return_exceptions=True)

    def _abort_open(self, aborted: set[str]) -> None:
        """End all requests that are not ``aborted`` yet."""
        for request_id in self._placed.keys() - aborted:
            aborted.add(request_id)
            self.abort(request_id)

    async def close(self) -> None:
        """Stop the processes."""
        self._is_closing = True
        await self.sleep.close()
        for task in self._reviving.values():
            task.cancel()
        await asyncio.gather(*self._reviving.values(), return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _stop_engines(self) -> None:
        """Stop the processes for now. What they had done stays counted."""
        for task in self._reviving.values():
            task.cancel()
        await asyncio.gather(*self._reviving.values(), return_exceptions=True)
        self._reviving.clear()
        await asyncio.gather(*(client.close() for client in self._clients))
        for index in range(len(self._clients)):
            self._take_over(index, EngineStats())

    async def _start_engines(self) -> EngineReady:
        """Start them again, with the plugins that they had, and what features told them. Raises ``EngineDead``."""
        clients = [EngineClient(self._config, self._fingerprint, index) for index in range(len(self._clients))]
        self.given_up.clear()
        for index, client in enumerate(clients):
            self._install(index, client)
        try:
            await self.start()
            ready = await self.wait_ready()
            for client in clients:
                await self._make_like_the_last(client)
        except BaseException:
            await asyncio.gather(*(client.close() for client in clients))
            raise
        return ready

    async def _make_like_the_last(self, client: EngineClient) -> None:
        """Give a new engine the plugins and weights that were changed since the start, and what features tell it."""
        if self.on_begin is not None:
            await self.on_begin(client.call_feature)
        for switching in list(self._switched.values()):
            await client.switch(*switching)
        given: NewWeights | None = None
        while (wanted := self._weights) is not given and wanted is not None:  # last: nothing is awaited after it
            found = await client.change_weights("prepare", wanted.model, wanted.load_format)
            if found != wanted.fingerprint:
                raise InvalidRequest(f"the files of {wanted.model} have changed since they were read", "model_path")
            await client.change_weights("use")
            given = wanted

    def _take_over(self, index: int, stats: EngineStats) -> None:
        """From now on an engine's numbers are these; what the one before it had done stays counted."""
        view = self._views[index]
        self._past[index] = total([self._past[index], without_gauges(view.stats)])
        self._note(index, stats)

    def pids(self) -> list[int]:
        """The engine processes that live."""
        return [client.pid for client in self._clients if client.pid is not None and not client.is_dead]

    def info(self) -> list[dict[str, Any]]:
        """For /server_info."""
        self._note_able()
        return [
            {
                "trouble": None if self.sleep.is_asleep else client.trouble(),
                "asleep": self.sleep.is_asleep,
                "weight": self._slow_start.weight(view.index),
                "num_open": view.num_open,
                "stats": msgspec.structs.asdict(view.stats),
            }
            for view, client in zip(self._views, self._clients, strict=True)
        ]

    def _troubles(self) -> list[str]:
        return [trouble for client in self._clients if (trouble := client.trouble()) is not None]

    def _note(self, index: int, stats: EngineStats) -> None:
        self._views[index].stats = stats
        if self.on_stats is not None:
            self.on_stats(
                total(
                    [
                        without_gauges(view.stats) if client.is_dead else view.stats
                        for view, client in zip(self._views, self._clients, strict=True)
                    ]
                    + self._past
                )
            )

    def _revive(self, index: int) -> str:
        """An engine has died: start another in its place, if we are to. Returns what is done, for the log."""
        self._note_able()
        if self.on_engine_death is not None:
            self.on_engine_death(self._clients[index].trouble() or "")
        if not self._config.server.health_monitor:
            return "it is not started again (--health-monitor is off)"
        delay = self._delay(index)
        self._reviving[index] = asyncio.create_task(self._restart(index, delay))
        self._reviving[index].add_done_callback(self._check_restart)
        return _plan(delay)

    def _check_restart(self, task: asyncio.Task[None]) -> None:
        """A restart that fails in a way nobody foresaw is no reason to wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("an engine could not be started again", exc_info=error)
            self.given_up.set()

    def _delay(self, index: int) -> float | None:
        """Seconds until an engine that has died now is started again; None when it has died too often."""
        deaths, now = self._deaths[index], time.monotonic()
        deaths[:] = [death for death in deaths if now - death < DEATHS_SECONDS] + [now]
        return None if len(deaths) >= MAX_DEATHS else FIRST_DELAY * 2 ** (len(deaths) - 1)

    async def _restart(self, index: int, delay: float | None) -> None:
        """Start an engine until one serves, each time after a longer wait; give up after too many deaths."""
        await self._clients[index].close()
        while delay is not None:
            await asyncio.sleep(delay)
            client = EngineClient(self._config, self._fingerprint, index)
            try:
                await client.start()
                self._check_weights(await client.wait_ready())
                await self._make_like_the_last(client)
            except (EngineDead, InvalidRequest, OSError) as error:
                await client.close()
                delay = self._delay(index)
                log.error("engine %d could not be started again: %s; %s", index, error, _plan(delay))
                continue
            except asyncio.CancelledError:
                await client.close()
                raise
            self._take_over(index, client.stats)
            self._install(index, client)
            log.warning("engine %d serves again", index)
            return
        if all(client.is_dead for client in self._clients):
            self.given_up.set()


def _plan(delay: float | None) -> str:
    """What is done about an engine's death."""
    if delay is None:
        return f"it died {MAX_DEATHS} times within {DEATHS_SECONDS} seconds and is not started again"
    return f"it is started again in {delay:g} seconds"


def without_gauges(stats: EngineStats) -> EngineStats:
    """What is left of an engine that has died: what it had done, which counters must not lose."""
    features = {
        name: {field: 0 if field.startswith("num_") else number for field, number in numbers.items()}
        for name, numbers in stats.features.items()
    }
    gauges = {name: 0 for name in stats.__struct_fields__ if name.startswith("num_")}
    return msgspec.structs.replace(stats, **gauges, features=features)


def total(every: list[EngineStats]) -> EngineStats:
    """The engines' numbers together: every field counts something, so they add up."""
    if len(every) == 1:
        return every[0]
    by_position = tuple(map(sum, zip_longest(*(stats.accepted_by_position for stats in every), fillvalue=0)))
    names = [name for name in EngineStats.__struct_fields__ if name not in ("accepted_by_position", "features")]
    features: dict[str, dict[str, float]] = {}
    for name, numbers in [item for stats in every for item in stats.features.items()]:
        own = features.setdefault(name, {})
        own |= {field: own.get(field, 0) + number for field, number in numbers.items()}
    return EngineStats(
        **{name: sum(getattr(stats, name) for stats in every) for name in names},
        accepted_by_position=by_position,
        features=features,
    )
