"""Check 4: ids outside the vocabulary are refused at the door, wherever they stand; neighbours notice nothing."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.helpers.client import Client, connect, together
from tests.helpers.rig import VOCAB, Server

OUTSIDE = [-1, VOCAB, VOCAB + 1, 2**15, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**31) - 1, -(2**63) - 1]

NEIGHBOURS: list[dict[str, Any]] = [
    {"prompt": "a plain neighbour"},
    {"prompt": "one with a bias", "logit_bias": {"5": 2, str(VOCAB - 1): -3}, "frequency_penalty": 0.5},
    {"prompt": "one that samples", "temperature": 0.9, "seed": 11, "top_k": 40, "presence_penalty": 1},
    {"prompt": "one on a short list", "allowed_token_ids": [1, 7, 100, VOCAB - 1], "bad_words": ["no"]},
]


def places(token_id: int) -> list[tuple[str, dict[str, Any]]]:
    """Requests with a wrong id in each place that takes ids, and the field to be named."""
    good = {"prompt": "Hi", "max_tokens": 4}
    return [
        ("prompt", good | {"prompt": [token_id]}),
        ("prompt", good | {"prompt": [1, 2, token_id, 3]}),
        ("prompt", good | {"prompt": [token_id], "echo": True}),
        ("prompt[1]", good | {"prompt": [[1, 2], [3, token_id]]}),
        ("logit_bias", good | {"logit_bias": {"3": 1, str(token_id): 1}}),
        ("stop_token_ids", good | {"stop_token_ids": [3, token_id]}),
        ("stop_token_ids", good | {"stop_token_ids": [token_id], "min_tokens": 2}),
        ("allowed_token_ids", good | {"allowed_token_ids": [token_id, 3]}),
    ]


async def neighbours(client: Client) -> list[Any]:
    return await together(client.complete(max_tokens=120, ignore_eos=True, **body) for body in NEIGHBOURS)


async def test_refused_beside_four_neighbours(tiny: Server) -> None:
    num_refused = 0
    async with connect(tiny) as client:
        alone = [await client.complete(max_tokens=120, ignore_eos=True, **body) for body in NEIGHBOURS]
        alongside = asyncio.create_task(neighbours(client))
        for token_id in OUTSIDE:
            for field, body in places(token_id):
                error = await client.refused(body)
                # Past what an integer of the wire holds, the element is named as "no token id" instead.
                assert error["param"].startswith(field.partition("[")[0]), (token_id, field, error)
                num_refused += 1
        while num_refused < 400 and not alongside.done():  # until the last neighbour has ended
            await client.refused(places(VOCAB)[num_refused % 8][1])
            num_refused += 1
        assert await alongside == alone
    tiny.check_invariants()


async def test_the_last_id_is_inside(tiny: Server) -> None:
    last = VOCAB - 1
    async with connect(tiny) as client:
        for body in [
            {"prompt": [0, last]},
            {"stop_token_ids": []},
            {"stop_token_ids": [0, last]},
            {"logit_bias": {str(last): 100}},
        ]:
            await client.complete(**{"prompt": "Hi", "max_tokens": 2} | body)
        assert await client.complete(prompt="Hi", max_tokens=2, allowed_token_ids=[last]) == [[last, last]]
        status, _ = await client.post({"tokens": [0, last]}, "/detokenize")
        assert status == 200
        for token_id in OUTSIDE:
            error = await client.refused({"tokens": [0, token_id]}, "/detokenize")
            assert error["param"].startswith("tokens")
