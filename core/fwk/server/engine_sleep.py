"""Engines that sleep while nobody asks for them, and share a bounded memory with those of other models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial

import psutil

from fwk.errors import EngineDead, FwkError, InvalidRequest
from fwk.types import EngineReady

log = logging.getLogger(__name__)

ENGINE_BYTES = 512 * 2**20
"""What an engine process takes besides its model's weights, until it has been measured."""

IDLE_CHECK_SECONDS = 0.25

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

    @asynccontextmanager
    async def quiet(self, on_look: Callable[[], None]) -> AsyncIterator[None]:
        """The engines run and no request uses them: open uses have ended, and new ones wait until this is left.

        on_look: called now and then while uses end. Raises ``EngineDead`` when they sleep.
        """
        async with self._lock:
            if self.is_asleep:
                raise EngineDead(RELEASED if self.is_released else "the engines sleep: try again")
            self.is_held = True
            try:
                while not self.is_idle:
                    on_look()
                    await asyncio.sleep(0.01)
                yield
            finally:
                self.is_held = False
                self.note_use()

    @property
    def num_waiting(self) -> int:
        """Uses that wait until they may begin."""
        return len(self._waiting)

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


class SleepingModel:
    """A model as the memory's books see it. ``file_bytes``: what its weights take before they have been measured."""

    def __init__(self, name: str, sleep: EngineSleep, pids: Callable[[], Sequence[int]], file_bytes: int) -> None:
        self.name = name
        self.sleep = sleep
        self._pids = pids
        self._measured = 0
        self._expected = file_bytes + ENGINE_BYTES

    @property
    def num_bytes(self) -> int:
        """What its engines take, or would."""
        if not self.sleep.is_asleep:
            self._measured = max(_resident(self._pids()), 1)
        return self._measured or self._expected


class EngineMemory:
    """Puts engines to sleep: those unused for ``idle_timeout`` seconds, and those whose memory another model needs.

    limit: bytes that all engines may take; None for no limit. A model whose turn it is waits until the ones used least
    recently have finished what they do; meanwhile new requests for those wait, so no model waits for ever.
    """

    def __init__(self, models: Sequence[SleepingModel], limit: int | None, idle_timeout: float | None) -> None:
        self._models = models
        self._limit = limit
        self._idle_timeout = idle_timeout
        self._turns = asyncio.Lock()  # first come, first served
        for model in models:
            model.sleep.turn = partial(self._turn, model)

    async def watch(self) -> None:
        """Put to sleep what is unused, for ever."""
        while self._idle_timeout is not None:
            await asyncio.sleep(IDLE_CHECK_SECONDS)
            for model in self._models:
                sleep = model.sleep
                if sleep.is_idle and sleep.idle_seconds >= self._idle_timeout and await sleep.fall_asleep():
                    log.info("%s sleeps after %g idle seconds", model.name, self._idle_timeout)

    @asynccontextmanager
    async def _turn(self, model: SleepingModel) -> AsyncIterator[None]:
        """A model's turn to start: there is room for it."""
        async with self._turns:
            while (victim := self._victim(model)) is not None:
                victim.sleep.is_held = True  # its new requests wait until it has slept
                if victim.sleep.is_idle and await victim.sleep.fall_asleep():
                    log.info("%s sleeps: %s needs its memory", victim.name, model.name)
                else:
                    await asyncio.sleep(0.01)
            yield

    def _victim(self, model: SleepingModel) -> SleepingModel | None:
        """The model to stop before this one starts; None when it fits, or is alone."""
        if self._limit is None or not model.sleep.is_asleep:
            return None
        others = [other for other in self._models if other is not model and not other.sleep.is_asleep]
        if sum(other.num_bytes for other in [model, *others]) <= self._limit:
            return None
        return max(others, key=lambda o: (o.sleep.is_idle, o.sleep.is_held, o.sleep.idle_seconds), default=None)


def _resident(pids: Sequence[int]) -> int:
    """Resident bytes of processes and their children."""
    total = 0
    for pid in pids:
        try:
            process = psutil.Process(pid)
            for one in [process, *process.children(recursive=True)]:
                total += one.memory_info().rss
        except psutil.Error:
            continue
    return total
