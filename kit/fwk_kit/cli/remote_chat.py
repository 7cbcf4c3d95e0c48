"""Answers from a server that speaks OpenAI's API, for ``fwk chat --url``."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from fwk.errors import RequestFailed
from fwk_http.clients import Allowance, BadReply, pieces_of

CONNECT_SECONDS = 20
SECONDS = 600.0
"""In which a server has to begin its answer, and to bring the next piece."""

BYTES_PER_SECOND = 16.0
"""On average, after that: a token in ten seconds."""

MAX_REPLY_BYTES = 256 * 2**20
MAX_LINE_BYTES = 2**20
MAX_ERROR_BYTES = 2**16


def remote(address: str, key: str | None, model: str | None) -> Callable[[Any, dict[str, Any]], Iterator[str]]:
    """A function from messages and sampling fields to the pieces of an answer."""
    url = _split(address)
    connect = _connection_of(url)

    def answer(messages: Any, sampling: dict[str, Any]) -> Iterator[str]:
        body = {"messages": messages, "stream": True, **sampling, **({"model": model} if model else {})}
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        connection = connect(url.netloc, timeout=SECONDS)
        try:
            path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(_error_of(response.read(MAX_ERROR_BYTES)) or f"HTTP {response.status}")
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailed(f"{address}: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise RequestFailed(f"{address}: its answer is not that of an OpenAI server") from None
        finally:
            connection.close()

    return answer


def reach(address: str) -> None:
    """Raise ``RequestFailed`` for an address at which nothing listens."""
    url = _split(address)
    try:
        connection = _connection_of(url)(url.netloc, timeout=CONNECT_SECONDS)
        connection.connect()
        connection.close()
    except (OSError, http.client.InvalidURL) as error:
        raise RequestFailed(f"{address}: {error}: start a server with fwk serve, or leave --url out") from None


def _split(address: str) -> urllib.parse.SplitResult:
    return urllib.parse.urlsplit(address if "//" in address else f"http://{address}")


def _connection_of(url: urllib.parse.SplitResult) -> type[http.client.HTTPConnection]:
    return http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in _lines(pieces_of(response, Allowance(MAX_REPLY_BYTES, SECONDS, BYTES_PER_SECOND))):
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise RequestFailed(event["error"].get("message", "the server reported an error"))
        for choice in event.get("choices", []):
            yield choice["delta"].get("content") or ""


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Of a reply: a line holds what one token adds."""
    begun = b""
    for piece in pieces:
        *lines, begun = (begun + piece).split(b"\n")
        yield from lines
        if len(begun) > MAX_LINE_BYTES:
            raise BadReply(f"it sent a line of more than {MAX_LINE_BYTES} bytes")
    if begun:
        yield begun


def _error_of(body: bytes) -> str | None:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
