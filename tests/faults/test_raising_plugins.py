"""Check 23: a step raises. Who can be blamed fails alone; otherwise the engine is dead at once, and says so."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.client import Client, connect, together
from tests.helpers.rig import Server, until
from tests.helpers.servers import Start

FAULTY = ("--executor", "faulty", "--schedule-policy", "faulty", "--sampling-backend", "faulty")
CHUNK = 32
SEEDS = 666_000
NUM_TOKENS = 30

NEIGHBOURS: list[dict[str, Any]] = [
    {"prompt": "greedy"},
    {"prompt": "sampled", "temperature": 0.8, "seed": 5},
    {"prompt": "penalised", "frequency_penalty": 1.0},
    {"prompt": "p" * 3 * CHUNK},
    {"prompt": "asks the same processor, which has no reason to fail it", "fault": "apply:9999"},
]


@pytest.fixture(scope="module")
def faulty(spawn: Start) -> Server:
    """The tiny model with pieces that fail on request; prompts are computed in chunks."""
    return spawn(*FAULTY, "--chunked-prefill-size", str(CHUNK))


@pytest.fixture(scope="module")
def expected(faulty: Server) -> list[list[int]]:
    """What the neighbours answer when nothing fails."""
    bodies = [{"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True} | body for body in NEIGHBOURS]
    return [faulty.post(body).json()["choices"][0]["token_ids"] for body in bodies]


async def beside_neighbours(client: Client, *bad: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """Answers of the bad requests and of the neighbours, all at once: some bad first, some last."""
    bodies = [{"prompt": "bad", "max_tokens": NUM_TOKENS, "temperature": 0} | body for body in bad]
    half = len(bodies) // 2
    results = await together(
        [
            *(client.post(body) for body in bodies[:half]),
            *(client.complete(max_tokens=NUM_TOKENS, **body) for body in NEIGHBOURS),
            *(client.post(body) for body in bodies[half:]),
        ]
    )
    end = half + len(NEIGHBOURS)
    return results[:half] + results[end:], [ids for (ids,) in results[half:end]]


@pytest.mark.gate(3)
@pytest.mark.parametrize("prompt", ["short", "l" * 5 * CHUNK])
@pytest.mark.parametrize("fault", ["add:1", "apply:1", "apply:2", "apply:17", "memory:5"])
async def test_a_processor_fails_the_request_that_asked(
    faulty: Server, expected: list[list[int]], fault: str, prompt: str
) -> None:
    async with connect(faulty) as client:
        failed, served = await beside_neighbours(client, {"fault": fault, "prompt": prompt})
        (status, body), streamed = failed[0], await client.stream(prompt=prompt, max_tokens=40, fault=fault)
    assert (status, body["error"]["type"]) == (500, "server_error"), body
    assert len(streamed.errors) == 1
    # Tokens that come together with the error are not shown.
    assert len(streamed.token_ids.get(0, [])) < int(fault.partition(":")[2])
    assert served == expected
    faulty.check_invariants(may_log_errors=True)


async def test_many_fail_at_different_steps(faulty: Server, expected: list[list[int]]) -> None:
    """Every step for a while has somebody to blame, and several at once."""
    faults = [{"fault": f"apply:{1 + i // 3}", "prompt": f"bad {i}"} for i in range(24)]
    faults += [{"fault": "add:1", "prompt": f"worse {i}"} for i in range(4)]
    async with connect(faulty) as client:
        failed, served = await beside_neighbours(client, *faults)
    assert [status for status, _ in failed] == [500] * len(faults)
    assert served == expected
    faulty.check_invariants(may_log_errors=True)


async def test_a_failing_request_with_several_choices(faulty: Server, expected: list[list[int]]) -> None:
    async with connect(faulty) as client:
        failed, served = await beside_neighbours(client, {"fault": "apply:5", "n": 4})
        streamed = await client.stream(prompt="bad", n=4, max_tokens=20, fault="apply:5")
    assert failed[0][0] == 500
    assert len(streamed.errors) == 1
    # The status tells of it if it came before the first tokens were sent.
    assert (streamed.status, streamed.is_done) in [(200, True), (500, False)]
    assert served == expected
    faulty.check_invariants(may_log_errors=True)


@pytest.mark.gate(1)
@pytest.mark.parametrize("call", ["arrived", "tokens", "finished", "step"])
async def test_an_observer_that_raises_is_told_nothing_more(
    faulty: Server, expected: list[list[int]], call: str
) -> None:
    async with connect(faulty) as client:
        for _ in range(2):
            (reply,), served = await beside_neighbours(client, {"request_id": f"observer:{call}"})
            assert reply[0] == 200
            assert served == expected
    faulty.check_invariants(may_log_errors=True)
    assert faulty.log.count(f"observer observers.faulty_{call} raised") == 1


@pytest.mark.gate(1)
@pytest.mark.parametrize("turn", [9, 1])
async def test_a_detokeniser_that_raises_fails_its_request(
    faulty: Server, expected: list[list[int]], turn: int
) -> None:
    """It runs in the API process, in the request's own task; the engine stops working for it."""
    fault = {"fault": f"detokenizer:{turn}", "max_tokens": 1500, "ignore_eos": True}
    before = faulty.stats()["generation_tokens"]
    async with connect(faulty) as client:
        failed, served = await beside_neighbours(client, fault, fault | {"n": 3})
        streamed = await client.stream(prompt="bad", **fault)
    assert [status for status, _ in failed] == [500, 500]
    assert {body["error"]["type"] for _, body in failed} == {"server_error"}
    assert len(streamed.errors) == 1
    assert served == expected
    faulty.check_invariants()  # and no traceback in the log
    computed = faulty.stats()["generation_tokens"] - before
    assert computed < 2 * 1500, "of five choices' 1500 tokens each, those that nobody could be told"


