"""How many requests are let in."""

from __future__ import annotations

import asyncio
import collections
from typing import Protocol

from fwk_errors import NotServed

RETRY_SECONDS = 1
"""What refused clients are told to wait: places become free with every request that ends."""


STEPS_IN = 16
"""Requests let in per turn of the event loop. Were it all that come at once, none would be answered until all had been
read, and whoever asks for /health meanwhile would wait as long."""


class AdmissionOptions(Protocol):
    """``--concurrency-limit`` and what is done with requests beyond it."""

    @property
    def concurrency_limit(self) -> int | None: ...
    @property
    def concurrency_with_block(self) -> bool: ...
    @property
    def max_queued_requests(self) -> int: ...
    @property
    def queue_timeout(self) -> float | None: ...


class AdmissionController:
    """Counts the requests that are served, before their bodies are read, and admits none during shutdown.

    ``most``: how many are let in at all; more than may run or wait in the engines could not be served soon.
    """

    def __init__(self, options: AdmissionOptions, most: int) -> None:
        self._most = most
        self._line: collections.deque[asyncio.Future[None]] = collections.deque()
        self._num_steps: int | None = (
            None  # made in this turn of the event loop; None: no request has arrived for a while
        )
        self._limit = options.concurrency_limit
        self._max_waiting = options.max_queued_requests if options.concurrency_with_block else 0
        self._timeout = options.queue_timeout
        self._places = asyncio.Semaphore(self._limit or 1)
        self._num_waiting = 0
        self._num_inside = 0
        self.num_entered = 0  # ever
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.is_closed = False

    async def enter(self) -> None:
        """Take a place; every one taken must be given back. Raises ``NotServed``."""
        if self.is_closed:
            raise NotServed("the server is stopping", 503, RETRY_SECONDS)
        if self._num_inside >= self._most:
            raise NotServed(f"{self._most} requests run or wait already; try again", 429, RETRY_SECONDS)
        self._num_inside += 1
        self.num_entered += 1
        self._is_empty.clear()
        try:
            await self._step_in()
            await self._take_place()
        except BaseException:
            self._left()
            raise

    async def _step_in(self) -> None:
        """Wait until it is one's turn, in the order of arrival."""
        if self._num_steps is None:
            self._num_steps = 0
            asyncio.get_running_loop().call_soon(self._next_turn)
        if self._num_steps < STEPS_IN and not self._line:
            self._num_steps += 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._line.append(turn)
        await turn

    def _next_turn(self) -> None:
        """The event loop has come round: the next ones may go."""
        if not self._num_steps and not self._line:
            self._num_steps = None
            return
        self._num_steps = 0
        while self._line and self._num_steps < STEPS_IN:
            turn = self._line.popleft()
            if not turn.done():  # else its client has gone
                turn.set_result(None)
                self._num_steps += 1
        asyncio.get_running_loop().call_soon(self._next_turn)

    async def _take_place(self) -> None:
        if self._limit is None:
            return
        if self._places.locked() and self._num_waiting >= self._max_waiting:
            raise NotServed(f"this server answers {self._limit} requests at once; try again", 429, RETRY_SECONDS)
        self._num_waiting += 1
        try:
            async with asyncio.timeout(self._timeout):
                await self._places.acquire()
        except TimeoutError:
            raise waited_too_long(self._timeout) from None
        finally:
            self._num_waiting -= 1

    def leave(self) -> None:
        """Give a place back."""
        if self._limit is not None:
            self._places.release()
        self._left()

    def _left(self) -> None:
        self._num_inside -= 1
        if not self._num_inside:
            self._is_empty.set()

    def close(self) -> None:
        """Admit no request from now on."""
        self.is_closed = True

    @property
    def is_empty(self) -> bool:
        return self._is_empty.is_set()

    async def empty(self) -> None:
        """Wait until all who are inside, or wait to be, have left."""
        await self._is_empty.wait()


def waited_too_long(seconds: float | None) -> NotServed:
    """What a client is told whose request never had its turn."""
    return NotServed(f"the request waited for {seconds:g} seconds and was given up", 503, RETRY_SECONDS)
