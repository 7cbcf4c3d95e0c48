"""Check 25: a KV cache of 64 blocks. What can never fit is refused at once; all else is served, with the same words."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.helpers.client import Streamed, connect, together
from tests.helpers.rig import NOISE, Server
from tests.helpers.servers import Start

NUM_BLOCKS, BLOCK = 64, 16
POOL = NUM_BLOCKS * BLOCK
NUM_GROWING, GROWN = 32, 100

FLAGS = {
    "fake": ("--executor", "fake", "--fake-blocks", str(NUM_BLOCKS), "--fake-step-ms", "0"),
    "tiny": ("--max-total-tokens", str(POOL)),
    "tiny-chunks": ("--max-total-tokens", str(POOL), "--chunked-prefill-size", "24", "--prefix-cache", "none"),
}
TINY = [name for name in FLAGS if name != "fake"]


@pytest.fixture(scope="module", params=["fake", *(pytest.param(name, marks=pytest.mark.sweep) for name in TINY)])
def pool(spawn: Start, request: pytest.FixtureRequest) -> Server:
    """A server with 64 blocks for requests of up to 2048 tokens."""
    return spawn(*FLAGS[request.param])


@pytest.mark.sweep
async def test_larger_than_the_pool(pool: Server) -> None:
    steps = pool.stats()["steps"]
    async with connect(pool) as client:
        for body in (
            {"prompt": "A" * (POOL - 1), "max_tokens": 2},
            {"prompt": "A" * POOL, "max_tokens": 1},
            {"prompt": "A", "max_tokens": POOL},
            {"prompt": "A", "max_tokens": 1500, "n": 3},
            {"prompt": ["A", "A" * POOL], "max_tokens": 1},
        ):
            started = time.monotonic()
            error = await client.refused(body)
            assert time.monotonic() - started < 1 + NOISE
            assert error["param"].startswith(("prompt", "max_tokens")), error
            await client.refused(body | {"stream": True})
    assert pool.stats()["steps"] == steps
    pool.check_invariants()


@pytest.mark.sweep
@pytest.mark.parametrize(("length", "max_tokens"), [(POOL - 1, 1), (POOL // 2, POOL // 2)])
async def test_exactly_full(pool: Server, length: int, max_tokens: int) -> None:
    async with connect(pool) as client:
        (ids,) = await client.complete(prompt=[65] * length, max_tokens=max_tokens, ignore_eos=True)
        assert len(ids) == max_tokens
        both = [client.complete(prompt=[66] * length, max_tokens=max_tokens, ignore_eos=True) for _ in range(2)]
        one, other = await together(both)  # neither fits alongside the other, once grown
    assert one == other
    pool.check_invariants()


@pytest.mark.sweep
async def test_growing_together(pool: Server) -> None:
    """Each alone fits; grown, all of them would need four pools."""
    requests = [
        {"prompt": f"request {i} grows " * 2, "max_tokens": GROWN, "ignore_eos": True} for i in range(NUM_GROWING)
    ]
    async with connect(pool) as client:
        alone = [(await client.complete(**body))[0] for body in requests]
        before = pool.stats()
        streams: list[Streamed] = await together(client.stream(**body) for body in requests)
    for stream, ids in zip(streams, alone, strict=True):
        assert (stream.is_done, stream.errors, stream.reasons) == (True, [], {0: "length"})
        assert stream.token_ids[0] == ids
    pool.check_invariants()
    after = pool.stats()
    preempted = after["preemptions"] - before["preemptions"]
    assert 0 < preempted <= 4 * NUM_GROWING, "either nothing was tight, or the engine thrashes"
    steps = after["steps"] - before["steps"]
    assert steps < NUM_GROWING * GROWN, "no faster than one after the other"


@pytest.mark.sweep
async def test_choices_grow_together(pool: Server) -> None:
    body: dict[str, Any] = {"prompt": "eight choices", "max_tokens": 150, "n": 8, "seed": 3, "ignore_eos": True}
    body |= {"temperature": 0.7}
    async with connect(pool) as client:
        first = await client.complete(**body)
        again, _ = await together([client.complete(**body), client.complete(prompt="alongside", max_tokens=300)])
    assert len(first) == 8
    assert again == first
    pool.check_invariants()
