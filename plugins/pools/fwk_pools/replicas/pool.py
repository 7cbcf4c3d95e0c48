"""All engines of a model as one: a request goes to the replica the load balancer chooses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from fwk.errors import EngineDead, NotServed, PluginFault
from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.interfaces.engine_pool import Engine, EnginePool, EnginePoolContext, Receiver
from fwk.types import EngineReady, EngineStats, Request, TokenEvent, total_stats
from fwk_pools.replicas.slow_start import SlowStart

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Placed:
    """Where a request is, and whether it may go to another engine when that one dies."""

    request: Request
    receiver: Receiver
    replica: int
    can_move: bool = True

    def receive(self, news: list[TokenEvent] | EngineDead | NotServed) -> None:
        """Pass on what the engine sends; a request that has got something cannot begin anew."""
        self.can_move = False
        self.receiver(news)


class Replicas(EnginePool):
    """As many pools as there are replicas. They share nothing; one that dies takes only its own requests with it."""

    def __init__(self, context: EnginePoolContext) -> None:
        options = context.options
        super().__init__(context, options.data_parallel_size)
        count = len(self.below)
        if count == 1:
            log.warning("--load-balance-method chooses among engines, and there is one (--data-parallel-size)")
        self._balancer: LoadBalancer = context.choose(
            "load_balancers", options.load_balance_method, BalanceContext, num_replicas=count
        )
        self._views = [Replica(index) for index in range(count)]
        self._slow_start = SlowStart(count, options.replica_slow_start)
        self._placed: dict[str, _Placed] = {}
        self._given_up: set[int] = set()
        self._weights: str | None = None  # the identity of those that all have read at the start
        self._is_closing = False
        self._fault = ""  # of the load balancer, which is asked no more
        for index, pool in enumerate(self.below):
            pool.on_stats = partial(self._note, index)
            pool.on_death = self._died
            pool.on_given_up = partial(self._gave_up, index)

    async def start(self) -> None:
        await asyncio.gather(*(pool.start() for pool in self.below))

    async def wait_ready(self) -> EngineReady:
        """What the engines have in common, and their blocks together. Raises ``EngineDead`` for the first to fail."""
        return self._joined(await asyncio.gather(*(pool.wait_ready() for pool in self.below)))

    def _joined(self, every: Sequence[EngineReady]) -> EngineReady:
        first = every[0]
        if any(ready.weights_identity != first.weights_identity for ready in every):
            raise EngineDead(
                "the weights that an engine has read are others than those of the first, for their source changed "
                "meanwhile: start the server again"
            )
        return msgspec.structs.replace(
            first,
            num_blocks=sum(ready.num_blocks for ready in every),
            max_model_len=min(ready.max_model_len for ready in every),
        )

    async def stop(self) -> None:
        await asyncio.gather(*(pool.stop() for pool in self.below))

    async def start_again(self) -> EngineReady:
        self._given_up.clear()
        results = await asyncio.gather(*(pool.start_again() for pool in self.below), return_exceptions=True)
        wrong = next((result for result in results if isinstance(result, BaseException)), None)
        if wrong is not None:
            await self.stop()
            raise wrong
        return self._joined([result for result in results if isinstance(result, EngineReady)])

    async def close(self) -> None:
        self._is_closing = True
        await asyncio.gather(*(pool.close() for pool in self.below))

    @property
    def max_open(self) -> int:
        return sum(pool.max_open for pool in self.below)

    @property
    def has_started(self) -> bool:
        return all(pool.has_started for pool in self.below)

    @property
    def is_loaded(self) -> bool:
        return any(pool.is_loaded for pool in self.below)

    def trouble(self) -> str | None:
        """Why nothing can be served now; None while one engine can. All must have started before any serves."""
        troubles = self._troubles()
        if self.has_started and len(troubles) < len(self.below):
            return None
        return "; ".join(troubles) or "the engines are starting"

    def degraded(self) -> str | None:
        if self.trouble() is not None:
            return None
        here = [pool for pool in self.below if pool.is_loaded]  # nothing is wrong with one that is off
        troubles = [why for pool in here for why in (pool.trouble() or pool.degraded(),)]
        return "; ".join(filter(None, [*troubles, self._fault])) or None

    def _troubles(self) -> list[str]:
        return [trouble for pool in self.below if (trouble := pool.trouble()) is not None]

    @asynccontextmanager
    async def use(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for pool in self.below:
                await stack.enter_async_context(pool.use())
            yield

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Send a request to a replica that can serve and has room, as the load balancer chooses."""
        chosen = self._choose(request)
        placed = _Placed(request, receiver, chosen.index)
        self._submit(request, chosen, partial(self._receive, placed))
        self._placed[request.request_id] = placed
        self._views[placed.replica].num_open += request.n

    def _submit(self, request: Request, chosen: Replica, receiver: Receiver) -> None:
        try:
            self.below[chosen.index].submit(request, receiver)
        except BaseException:
            self._ended(request, chosen)
            raise

    def _choose(self, request: Request) -> Replica:
        able = [view for view, can_serve in zip(self._views, self._note_able(), strict=True) if can_serve]
        if not able:
            raise EngineDead(self.trouble() or "no engine can serve")
        # Where none has room, whichever is chosen says so.
        able = [view for view in able if self._has_room(view, request)] or able
        able = [self._views[index] for index in self._slow_start.offered([view.index for view in able])]
        if not self._fault:
            try:
                chosen = self._balancer.choose(request, able)
                if any(view is chosen for view in able):
                    return chosen
                self._failed("chose no engine that can serve")
            except PluginFault as error:
                self._failed(str(error))
        return min(able, key=lambda view: view.num_open)

    def _ended(self, request: Request, replica: Replica) -> None:
        if not self._fault:
            try:
                self._balancer.ended(request, replica)
            except PluginFault as error:
                self._failed(str(error))

    def _told_of(self, replica: Replica) -> dict[str, Any]:
        """What the load balancer says of a replica."""
        try:
            return {} if self._fault else self._balancer.info(replica)
        except PluginFault as error:
            self._failed(str(error))
            return {}

    def _failed(self, why: str) -> None:
        """The load balancer is asked no more."""
        who = getattr(self._balancer.choose, "who", f"load balancer {type(self._balancer).__name__}")
        self._fault = f"{why if why.startswith(who) else f'{who} {why}'}; requests go to the engine with the fewest"
        log.error("%s", self._fault)

    def _has_room(self, view: Replica, request: Request) -> bool:
        return not view.num_open or view.num_open + request.n <= self.below[view.index].max_open

    def _note_able(self) -> list[bool]:
        """Which replicas can serve. Those that could not, and can again, are noticed."""
        able = [pool.trouble() is None for pool in self.below]
        if self.has_started:
            self._slow_start.note(able)
        return able

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
            self._submit(placed.request, chosen, placed.receive)
        except (EngineDead, NotServed):
            return False
        self.below[placed.replica].forget(placed.request.request_id)
        self._views[placed.replica].num_open -= placed.request.n
        self._ended(placed.request, self._views[placed.replica])
        chosen.num_open += placed.request.n
        placed.replica, placed.can_move = chosen.index, False
        return True

    def abort(self, request_id: str, index: int | None = None) -> None:
        if request_id in self._placed:
            self.below[self._placed[request_id].replica].abort(request_id, index)

    def pause(self, request_id: str, is_on: bool) -> None:
        if request_id in self._placed:
            self.below[self._placed[request_id].replica].pause(request_id, is_on)

    def forget(self, request_id: str) -> None:
        if request_id in self._placed:
            placed = self._placed.pop(request_id)
            self._views[placed.replica].num_open -= placed.request.n
            self._ended(placed.request, self._views[placed.replica])
            self.below[placed.replica].forget(request_id)

    @property
    def engines(self) -> Sequence[Engine]:
        return [engine for pool in self.below for engine in pool.engines]

    @property
    def stats(self) -> EngineStats:
        return total_stats([pool.stats for pool in self.below])

    def info(self) -> list[dict[str, Any]]:
        """``weight``: the share of requests for which the load balancer may choose the engine; and what that tells."""
        self._note_able()
        return [
            told | {"weight": self._slow_start.weight(index)} | self._told_of(self._views[index])
            for index, pool in enumerate(self.below)
            for told in pool.info()
        ]

    def _note(self, index: int, stats: EngineStats) -> None:
        self._views[index].stats = stats
        self.on_stats(self.stats)

    def _died(self, why: str) -> None:
        self._note_able()
        self.on_death(why)

    def _gave_up(self, index: int) -> None:
        self._given_up.add(index)
        if len(self._given_up) == len(self.below):
            self.on_given_up()
