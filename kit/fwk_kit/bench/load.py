"""The load itself: streamed requests to an OpenAI server, and what came back when."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fwk.errors import ConfigError
from fwk_http.clients import Allowance, BadReply, check_encoding
from fwk_kit.bench.workload import Asked, Workload

try:
    import aiohttp
except ImportError:  # an extra
    raise ConfigError("fwk bench needs aiohttp: pip install 'fwk[bench]'") from None

REPLY_SECONDS = 600.0
BYTES_PER_SECOND = 16.0
MAX_REPLY_BYTES = 64 * 2**20
MAX_LINE_BYTES = 2**20
MODELS_SECONDS = 60.0
MAX_MODELS_BYTES = 4 * 2**20


@dataclass
class Reply:
    """What became of one request. Times are in seconds of ``time.perf_counter``."""

    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list[float])
    """When each piece of text came."""
    num_input: int = 0
    num_output: int = 0
    text: str = ""
    error: str | None = None
    is_valid: bool | None = None
    """Whether a constrained answer fits its schema's properties; None when nothing was asked."""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first; None for a single one."""
        return (self.times[-1] - self.times[0]) / (self.num_output - 1) if self.num_output > 1 else None

    @property
    def latency(self) -> float:
        """Seconds to the end."""
        return self.ended - self.sent


async def run(url: str, workload: Workload, asked: list[Asked], key: str | None = None) -> tuple[list[Reply], float]:
    """Send everything as the workload says; the replies in order, and the seconds it took altogether."""
    gate = asyncio.Semaphore(workload.concurrency)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with _session(headers, connector) as session:
        started = time.perf_counter()

        async def one(item: Asked) -> Reply:
            await asyncio.sleep(item.at - (time.perf_counter() - started))
            if workload.rate is not None:  # an open loop: those who arrive do not wait for each other
                return await send(session, url, item)
            async with gate:
                return await send(session, url, item)

        replies = await asyncio.gather(*map(one, asked))
        return replies, time.perf_counter() - started


async def send(session: aiohttp.ClientSession, url: str, item: Asked) -> Reply:
    """Stream one request; an error is noted, not raised."""
    reply = Reply(time.perf_counter())
    try:
        asked = session.post(url.rstrip("/") + item.path, json=item.body, allow_redirects=False)
        async with await asyncio.wait_for(asked, REPLY_SECONDS) as response:
            if response.status != 200:
                reply.error = f"{response.status}: {(await response.content.read(4096)).decode(errors='replace')[:300]}"
            else:
                check_encoding(response.headers)
                allowed = Allowance(MAX_REPLY_BYTES, REPLY_SECONDS, BYTES_PER_SECOND)
                begun = b""
                async for piece in response.content.iter_any():
                    allowed.take(len(piece))
                    *lines, begun = (begun + piece).split(b"\n")
                    for line in lines:
                        _take(reply, line)
                    if len(begun) > MAX_LINE_BYTES:
                        raise BadReply(f"it sent a line of more than {MAX_LINE_BYTES} bytes")
    except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.ended = time.perf_counter()
    if reply.error is None and not reply.times:
        reply.error = "no text came"
    reply.num_output = reply.num_output or len(reply.times)
    reply.num_input = reply.num_input or item.input_len
    if item.schema is not None and reply.error is None:
        reply.is_valid = fits(reply.text, item.schema)
    return reply


async def served_model(url: str, key: str | None = None) -> str:
    """The first model a server says it serves. Raises ``ConfigError`` when it says none."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with (
            asyncio.timeout(MODELS_SECONDS),
            _session(headers) as session,
            session.get(f"{url}/v1/models", allow_redirects=False) as response,
        ):
            check_encoding(response.headers)
            allowed, body = Allowance(MAX_MODELS_BYTES, MODELS_SECONDS), b""
            async for piece in response.content.iter_any():
                allowed.take(len(piece))
                body += piece
            return str(json.loads(body)["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ConfigError(f"{url}/v1/models does not name a model ({error}): give --model") from None


def _session(headers: Mapping[str, str], connector: aiohttp.TCPConnector | None = None) -> aiohttp.ClientSession:
    """Which neither asks for compressed replies nor unpacks them, and waits so long for the next bytes."""
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_read=REPLY_SECONDS),
        headers={"Accept-Encoding": "identity", **headers},
        auto_decompress=False,
    )


def _take(reply: Reply, line: bytes) -> None:
    """One line of server-sent events."""
    if not line.startswith(b"data:") or line.strip() == b"data: [DONE]":
        return
    now = time.perf_counter()
    event: dict[str, Any] = json.loads(line[5:])
    if "error" in event:
        reply.error = str(event["error"])[:300]
    usage = event.get("usage")
    if usage:
        reply.num_input, reply.num_output = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
    for choice in event.get("choices") or ():
        piece = choice["text"] if "text" in choice else choice.get("delta", {}).get("content")
        if piece:
            reply.times.append(now)
            reply.text += piece


def fits(text: str, schema: dict[str, Any]) -> bool:
    """Whether a constrained answer is JSON with the properties of its schema."""
    try:
        return set(json.loads(text)) == set(schema["properties"])
    except (ValueError, TypeError):
        return False
