"""Plugins exchanged over HTTP while requests run, on two engines: nobody is lost, everybody knows."""

from __future__ import annotations

import asyncio
import signal
from typing import Any

import httpx
import pytest

from tests.helpers.client import connect, together
from tests.helpers.http import NO_TLS
from tests.helpers.rig import FAKE, Server, until
from tests.helpers.servers import Start

KEY = "the-administrators"
NUM_REQUESTS = 80
NUM_TOKENS = 20

SWITCHES: list[dict[str, Any]] = [
    {"family": "schedulers", "name": "sjf", "options": {"sjf_aging": 5}},
    {"family": "schedulers", "name": "fair"},
    {"family": "observers", "name": "prometheus", "enabled": False},
    {"family": "schedulers", "name": "priority"},
    {"family": "dialects", "name": "tgi", "enabled": False},
    {"family": "tool_parsers", "name": "hermes"},
    {"family": "observers", "name": "prometheus"},
    {"family": "schedulers", "name": "dfs-weight"},
    {"family": "dialects", "name": "tgi"},
    {"family": "schedulers", "name": "sla", "options": {"sla_tiers": ["gold=0.5"]}},
]


@pytest.fixture(scope="module")
def two(spawn: Start) -> Server:
    """Two engines without a model, and an administrator."""
    return spawn(*FAKE, "--fake-step-ms", "2", "--data-parallel-size", "2", "--admin-api-key", KEY)


def switch(server: Server, key: str = KEY, **order: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}/plugins/switch", json=order, headers=headers, timeout=30, verify=NO_TLS)


@pytest.mark.sweep
async def test_switching_under_load_loses_no_request(two: Server) -> None:
    bodies = [
        {"prompt": f"request {i % 40}", "max_tokens": NUM_TOKENS, "priority": i % 50} for i in range(NUM_REQUESTS)
    ]
    before = two.get("/server_info").json()
    async with connect(two) as client:
        expected = [await client.complete(**body) for body in bodies[:40]]

        async def switch_all() -> None:
            for order in SWITCHES * 2:
                await asyncio.sleep(0.05)
                reply = await asyncio.to_thread(switch, two, **order)
                assert reply.status_code == 200, reply.text

        *answers, _ = await together([*(client.complete(**body) for body in bodies), switch_all()])
    assert answers == [expected[i % 40] for i in range(NUM_REQUESTS)]
    info = two.get("/server_info").json()
    assert info["engine"]["schedule_policy"] == info["chosen"]["schedulers"] == "sla"
    assert info["plugin_options"] == before["plugin_options"] | {"schedulers.sla": {"sla_tiers": ["gold=0.5"]}}
    assert info["chosen"]["tool_parsers"] == "hermes"
    assert info["fingerprint"] == before["fingerprint"], "what is installed is the same"
    assert info["active_fingerprint"] != before["active_fingerprint"], "what is used is not"
    assert two.log.count("schedulers.sla was switched on") == 2 * 2 + 2, "twice in each engine, and by the server"
    two.check_invariants()


@pytest.mark.sweep
def test_routes_come_and_go(two: Server) -> None:
    body = {"inputs": "Hi", "parameters": {"max_new_tokens": 2}}
    assert two.post(body, "/generate").status_code == 200
    switch(two, family="dialects", name="tgi", enabled=False)
    assert two.post(body, "/generate").status_code == 404
    switch(two, family="dialects", name="tgi")
    assert two.post(body, "/generate").status_code == 200
    two.check_invariants()


@pytest.mark.sweep
def test_what_cannot_be_switched(two: Server) -> None:
    reply = switch(two, family="attention", name="torch")
    assert reply.status_code == 400
    assert "restart with --attention-backend torch" in reply.json()["error"]["message"]
    for order in (
        {"family": "schedulers", "name": "sjf", "options": {"sjf_aging": -1}},
        {"family": "schedulers", "name": "nobody"},
        {"family": "schedulers"},
        {"family": "schedulers", "name": "sjf", "more": 1},
    ):
        assert switch(two, **order).status_code == 400
    two.check_invariants()


@pytest.mark.sweep
def test_only_the_administrator_switches(two: Server) -> None:
    order = {"family": "schedulers", "name": "fcfs"}
    assert two.post(order, "/plugins/switch").status_code == 401
    for key in ("wrong", KEY + "2"):
        assert switch(two, key, **order).status_code == 401


def test_an_administrators_request_that_names_another_model_does_nothing(two: Server) -> None:
    """In every route that is the administrator's alone, be it core's or a plugin's, with one model as with several."""
    own = two.get("/v1/models").json()["data"][0]["id"]
    admin = {"authorization": f"Bearer {KEY}"}
    seen: set[str] = set()
    for path, methods in two.get("/openapi.json").json()["paths"].items():
        for method in methods if "{" not in path else ():
            url = two.url + path
            if httpx.request(method, url, timeout=30, verify=NO_TLS).status_code != 401:
                continue
            seen.add(path)
            for query in ("?model=lost", f"?model={own}x", "?x=1&model=&model=lost"):
                reply = httpx.request(method, url + query, headers=admin, timeout=30, verify=NO_TLS)
                assert reply.status_code == 404, (path, query, reply.text)
                assert "nothing was done" in reply.text, (path, query, reply.text)
            served = httpx.request(method, f"{url}?model={own}", headers=admin, timeout=30, verify=NO_TLS)
            assert "nothing was done" not in served.text, (path, served.text)
    assert seen > {"/plugins/switch", "/update_weights_from_disk", "/load_lora_adapter"}


def test_without_an_administrator_there_is_no_such_route(fake: Server) -> None:
    assert switch(fake, family="schedulers", name="fcfs").status_code == 404


async def finishing_order(server: Server) -> list[int]:
    """In which order requests of rising priority end that came one by one while another one held the only place."""
    order: list[int] = []
    async with connect(server) as client:

        async def ask(priority: int, max_tokens: int) -> None:
            await client.complete(prompt=f"{priority}", max_tokens=max_tokens, priority=priority)
            order.append(priority)

        tasks = [asyncio.create_task(ask(99, 1900))]
        for priority in (1, 2, 3):
            await asyncio.sleep(0.03)
            tasks.append(asyncio.create_task(ask(priority, 2)))
        await asyncio.gather(*tasks)
    assert order[0] == 99
    return order[1:]


@pytest.mark.sweep
async def test_what_was_switched_outlives_the_engine(spawn: Start) -> None:
    """A policy and a logits processor, of a real worker: seen in what requests get before and after its engine dies."""
    server = spawn("--max-running-requests", "1", "--health-monitor", "--admin-api-key", KEY)
    body = {"prompt": "x", "max_tokens": 4, "return_token_ids": True, "ignore_eos": True}

    def said() -> list[int]:
        return server.post(body).json()["choices"][0]["token_ids"]

    assert await finishing_order(server) == [1, 2, 3]
    assert said() != [77] * 4
    assert switch(server, family="schedulers", name="priority").status_code == 200
    order = {"family": "logits_processors", "name": "favour", "options": {"favour_token": 77}}
    assert switch(server, **order).status_code == 200
    assert (await finishing_order(server), said()) == ([3, 2, 1], [77] * 4)
    before = server.get("/server_info").json()
    server.signal_engine(signal.SIGKILL)
    until(lambda: "serves again" in server.log and server.health() == 200, 30, "another engine")
    assert (await finishing_order(server), said()) == ([3, 2, 1], [77] * 4)
    after = server.get("/server_info").json()
    assert after["chosen"]["schedulers"] == "priority"
    assert after["active_fingerprint"] == before["active_fingerprint"]
