"""Check 3: every number a request may hold, at and past its limits, at the real server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fwk.types.sampling import MAX_LOGPROBS, MAX_N
from tests.helpers.client import connect, together
from tests.helpers.rig import Server
from tests.helpers.servers import Start

CONTEXT = 256
PROMPT = "Hi"
ROOM = CONTEXT - len(PROMPT)
I31, I63 = 2**31, 2**63

# field: lowest, highest. What the request must hold besides for the limits to be met is in COMPANIONS.
INTEGERS: dict[str, tuple[int, int]] = {
    "n": (1, MAX_N),
    "best_of": (1, MAX_N),
    "top_k": (-1, I31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "max_tokens": (1, ROOM),
    "min_tokens": (0, ROOM),
    "seed": (-I63, I63 - 1),
    "priority": (-I31, I31 - 1),
}
FLOATS: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
COMPANIONS = {
    "best_of": lambda value: {"n": value},
    "min_tokens": lambda value: {"max_tokens": max(value, 1)},
    "max_tokens": lambda value: {"stop": ["<"]},  # one in two ids of the tiny model has a name with "<"
}


@pytest.fixture(scope="module")
def tiny(spawn: Start) -> Server:
    """With a short context, so that requests at its limit are quick."""
    return spawn("--context-length", str(CONTEXT))


def body(field: str, literal: str, **more: Any) -> bytes:
    """A request in which ``field`` is written exactly so."""
    fields = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0.5} | more
    fields.pop(field, None)
    text = json.dumps(fields)
    return f'{text[:-1]}, "{field}": {literal}}}'.encode()


@pytest.mark.gate(8)
@pytest.mark.parametrize("field", [*INTEGERS, *FLOATS])
async def test_at_the_limits_is_served(tiny: Server, field: str) -> None:
    low, high = INTEGERS.get(field) or FLOATS[field]
    async with connect(tiny) as client:
        for value in {low, high, *([0] if low <= 0 <= high else [])}:
            companions = COMPANIONS[field](value) if field in COMPANIONS else {}
            status, reply = await client.post(body(field, json.dumps(value), **companions))
            assert status == 200, (value, reply)
            assert len(reply["choices"]) == (value if field in ("n", "best_of") else 1)
            if field == "min_tokens":
                assert reply["usage"]["completion_tokens"] == max(value, 1)


async def test_extreme_settings_together_harm_no_neighbour(tiny: Server) -> None:
    extreme = {"temperature": 100, "top_p": 5e-324, "top_k": I31 - 1, "min_p": 1, "repetition_penalty": 1e3}
    extreme |= {"presence_penalty": -2, "frequency_penalty": 2, "logit_bias": {"0": -100, "511": 100}}
    tinier = {"temperature": 5e-324, "repetition_penalty": 1e-3, "logit_bias": {"7": 100}, "seed": -I63}
    async with connect(tiny) as client:
        alone = await client.complete(prompt="a neighbour", max_tokens=20)
        requests = [{"prompt": "x", "max_tokens": 20, "n": 4} | settings for settings in (extreme, tinier)] * 2
        neighbours = [client.complete(prompt="a neighbour", max_tokens=20) for _ in range(4)]
        replies = await together([*(client.post(request) for request in requests), *neighbours])
    assert {status for status, _ in replies[:4]} == {200}, replies[:4]
    assert replies[4:] == [alone] * 4


def test_the_server_is_as_before(tiny: Server) -> None:
    tiny.check_invariants()
