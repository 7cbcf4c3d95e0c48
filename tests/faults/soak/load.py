"""The mixed load: workers that ask for one thing after the other, at random, and say what came of it."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from tests.helpers.client import Streamed
from tests.helpers.rig import GOLDEN, Server, assert_no_leak

HANG_SECONDS = 90.0
NUM_WORKERS = 8
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
KINDS = (
    "plain", "stream", "hang_up", "n", "logprobs", "prompt_logprobs", "schema", "regex", "adapter", "stop", "chat",
    "chat_stream", "golden", "wrong",
)  # fmt: skip


class Unexpected(Exception):
    """An answer that is wrong whatever goes wrong in the server."""


class Load:
    """Keeps a server busy. ``troubles`` is what should not have been; nothing of it is forgiven."""

    def __init__(self, server: Server, rate: float, seed: int) -> None:
        self._server = server
        self._pause = NUM_WORKERS / rate
        self._dice = random.Random(seed)
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._num_under_way = 0
        self._num_bad_times = 0
        self._is_bad_time = False
        self._connections: aiohttp.ClientSession | None = None
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.troubles: list[str] = []

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(NUM_WORKERS):
                    group.create_task(self._work(random.Random(self._dice.random())))
        finally:
            await self._hang_up_all()

    @asynccontextmanager
    async def bad_time(self) -> AsyncIterator[None]:
        """While requests may fail with 5xx or an error event, because an engine dies."""
        self._is_bad_time = True
        self._num_bad_times += 1
        yield
        self._is_bad_time = False

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """No request under way, and no connection kept."""
        self._is_open.clear()
        try:
            async with asyncio.timeout(HANG_SECONDS):
                while self._num_under_way:
                    await asyncio.sleep(0.05)
            await self._hang_up_all()
            yield
        finally:
            self._is_open.set()

    def _session(self) -> aiohttp.ClientSession:
        """The connections in use, kept for one another's requests."""
        if self._connections is None:
            timeout = aiohttp.ClientTimeout(total=HANG_SECONDS)
            self._connections = aiohttp.ClientSession(self._server.url, timeout=timeout)
        return self._connections

    async def _hang_up_all(self) -> None:
        session, self._connections = self._connections, None
        if session is not None:
            await session.close()

    async def _work(self, dice: random.Random) -> None:
        while True:
            await asyncio.sleep(dice.expovariate(1 / self._pause))
            await self._is_open.wait()
            kind = dice.choice(KINDS)
            before, was_bad = self._num_bad_times, self._is_bad_time
            self._num_under_way += 1
            try:
                async with asyncio.timeout(HANG_SECONDS):
                    outcome = await getattr(self, f"_{kind}")(self._session(), dice)
            except TimeoutError:
                outcome = "hung"
            except (Unexpected, AssertionError, ValueError, aiohttp.ClientError) as error:
                outcome = f"{type(error).__name__}: {str(error)[:150]}"
            finally:
                self._num_under_way -= 1
            self._note(kind, outcome, is_forgiven=was_bad or self._num_bad_times > before)

    def _note(self, kind: str, outcome: str, *, is_forgiven: bool) -> None:
        int16_activations = outcome in ("served", "refused") or (outcome == "failed" and is_forgiven)
        self.outcomes[kind, outcome if int16_activations else "wrong"] += 1
        if not int16_activations:
            self.troubles.append(f"{kind}: {outcome}")

    async def _post(self, session: aiohttp.ClientSession, path: str = "/v1/completions", **body: Any) -> Any:
        """The reply's JSON, or what became of the request instead."""
        async with session.post(path, json={"prompt": "soak", "max_tokens": 24} | body) as reply:
            text = await reply.text()
        assert_no_leak(text)
        if reply.status == 200:
            return json.loads(text)
        if reply.status == 429 and "retry-after" in reply.headers:
            return "refused"
        if reply.status in (500, 503):
            return "failed"
        raise Unexpected(f"{reply.status}: {text}")

    async def _texts(self, session: aiohttp.ClientSession, count: int = 1, **body: Any) -> list[Any] | str:
        reply = await self._post(session, **body)
        if isinstance(reply, str):
            return reply
        if len(reply["choices"]) != count or any(choice["finish_reason"] is None for choice in reply["choices"]):
            raise Unexpected(str(reply))
        return reply["choices"]

    async def _plain(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        prompt = dice.choice(["shared prefix " * 12, "a ", "b" * 300]) + str(dice.randrange(1000))
        return _word(await self._texts(session, prompt=prompt, max_tokens=dice.randrange(1, 80)))

    async def _n(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        n = dice.choice([2, 3, 4])
        return _word(await self._texts(session, n, n=n, temperature=1.0))

    async def _logprobs(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        choices = await self._texts(session, logprobs=dice.randrange(6), max_tokens=10, ignore_eos=True)
        if not isinstance(choices, str) and len(choices[0]["logprobs"]["token_logprobs"]) != 10:
            raise Unexpected(str(choices))
        return _word(choices)

    async def _prompt_logprobs(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        return _word(await self._texts(session, echo=True, logprobs=2, max_tokens=4))

    async def _schema(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        choices = await self._texts(session, response_format=asked, max_tokens=100)
        if not isinstance(choices, str) and choices[0]["finish_reason"] == "stop":
            json.loads(choices[0]["text"])
        return _word(choices)

    async def _regex(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        digits = dice.randrange(1, 9)  # a few grammars over and over, as clients do
        choices = await self._texts(session, structured_outputs={"regex": f"[0-9]{{{digits}}}"})
        if not isinstance(choices, str) and not (choices[0]["text"].isdecimal() and len(choices[0]["text"]) == digits):
            raise Unexpected(str(choices))
        return _word(choices)

    async def _adapter(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        return _word(await self._texts(session, model=dice.choice(["first", "second"])))

    async def _stop(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        return _word(await self._texts(session, 2, stop=["e", "<300>"], max_tokens=60, n=2, temperature=1.0))

    async def _wrong(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        body = dice.choice([{"n": 0}, {"prompt": "x" * 5000}, {"top_p": 7}, {"model": "nobody"}, {"stop": [""]}])
        try:
            reply = await self._post(session, **body)
        except Unexpected as error:
            if str(error).startswith(("400", "404")):
                return "served"
            raise
        if isinstance(reply, str):
            return reply
        raise Unexpected(f"{body} was served")

    async def _chat(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        messages = [{"role": "user", "content": f"Hello {dice.randrange(100)}"}]
        return _word(await self._texts(session, path="/v1/chat/completions", messages=messages))

    async def _chat_stream(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        messages = [{"role": "user", "content": f"Hello {dice.randrange(100)}"}]
        body = {"messages": messages, "stream": True, "max_tokens": 24}
        async with session.post("/v1/chat/completions", json=body) as reply:
            text = await reply.text()
        assert_no_leak(text)
        if reply.status == 200 and text.endswith("data: [DONE]\n\n"):
            return "failed" if '"error"' in text else "served"
        return (
            "failed" if reply.status in (500, 503) else "refused" if reply.status == 429 else f"{reply.status}: {text}"
        )

    async def _stream(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        return await self._streamed(
            session, prompt=f"stream {dice.randrange(50)}", max_tokens=60, n=dice.choice([1, 2])
        )

    async def _streamed(self, session: aiohttp.ClientSession, **body: Any) -> str:
        result = Streamed()
        async with session.post("/v1/completions", json={"stream": True} | body) as reply:
            if reply.status != 200:
                return "refused" if reply.status == 429 else "failed"
            async for line in reply.content:
                result.take(line.decode().rstrip("\n"))
        if not result.is_done:
            raise Unexpected("a stream without an end")
        if not result.errors and len(result.reasons) != body.get("n", 1):
            raise Unexpected("a choice without an end")
        return "failed" if result.errors else "served"

    async def _hang_up(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        try:
            async with asyncio.timeout(dice.expovariate(10)):
                return await self._streamed(session, prompt="gone soon", max_tokens=400, ignore_eos=True)
        except TimeoutError:
            return "served"

    async def _golden(self, session: aiohttp.ClientSession, dice: random.Random) -> str:
        choices = await self._texts(session, **GOLDEN)
        if not isinstance(choices, str) and choices[0]["token_ids"] != self._server.golden:
            raise Unexpected(f"the golden request says {choices[0]['token_ids']}, not {self._server.golden}")
        return _word(choices)


def _word(reply: list[Any] | str) -> str:
    return reply if isinstance(reply, str) else "served"
