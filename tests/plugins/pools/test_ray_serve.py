"""The application of Ray Serve: all of fwk's APIs, and another server where one has died."""

from __future__ import annotations

import contextlib
import importlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from pydantic import ValidationError
from tests.helpers.ray_cluster import local_ray, needs_ray
from tests.helpers.rig import GOLDEN, Server, until, write_model

from fwk_pools.ray import app


def missing() -> str | None:
    """What Ray Serve brings; Ray itself reads its environment when it is imported, so nothing of it is here."""
    if find_spec("grpc_reflection") is None:
        return "fwk_pools.ray:app needs Ray Serve: pip install 'ray[serve]'"
    return None


pytestmark = [
    needs_ray,
    pytest.mark.sweep,
    pytest.mark.filterwarnings("ignore"),  # Ray Serve's own
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=missing() or ""),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def url(model: Path) -> Iterator[str]:
    with local_ray():
        serve: Any = importlib.import_module("ray.serve")
        serve.start(http_options={"host": "127.0.0.1", "port": 0})
        words = {"served_model_name": "tiny", "load_format": "dummy", "max_total_tokens": "8192", "device": "cpu"}
        serve.run(app({"model": str(model), **words}), route_prefix="/")
        try:
            yield f"http://127.0.0.1:{port_of(serve)}"
        finally:
            serve.shutdown()


def port_of(serve: Any) -> int:
    """Of its proxy, which listens for HTTP."""
    own = {process.pid for process in psutil.Process().children(recursive=True)}
    listening: list[Any] = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    [port] = {
        one.laddr.port
        for one in listening
        if one.pid in own and "ProxyActor" in "".join(psutil.Process(one.pid).cmdline()) and answers(one.laddr.port)
    }
    return port


def answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/-/healthz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def servers() -> list[psutil.Process]:
    found: list[psutil.Process] = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that has ended meanwhile
            if one.cmdline()[1:4] == ["-m", "fwk", "serve"]:
                found.append(one)
    return found


def test_it_serves_what_a_server_alone_serves_and_comes_back(url: str, model: Path) -> None:
    alone = Server(model)
    alone.wait_ready()
    golden = alone.post(GOLDEN).json()["choices"][0]["token_ids"]
    alone.close()

    def tokens() -> list[int] | None:
        reply = httpx.post(f"{url}/v1/completions", json=GOLDEN, timeout=60)
        return reply.json()["choices"][0]["token_ids"] if reply.status_code == 200 else None

    assert tokens() == golden
    with httpx.stream("POST", f"{url}/v1/completions", json=GOLDEN | {"stream": True}, timeout=60) as reply:
        lines = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    assert [token for line in lines[:-1] for token in json.loads(line)["choices"][0]["token_ids"]] == golden
    assert httpx.post(f"{url}/v1/completions", json={"max_tokens": 4}).status_code == 400
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
    [first] = servers()
    first.kill()
    until(lambda: [one.pid for one in servers()] not in ([], [first.pid]), 30, "another server is started", pause=0.2)
    until(lambda: tokens() == golden, 30, "it serves", pause=0.2)
    [second] = servers()
    replica = second.parent()
    assert replica is not None
    replica.kill()
    gone, _ = psutil.wait_procs([second], timeout=60)
    assert gone, "the server of a dead replica is left"
    until(lambda: tokens() == golden, 30, "another replica serves", pause=0.2)


def test_words_that_cannot_be() -> None:
    with pytest.raises(ValidationError, match="max_replicas"):
        app({"max_replicas": "none"})
