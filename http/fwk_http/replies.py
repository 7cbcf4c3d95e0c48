"""For dialects: replies that end when the client goes away, whatever they were waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

T = TypeVar("T")

CLIENT_CLOSED = 499
"""The status of a reply that nobody waits for any more."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Run ``work``, but cancel it as soon as the client is gone (None then); ``receive`` is the request's."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        watcher.cancel()
        task.cancel()
        # The work's own clean-up, which aborts the request in the engine, is over when this returns.
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class ByteStream(Response):
    """A reply from a generator of ready bytes, and ``ending`` after the last.

    The status goes out with the first piece, so what fails before it is an ordinary HTTP error; what fails later
    becomes the last piece, by ``last_words``. The generator is closed in every case: at its end, on an error, and at
    once when the client disconnects.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes, None],
        last_words: Callable[[Exception], bytes],
        *,
        media_type: str,
        ending: bytes = b"",
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"}, media_type=media_type)
        del self.headers["content-length"]
        self._pieces = pieces
        self._last_words = last_words
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._run(send))

    async def _run(self, send: Send) -> None:
        try:
            first = await anext(self._pieces)
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send(_body(first))
            while (chunk := await self._next()) is not None:
                await send(_body(chunk))
            await send({"type": "http.response.body", "body": self._ending, "more_body": False})
        finally:
            await self._pieces.aclose()

    async def _next(self) -> bytes | None:
        """The next piece; an error becomes one, and is the last."""
        try:
            return await anext(self._pieces, None)
        except Exception as error:
            return self._last_words(error)


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}
