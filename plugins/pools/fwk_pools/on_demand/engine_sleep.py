"""Engines that sleep while they are not asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from fwk.errors import EngineDead, FwkError, InvalidRequest
from fwk.types import EngineReady

log = logging.getLogger(__name__)

RELEASED = "the memory of the engines was released: POST /resume_memory_occupation starts them again"

Turn = Callable[[], AbstractAsyncContextManager[None]]


class EngineSleep:
    """Whether a model's engines run, and who waits for them.

    Every use is inside ``awake``, or has a request placed (``has_requests``). stop, start: of the processes. ``turn``
    surrounds each start, ``on_ready`` is notified of it.
    """

    def __init__(
        self,
        stop: Callable[[], Awaitable[None]],
        start: Callable[[], Awaitable[EngineReady]],
        has_requests: Callable[[], bool],
    ) -> None:
        self._stop = stop
        self._start = start
        self._has_requests = has_requests
        self._lock = asyncio.Lock()  # of stopping and starting
        self._waiting: list[asyncio.Future[None]] = []
        self._waking: asyncio.Task[None] | None = None
        self._num_users = 0
        self._is_ready = self._is_closed = False
        self._last_use = time.monotonic()
        self.is_asleep = False
        self.is_held = False
        self.is_released = False
        self.turn: Turn = nullcontext
        self.on_ready: Callable[[EngineReady], Awaitable[None]] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether they run and nobody uses them."""
        return self._is_ready and not self._num_users and not self._has_requests()

    @property
    def idle_seconds(self) -> float:
        """Since the last use."""
        return time.monotonic() - self._last_use

    def note_use(self) -> None:
        """They have started, or a use has ended."""
        self._last_use = time.monotonic()

    def note_ready(self) -> None:
        """They serve."""
        self._is_ready = True
        self.note_use()

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """They run, and do not fall asleep meanwhile. Raises ``EngineDead`` when they cannot be started, or may not."""
        if self.is_released:
            raise EngineDead(RELEASED)
        if self.is_asleep or self.is_held:
            await self._wait()
        else:
            self._num_users += 1
        try:
            yield
        finally:
            self._leave()

    async def _wait(self) -> None:
        """Wait until they run; whoever has waited is counted as a user by then."""
        if self._is_closed:
            raise EngineDead("the server is stopping")
        let_in = asyncio.get_running_loop().create_future()
        self._waiting.append(let_in)
        if self._waking is None:
            self._waking = asyncio.create_task(self._wake())
        try:
            await let_in
        except asyncio.CancelledError:
            if let_in.done() and not let_in.cancelled() and let_in.exception() is None:
                self._leave()
            raise

    def _leave(self) -> None:
        self._num_users -= 1
        self.note_use()

    async def _wake(self) -> None:
        error: BaseException | None = None
        try:
            async with self.turn(), self._lock:
                if self.is_asleep:
                    ready = await self._start()
                    if self.on_ready is not None:
                        await self.on_ready(ready)
                    self.is_asleep = False
                    self.note_ready()
                self.is_held = False
                self._let_in(None)  # before the next one's turn, which may put them to sleep again
        except (FwkError, OSError) as failed:
            error = failed if isinstance(failed, EngineDead) else EngineDead(f"the engine could not start: {failed}")
            log.error("%s", error)
        except asyncio.CancelledError:
            error = EngineDead("the server is stopping")
        finally:
            self._waking = None
            self._let_in(error)

    def _let_in(self, error: BaseException | None) -> None:
        waiting, self._waiting = self._waiting, []
        for let_in in waiting:
            if let_in.done():
                continue
            if error is not None:
                let_in.set_exception(error)
            else:
                self._num_users += 1
                let_in.set_result(None)

    async def fall_asleep(self) -> bool:
        """Stop them, unless they are used by now. Returns whether they sleep."""
        async with self._lock:
            if self.is_idle:
                await self._sleep()
            return self.is_asleep

    async def release(self) -> None:
        """Stop them until ``resume``, and refuse all uses. Raises ``InvalidRequest`` while there are any."""
        async with self._lock:
            if self._waiting or not (self.is_asleep or self.is_idle):
                raise InvalidRequest(
                    "the engines are at work, or starting: release their memory when all requests have ended"
                )
            self.is_released = True
            if not self.is_asleep:
                await self._sleep()

    async def resume(self) -> None:
        """Start them again, if they were released. Raises ``EngineDead`` when they cannot be started."""
        if self.is_released:
            self.is_released = False
            async with self.awake():
                log.info("the engines serve again")

    async def begin_asleep(self) -> None:
        """They are not started before they are wanted."""
        await self._sleep()

    async def _sleep(self) -> None:
        self.is_asleep = True  # from here on uses wait for the start that follows
        self._is_ready = self.is_held = False
        await self._stop()

    async def close(self) -> None:
        """Start nothing any more."""
        self._is_closed = True
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.gather(self._waking, return_exceptions=True)
            self._let_in(EngineDead("the server is stopping"))  # also when it was cancelled before it began
