"""Check 7: grammars that are endless to compile, huge, or contradict the rest of their request."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

from tests.helpers.client import Client, HealthProbe, connect
from tests.helpers.rig import MAX_LAG, Server, until
from tests.helpers.servers import Start

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(900)]

SECONDS = 10.0
"""For what takes a fraction of one where nobody else wants the cores."""

ENDLESS = ".*" * 60_000


def body(regex: str, **more: Any) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 4, "structured_outputs": {"regex": regex}, **more}


async def ask(client: Client, request: dict[str, Any]) -> tuple[int, Any]:
    return await client.post(request)


def helper_of(server: Server) -> psutil.Process:
    return next(p for p in server.children() if "fwk.server.helper_process" in p.cmdline())


def warm(server: Server) -> None:
    reply = server.post(body("[ab]{2}"))
    assert reply.status_code == 200, reply.text
    server.settle()


@pytest.fixture(scope="module")
def patient(spawn: Start) -> Server:
    """A server that would let grammars compile for a minute. Its last test ends it."""
    server = spawn("--shutdown-timeout", "1", "--grammar-timeout", "60")
    warm(server)
    return server


async def test_an_endless_grammar_is_refused_and_holds_nobody_up(tiny: Server) -> None:
    warm(tiny)
    async with connect(tiny) as client:
        with HealthProbe(tiny, pause=0.05) as probe:
            bombs = [asyncio.create_task(ask(client, body(ENDLESS + "a" * i))) for i in range(8)]
            await asyncio.sleep(0.2)
            text = {"prompt": "word " * 300, "max_tokens": 1}
            assert (await ask(client, text))[0] == 200
            assert not all(bomb.done() for bomb in bombs), "tokenising waits for grammars"
            for status, reply in await asyncio.gather(*bombs):
                assert status == 400, reply
                assert reply["error"]["param"] == "structured_outputs.regex", reply
                assert "compiling the grammar takes more than" in reply["error"]["message"], reply
    assert probe.statuses <= {200}
    assert tiny.loop_times()["busy"] < MAX_LAG
    tiny.check_invariants()


async def test_a_client_that_hangs_up_ends_the_compiling(patient: Server) -> None:
    helper = helper_of(patient)
    async with connect(patient) as client:
        bomb = asyncio.create_task(ask(client, body(ENDLESS)))
        await asyncio.to_thread(until, helper.children, SECONDS, "a process that compiles")
        bomb.cancel()
        await asyncio.to_thread(until, lambda: not helper.children(), SECONDS, "the end of the process that compiles")
    patient.check_invariants()


async def test_many_grammars_take_bounded_memory(tiny: Server) -> None:
    warm(tiny)

    def memory() -> int:
        return sum(process.memory_info().rss for process in [psutil.Process(tiny.process.pid), *tiny.children()])

    before, most = memory(), 0
    async with connect(tiny) as client:
        for i in range(10):  # 165 MB each, if they were kept
            status, reply = await ask(
                client, body(f"((a{{1,{500 + i}}}.{{1,500}}){{1,50}}b.*){{1,50}}[ab]*a[ab]{{60}}")
            )
            assert status in (200, 400), reply
            most = max(most, memory())
    assert most - before < 300 * 2**20
    tiny.settle()
    tiny.check_invariants()


@pytest.mark.parametrize(
    "more",
    [{"allowed_token_ids": [ord("z")]}, {"bad_words": ["a", "b"]}, {"logit_bias": {"97": -100, "98": -100}}],
    ids=["allowed_token_ids", "bad_words", "logit_bias"],
)
async def test_a_contradiction_is_the_requests_fault(tiny: Server, more: dict[str, Any]) -> None:
    async with connect(tiny) as client:
        status, reply = await ask(client, body("[ab]{2}", **more))
    assert status in (200, 400), reply
    assert "logit_bias" in more or status == 400
    tiny.check_invariants(may_log_errors=False)


async def test_arguments_of_a_call_may_not_be_too_deep(tiny: Server) -> None:
    arguments = '{"a":' * 900 + "1" + "}" * 900
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": "1"},
    ]
    async with connect(tiny) as client:
        error = await client.refused({"messages": messages, "max_tokens": 1}, "/v1/chat/completions")
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


async def test_sigterm_ends_a_server_that_compiles(patient: Server) -> None:
    helper = helper_of(patient)
    async with connect(patient) as client:
        tasks = [asyncio.create_task(ask(client, body(ENDLESS + "a" * i))) for i in range(4)]
        await asyncio.to_thread(until, helper.children, SECONDS, "a process that compiles")
        assert await asyncio.to_thread(patient.stop, 1 + SECONDS) == 0
        await asyncio.gather(*tasks, return_exceptions=True)
