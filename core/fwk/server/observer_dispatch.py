"""Tells observers, each on a thread of its own: none can hold up the event loop, nor another observer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from typing import Any

from fwk.errors import one_line_traceback
from fwk.interfaces.observer import Observer, RequestRecord
from fwk.types import EngineStats

log = logging.getLogger(__name__)

MAX_EVENTS = 20_000
"""Events that may wait for an observer, before it misses what is told of tokens; a server of a hundred streams makes
that many in some seconds. It misses requests when twice as many wait, and of the engine's states all but the last.
"""

SLOW_SECONDS = 5.0
"""What one call may take, before the observer counts as slow."""

PERIOD = 0.02
"""Seconds between two looks at what has come: the loop then only appends, and rarely wakes a thread."""

SLICE = 50
BREATH = 0.0005
"""After so many events a thread lets go of the interpreter for a moment: the event loop comes first."""

CLOSE_SECONDS = 5.0

SECRET = frozenset({"authorization", "x-api-key", "cookie", "proxy-authorization"})
"""Headers that no observer sees."""

_EVENTS = ("request_arrived", "tokens_received", "request_finished", "step_finished", "engine_died")


class Listener:
    """One observer and its thread. All methods but the thread's own are for the event loop."""

    def __init__(self, observer: Observer, name: str) -> None:
        self.observer = observer
        self.name = name
        self.hears = {event for event in _EVENTS if getattr(type(observer), event) is not getattr(Observer, event)}
        self._events: deque[tuple[str, tuple[Any, ...]]] = deque()
        self._come = threading.Event()
        self._hurry = threading.Event()
        self._busy_since = 0.0
        self._latest: tuple[Any, ...] | None = None  # state of the engine, in the place of those it missed
        self.num_missed = 0
        self.is_late = False
        self.is_dropped = False
        self._thread = threading.Thread(target=self._run, name=f"fwk-{name}", daemon=True)
        self._thread.start()

    def tell(self, event: str, *args: Any) -> None:
        """Have the observer told, soon. One that is too slow misses events until it has caught up."""
        if self.is_dropped:
            return
        num_waiting = len(self._events)
        if num_waiting < MAX_EVENTS or (num_waiting < 2 * MAX_EVENTS and event.startswith(("request", "engine"))):
            self._events.append((event, args))
            if not self._come.is_set():
                self._come.set()
        else:
            self._fall_behind(f"{MAX_EVENTS} events wait for it")
            if event == "step_finished":
                self._latest = args
            else:
                self.num_missed += 1
        if self._is_hung:
            self._fall_behind(f"a call of it takes more than {SLOW_SECONDS:g} seconds")

    @property
    def _is_hung(self) -> bool:
        return self._busy_since > 0 and time.monotonic() - self._busy_since > SLOW_SECONDS

    async def settle(self) -> None:
        """Wait until it was told all that has happened so far; not for one that is slow."""
        if self.is_late or self.is_dropped or not self._thread.is_alive():
            return
        loop, settled = asyncio.get_running_loop(), asyncio.Event()
        self._events.append(("", (lambda: loop.call_soon_threadsafe(settled.set),)))
        self._come.set()
        self._hurry.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(settled.wait(), 1.0)

    def close(self) -> None:
        """Have it told the rest and closed, and wait for that a while."""
        if not self.is_dropped:
            latest, self._latest = self._latest, None
            self._events.extend([("step_finished", latest)] if latest is not None else [])
            self._events.append(("close", ()))
            self._come.set()
            self._hurry.set()
            self._thread.join(0 if self._is_hung else CLOSE_SECONDS)
            if self._thread.is_alive():
                log.warning("observer %s does not close within %g seconds: it is left behind", self.name, CLOSE_SECONDS)
                self._events.clear()
            self.is_dropped = True

    def _fall_behind(self, why: str) -> None:
        if not self.is_late:
            self.is_late = True
            log.warning("observer %s is too slow (%s): it misses events until it has caught up", self.name, why)

    def _catch_up(self) -> bool:
        """Everything was told: so is the state that came last. Whether there may be more."""
        latest, self._latest = self._latest, None
        if latest is not None and not self._call("step_finished", latest):
            return False
        if self.is_late and not self._events:
            self.is_late = False
            log.warning("observer %s has caught up; it has missed %d events so far", self.name, self.num_missed)
        return True

    def _run(self) -> None:
        while not self.is_dropped:
            self._come.wait()
            self._hurry.wait(PERIOD)
            self._hurry.clear()
            self._come.clear()
            for number in range(len(self._events)):
                if number % SLICE == SLICE - 1:
                    time.sleep(BREATH)
                if self.is_dropped or not self._events:
                    return
                event, args = self._events.popleft()
                self._busy_since = time.monotonic()
                if not self._call(event, args):
                    self.is_dropped = True
                    return
                self._busy_since = 0.0
            if not self._catch_up():
                self.is_dropped = True

    def _call(self, event: str, args: tuple[Any, ...]) -> bool:
        """Make one call; whether there may be more."""
        if not event:
            args[0]()
            return True
        try:
            getattr(self.observer, event)(*args)
        except Exception as error:
            log.error("observer %s raised and is notified no more: %s", self.name, one_line_traceback(error))
            log.debug("what it raised", exc_info=error)
            return False
        return event != "close"


class Observers:
    """All observers as one."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self._hearing: dict[str, list[Listener]] = {event: [] for event in _EVENTS}

    def add(self, observer: Observer, name: str) -> Listener:
        """Tell this one from now on."""
        listener = Listener(observer, name)
        self._listeners.append(listener)
        for event in listener.hears:
            self._hearing[event].append(listener)
        return listener

    def remove(self, listener: Listener) -> None:
        """Tell this one nothing more. Closing it is the caller's."""
        self._listeners.remove(listener)
        for event in listener.hears:
            self._hearing[event].remove(listener)

    def missed(self) -> dict[str, int]:
        """How many events each has missed."""
        return {listener.name: listener.num_missed for listener in self._listeners}

    @property
    def wants_content(self) -> bool:
        """Whether one of them is to see prompts and outputs."""
        return any(listener.observer.wants_content for listener in self._listeners)

    @property
    def wanted_headers(self) -> frozenset[str]:
        """Names of the HTTP headers that one of them is to see."""
        return frozenset[str]().union(*(listener.observer.wants_headers for listener in self._listeners)) - SECRET

    def request_arrived(self, record: RequestRecord) -> None:
        self._tell("request_arrived", record)

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        self._tell("tokens_received", record, num_tokens, seconds)

    def request_finished(self, record: RequestRecord) -> None:
        self._tell("request_finished", record)

    def step_finished(self, stats: EngineStats) -> None:
        self._tell("step_finished", stats)

    def engine_died(self, reason: str) -> None:
        self._tell("engine_died", reason)

    def close(self) -> None:
        """Close them all; they have the time of one."""
        closing = [threading.Thread(target=listener.close, daemon=True) for listener in self._listeners]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _tell(self, event: str, subject: RequestRecord | EngineStats | str, *args: Any) -> None:
        """Notify the observers. A record keeps changing, so each gets a copy of its present state."""
        for listener in self._hearing[event]:
            told = _copied(subject, listener) if isinstance(subject, RequestRecord) else subject
            listener.tell(event, told, *args)


def _copied(record: RequestRecord, listener: Listener) -> RequestRecord:
    copy = record.copy()
    if not listener.observer.wants_content:
        copy.prompt_token_ids = copy.outputs = None
    wanted = listener.observer.wants_headers
    if record.headers:
        copy.headers = {name: value for name, value in record.headers.items() if name in wanted}
    return copy