@pytest.mark.sweep
async def test_a_policy_that_raises_is_replaced(spawn: Start) -> None:
    server = spawn(*FAULTY, "--chunked-prefill-size", str(CHUNK))
    assert server.get("/health").json() == {"status": "ok"}
    async with connect(server) as client:
        failed, _ = await beside_neighbours(client, {"fault": "policy:3", "prompt": "p" * 6 * CHUNK})
    assert [status for status, _ in failed] == [200], "no request ends for it"
    (line,) = [line for line in server.log.splitlines() if " ERROR " in line]
    assert (
        "schedule policy 'faulty' (fwk-faults 1.0) failed in chunk: raised Fault; requests are served first come, first"
        in line
    )
    until(lambda: server.get("/health").json()["status"] == "degraded", 3, "health degraded")
    assert "failed in chunk" in (reason := server.get("/health").json()["reason"])
    assert "secret" not in reason
    server.check_invariants(may_log_errors=True)


async def test_a_sampler_that_raises_loses_a_step(faulty: Server, expected: list[list[int]]) -> None:
    """Who runs ends with it; the next requests find the engine, and no block that was not computed."""
    bad = {"seed": SEEDS + 9, "temperature": 1.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    async with connect(faulty) as client:
        neighbours = [client.stream(prompt=f"neighbour {i}", max_tokens=1500, ignore_eos=True) for i in range(4)]
        streams = await together([*neighbours, client.stream(prompt="bad", **bad)])
        assert all(len(stream.errors) == 1 for stream in streams), streams
        assert all("sampler 'faulty' (fwk-faults 1.0) raised Fault in sample" in str(s.errors) for s in streams)
        _, served = await beside_neighbours(client)
    assert served == expected
    faulty.check_invariants(may_log_errors=True)


# Nobody to blame: the whole engine.


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("bad", "num_before"),
    [
        ({"fault": "model:1"}, 0),
        ({"fault": "model:7"}, 6),
        ({"fault": "remove:1", "max_tokens": 5}, 5),
    ],
    ids=lambda value: "-".join(map(str, value.values()))[:16] if isinstance(value, dict) else "",
)
async def test_a_step_without_a_culprit_ends_the_engine(spawn: Start, bad: dict[str, Any], num_before: int) -> None:
    server = spawn(*FAULTY, "--chunked-prefill-size", str(CHUNK))
    async with connect(server) as client:
        neighbours = [client.stream(prompt=f"neighbour {i}", max_tokens=1500, ignore_eos=True) for i in range(4)]
        body = {"prompt": "bad", "max_tokens": NUM_TOKENS, "ignore_eos": True} | bad
        *others, streamed = await together([*neighbours, client.stream(**body)])
    assert all(len(stream.errors) == 1 for stream in others), others
    assert all(stream.is_done for stream in others if stream.status == 200)
    # Tokens that come together with the error are not shown.
    assert len(streamed.token_ids.get(0, [])) <= num_before
    until(lambda: server.health() == 503, 3, "health 503")
    (death,) = [line for line in server.log.splitlines() if " ERROR " in line]
    for part in (
        "engine dead: ",
        "a fault of the tests",
        "fwk_faults/",
        "ended with an error",
        "not started again",
    ):
        assert part in death, "what, why, where, and what was done about it"
    assert "Traceback" not in server.log
    until(lambda: server.engines(recursive=True) == [], 3, "the end of the engine process")
    assert server.stop() == 0
    assert not server.leftovers


@pytest.mark.sweep
async def test_a_request_cannot_ask_for_what_no_plugin_declares(fake: Server) -> None:
    async with connect(fake) as client:
        for value in ("nothing:1", "apply", 7, ["apply:1"], "apply:1; exit:1"):
            error = await client.refused({"prompt": "Hi", "fault": value})
            assert error["param"] == "fault"
    fake.check_invariants()
