"""Threads that compute a few at a time, however many of them wait for a process."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any


class WaitingPool(Executor):
    """At most ``size`` threads run functions; one that waits (``release``, then ``acquire``) has another in its place.

    Threads are started when they are needed, and those above ``size`` end when they have nothing to do.
    """

    def __init__(self, size: int, name: str) -> None:
        self._size = size
        self._name = name
        self._queue: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._turn = threading.Condition()
        self._num_running = 0
        self._num_returning = 0  # threads that waited, and want to run again: they come first
        self._num_idle = 0
        self._is_closed = False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._turn:
            if self._is_closed:
                raise RuntimeError("the pool is closed")
            self._queue.append((future, partial(fn, *args, **kwargs)))
            self._offer_turn()
        return future

    def release(self) -> None:
        """Let another thread run in place of this one."""
        with self._turn:
            self._num_running -= 1
            self._offer_turn()

    def acquire(self) -> None:
        """Run again, once another does not."""
        with self._turn:
            self._num_returning += 1
            self._turn.wait_for(lambda: self._num_running < self._size)
            self._num_returning -= 1
            self._num_running += 1
            self._offer_turn()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Run no more; what is under way is not waited for."""
        with self._turn:
            self._is_closed = True
            dropped, self._queue = (list(self._queue), deque()) if cancel_futures else ([], self._queue)
            self._turn.notify_all()
        for future, _ in dropped:
            future.cancel()

    def _offer_turn(self) -> None:
        """The lock is held. Wake or start a thread where there is a turn and something to do."""
        if self._num_running >= self._size:
            return
        if self._num_returning or (self._queue and self._num_idle):
            self._turn.notify_all()
        elif self._queue:
            self._num_running += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def _run(self) -> None:
        """A thread, which has a turn already."""
        while True:
            with self._turn:
                found = self._queue.popleft() if self._queue and not self._num_returning else None
                if found is None and not self._next_turn():
                    return
            if found is not None:
                _fulfil(*found)

    def _next_turn(self) -> bool:
        """The lock is held. Give the turn back and wait for another; False where this thread may end."""
        self._num_running -= 1
        self._offer_turn()
        if self._num_idle >= self._size:
            return False
        self._num_idle += 1
        self._turn.wait_for(
            lambda: self._is_closed or (self._queue and self._num_running < self._size and not self._num_returning)
        )
        self._num_idle -= 1
        if self._is_closed and not self._queue:
            return False
        self._num_running += 1
        return True


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        del future, work  # its traceback leads to this frame: a cycle would keep what the work was given
    else:
        future.set_result(result)
