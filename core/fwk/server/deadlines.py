"""How long requests may take."""

from __future__ import annotations

import asyncio

from fwk.config import ServerOptions
from fwk.errors import EngineDead, NotServed
from fwk.interfaces.engine_pool import Receiver
from fwk.types import TokenEvent
from fwk_http.admission import waited_too_long


class Deadlines:
    """Ends one request that takes too long: until its first token, or altogether."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._timers: list[asyncio.TimerHandle] = []

    def start(self, tell: Receiver) -> Receiver:
        """Run the time for a request; returns what its news go to instead of ``tell``."""
        queue, total = self._options.queue_timeout, self._options.request_timeout
        if queue is None and total is None:
            return tell
        loop = asyncio.get_running_loop()
        if total is not None:
            late = NotServed(f"the request took more than {total:g} seconds and was ended", 504)
            self._timers.append(loop.call_later(total, tell, late))
        if queue is None:
            return tell
        waiting = loop.call_later(queue, tell, waited_too_long(queue))
        self._timers.append(waiting)

        def receive(news: list[TokenEvent] | EngineDead | NotServed) -> None:
            waiting.cancel()
            tell(news)

        return receive

    def stop(self) -> None:
        """The request has ended."""
        for timer in self._timers:
            timer.cancel()
