"""The contract of the family, run by the package's tests and by ``fwk plugins test mine``."""

from __future__ import annotations

import json

from fwk.testing import Call, DialectSuite, Reply

PATH = "/mine/generate"


class TestMine(DialectSuite):
    plugin = "mine"
    generates = (Call("POST", PATH, {"prompt": "Hi"}),)
    streams = (Call("POST", PATH, {"prompt": "Hi", "stream": True}),)
    wrong = (Call("POST", PATH, {}), Call("POST", PATH, {"prompt": 3}), Call("POST", PATH, {"prompt": "", "x": 1}))

    def text_of(self, call: Call, reply: Reply) -> str:
        return "".join(json.loads(line)["text"] for line in reply.body.decode().splitlines())
