"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

import json
from typing import Any

from fwk.testing import Call, DialectSuite, Reply

PATH = "/mine/generate"


class TestMine(DialectSuite):
    plugin = "mine"
    generates = (Call("POST", PATH, {"prompt": "Hi"}),)
    streams = (Call("POST", PATH, {"prompt": "Hi", "stream": True}),)
    wrong = (Call("POST", PATH, {}), Call("POST", PATH, {"prompt": 3}), Call("POST", PATH, {"prompt": "", "x": 1}))

    served_path = PATH
    served_request = {"prompt": "Hello", "max_tokens": 4}

    def check_served(self, url: str, reply: Any) -> None:
        assert reply["text"]

    def text_of(self, call: Call, reply: Reply) -> str:
        return "".join(json.loads(line)["text"] for line in reply.body.decode().splitlines())
