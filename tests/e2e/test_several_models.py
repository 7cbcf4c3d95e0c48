"""Several models behind one address, served as users do: none of many mixed requests is lost."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.client import connect, together
from tests.helpers.rig import Server, until, write_model
from tests.helpers.servers import Start

KEY = "secret"


@pytest.fixture(scope="module")
def pair(spawn: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    """Two models of which one at a time has room: an engine takes about 0.3 GiB, and 0.5 are expected."""
    other = write_model(tmp_path_factory.mktemp("other") / "model")
    return spawn("--also", f"b={other}", "--models-memory-limit", "0.5", "--idle-timeout", "600", key=KEY)


def states(server: Server) -> dict[str, bool]:
    return {model["name"]: model["asleep"] for model in server.get("/server_info").json()["models"]}


@pytest.mark.sweep
async def test_two_hundred_mixed_requests(pair: Server) -> None:
    async with connect(pair) as client:
        bodies = [{"model": "tiny" if i % 3 else "b", "prompt": f"number {i}", "max_tokens": 6} for i in range(200)]
        found = await together([client.complete(**body) for body in bodies])
        again = [await client.complete(**body) for body in (bodies[3], bodies[4])]
    assert all(len(tokens) == 1 and len(tokens[0]) == 6 for tokens in found)
    assert again == [found[3], found[4]], "each model's own answer, asked alone"
    assert pair.log.count("needs its memory") >= 2
    metrics = pair.get("/metrics").text
    assert metrics.count("# TYPE fwk:generation_tokens_total") == 1
    assert {'model_name="tiny"', 'model_name="b"'} <= {
        line.partition("{")[2].partition("}")[0] for line in metrics.splitlines() if "generation_tokens_total{" in line
    }


@pytest.mark.sweep
def test_each_line_of_a_batch_is_answered_by_the_model_it_names(pair: Server) -> None:
    bodies = {name: {"prompt": "x", "max_tokens": 6, "temperature": 0} for name in ("tiny", "b", "c")}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": {"model": name, **body}}
        for name, body in bodies.items()
    ]
    with httpx.Client(base_url=pair.url, headers={"authorization": f"Bearer {KEY}"}, trust_env=False) as client:
        text = "\n".join(map(json.dumps, lines))
        file = client.post("/v1/files", files={"file": ("in.jsonl", text)}, data={"purpose": "batch"}).json()["id"]
        asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=asked).json()["id"]

        def found() -> dict[str, Any]:
            return client.get(f"/v1/batches/{batch}").json()

        until(lambda: found()["status"] == "completed", 120, "the batch is done")
        replies = client.get(f"/v1/files/{found()['output_file_id']}/content").text.splitlines()
        [refused] = client.get(f"/v1/files/{found()['error_file_id']}/content").text.splitlines()
    answers = {reply["custom_id"]: reply["response"]["body"] for reply in map(json.loads, replies)}
    for name in ("tiny", "b"):
        alone = pair.post({"model": name, **bodies[name]}).json()
        assert answers[name]["model"] == name
        assert answers[name]["choices"][0]["text"] == alone["choices"][0]["text"]
    assert json.loads(refused)["response"]["status_code"] == 404, "no model is called c"


def test_lists_and_names(pair: Server) -> None:
    listed = pair.get("/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["tiny", "b"]
    assert pair.get("/v1/models/b").json()["id"] == "b"
    assert [model["name"] for model in pair.get("/api/tags").json()["models"]] == ["tiny", "b"]
    reply = pair.post({"model": "c", "prompt": "x"})
    assert reply.status_code == 404
    assert "'tiny' and 'b' are" in reply.json()["error"]["message"]
    assert pair.post({"model": "b", "prompt": "x"}, headers={"authorization": "Bearer wrong"}).status_code == 401
    assert pair.get("/server_info?model=b").json()["served_model_name"] == "b"


@pytest.mark.sweep
def test_a_grammar_is_checked_though_the_engine_sleeps(spawn: Start, tiny_model: Path) -> None:
    server = spawn("--also", f"b={tiny_model}")
    assert states(server) == {"tiny": False, "b": True}
    wrong = server.post({"model": "b", "prompt": "x", "structured_outputs": {"regex": "("}})
    assert wrong.status_code == 400, wrong.text
    right = server.post({"model": "b", "prompt": "x", "structured_outputs": {"choice": ["yes"]}})
    assert right.json()["choices"][0]["text"] == "yes", right.text


@pytest.mark.sweep
async def test_an_engine_that_sleeps_answers_its_first_requests(spawn: Start) -> None:
    server = spawn("--idle-timeout", "2")

    def asleep() -> Any:
        return server.get("/server_info").json()["replicas"][0]["asleep"]

    until(asleep, 10, "it falls asleep")
    until(lambda: not server.engines(), 10, "its process has ended")
    assert server.get("/health").json() == {"status": "ok"}
    async with connect(server) as client:
        found = await asyncio.wait_for(together([client.complete(prompt=f"{i}", max_tokens=3) for i in range(8)]), 60)
    assert all(len(tokens[0]) == 3 for tokens in found)
    assert server.log.count("is loaded") == 1
