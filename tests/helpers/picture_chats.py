"""Chats about pictures, as clients send them to a server."""

from __future__ import annotations

import base64
from typing import Any

import httpx
from PIL import Image

from tests.helpers.images import encoded
from tests.helpers.rig import Server

COUNT = 10
ROUTE = "/v1/chat/completions"


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(image: Any, **settings: Any) -> dict[str, Any]:
    url = url_of(encoded(image, **settings)) if isinstance(image, Image.Image) else image
    return {"type": "image_url", "image_url": {"url": url}}


def said(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]}


def body(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    settings = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "tiny", "messages": list(messages), **settings, **more}


def post(server: Server, given: dict[str, Any], route: str = ROUTE) -> httpx.Response:
    return httpx.post(server.url + route, json=given, timeout=120)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]
