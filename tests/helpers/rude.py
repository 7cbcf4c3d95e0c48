"""Clients that hang up, at whatever moment."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections import Counter
from typing import Any

from tests.helpers.client import dial, raw_request
from tests.helpers.rig import Server

LONG = 7000  # tokens; nobody who hangs up waits for so many, even if this process loses its core for a second or two


class Rude:
    """One client of the storm: it does something, then hangs up."""

    def __init__(self, server: Server, dice: random.Random) -> None:
        self._server = server
        self._dice = dice

    def _body(self, **more: Any) -> dict[str, Any]:
        prompt = f"client {self._dice.randrange(50)} " * self._dice.choice([1, 3, 40])
        return {"prompt": prompt, "max_tokens": LONG, "ignore_eos": True, "n": self._dice.choice([1, 1, 1, 4])} | more

    async def before_headers(self, writer: asyncio.StreamWriter) -> None:
        head, _ = raw_request(self._body())
        writer.write(head[: self._dice.randrange(len(head) - 4)])

    async def mid_body(self, writer: asyncio.StreamWriter) -> None:
        head, data = raw_request(self._body(stream=True))
        writer.write(head + data[: self._dice.randrange(len(data))])

    async def before_first_token(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(raw_request(self._body(stream=self._dice.random() < 0.5))))

    async def waiting_for_all(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(raw_request(self._body())))
        await asyncio.sleep(self._dice.uniform(0, 0.5))

    async def half_close(self, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(raw_request(self._body(stream=True))))
        writer.write_eof()
        await asyncio.sleep(self._dice.uniform(0, 0.3))

    async def mid_stream(self, writer: asyncio.StreamWriter, reader: asyncio.StreamReader) -> None:
        writer.write(b"".join(raw_request(self._body(stream=True))))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._dice.uniform(0.2, 1)):
                for _ in range(self._dice.randrange(1, 60)):
                    await reader.readline()

    async def run(self, seen: Counter[str]) -> None:
        await asyncio.sleep(self._dice.uniform(0, 0.5))
        kind = self._dice.choice(
            ["before_headers", "mid_body", "before_first_token", "waiting_for_all", "half_close", "mid_stream"]
        )
        reader, writer = await dial(self._server)
        if self._dice.random() < 0.5:  # half of them with a reset instead of an orderly end
            linger = b"\x01\0\0\0\0\0\0\0"
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        extra = (reader,) if kind == "mid_stream" else ()
        with contextlib.suppress(ConnectionError):
            await getattr(self, kind)(writer, *extra)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        seen[kind] += 1
