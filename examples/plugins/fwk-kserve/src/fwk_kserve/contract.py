"""The contract of dialects, with KServe's requests."""

from __future__ import annotations

import json

from fwk.testing import Call, DialectSuite, Reply

PATH = "/v2/models/tiny/generate"
BODY = {"text_input": "Hi", "parameters": {"max_tokens": 64}}


class TestKServe(DialectSuite):
    plugin = "kserve"
    generates = (Call("POST", PATH, BODY), Call("POST", PATH, {"text_input": "Hi"}))
    streams = (Call("POST", f"{PATH}_stream", BODY),)
    wrong = (
        Call("POST", PATH, {}),
        Call("POST", PATH, {"text_input": 3}),
        Call("POST", PATH, {"text_input": "Hi", "parameters": {"bad": 1}}),
        Call("POST", PATH, {"text_input": "Hi", "parameters": {"temperature": -1}}),
    )

    def text_of(self, call: Call, reply: Reply) -> str:
        if not call.path.endswith("_stream"):
            return reply.json()["text_output"]
        events = [line.removeprefix("data: ") for line in reply.body.decode().split("\n\n") if line]
        return "".join(json.loads(event)["text_output"] for event in events)
