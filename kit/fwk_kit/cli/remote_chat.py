"""Answers from a server that speaks OpenAI's API, for ``fwk chat --url``."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Callable, Iterator
from typing import Any

from fwk.errors import RequestFailed

CONNECT_SECONDS = 20


def remote(address: str, key: str | None, model: str | None) -> Callable[[Any, dict[str, Any]], Iterator[str]]:
    """A function from messages and sampling fields to the pieces of an answer."""
    url = _split(address)
    connect = _connection_of(url)

    def answer(messages: Any, sampling: dict[str, Any]) -> Iterator[str]:
        body = {"messages": messages, "stream": True, **sampling, **({"model": model} if model else {})}
        headers = {"content-type": "application/json"}
        if key:
            headers["authorization"] = f"Bearer {key}"
        connection = connect(url.netloc, timeout=600)
        try:
            path = url.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != 200:
                raise RequestFailed(_error_of(response.read()) or f"HTTP {response.status}")
            yield from _pieces(response)
        except OSError as error:
            raise RequestFailed(f"{address}: {error}") from None
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
    for line in response:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise RequestFailed(event["error"].get("message", "the server reported an error"))
        for choice in event.get("choices", []):
            yield choice["delta"].get("content") or ""


def _error_of(body: bytes) -> str | None:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
