"""fwk behind SGLang's and vLLM's routers: workers that come and go, and prompts sent to where they are cached."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.rig import Server, until, write_model

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
MODULES = {"sglang-router": "sglang_router.launch_router", "vllm-router": "vllm_router.launch_router"}
READY_SECONDS = 30.0
BLOCK = 16


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Worker:
    """A server that tells routers of its blocks."""

    def __init__(self, model: Path) -> None:
        self.events = f"tcp://127.0.0.1:{free_port()}"
        self._model = model
        self.port = free_port()
        self.start()

    def start(self) -> None:
        events = json.dumps({"endpoint": self.events, "format": "map"})
        self.server = Server(
            self._model, "--port", str(self.port), "--page-size", str(BLOCK), "--kv-events-config", events
        )
        self.server.wait_ready()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def num_requests(self) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("fwk:request_success_total{"))


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Worker]]:
    model = write_model(tmp_path_factory.mktemp("model") / "tiny")
    found = [Worker(model) for _ in range(2)]
    yield found
    for worker in found:
        worker.server.close()


@pytest.fixture(params=sorted(MODULES))
def package(request: pytest.FixtureRequest) -> str:
    return request.param


Routed = Callable[..., Any]


@pytest.fixture
def routed(python_with: Callable[[str], Path], package: str, tmp_path: Path) -> Routed:
    """Starts the router; its client."""

    @contextmanager
    def run(*flags: str) -> Iterator[httpx.Client]:
        port, log = free_port(), tmp_path / "router.log"
        common = ["--port", str(port), "--host", "127.0.0.1", "--prometheus-port", str(free_port())]
        health = ["--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--log-level", "debug"]
        command = [str(python_with(package)), "-m", MODULES[package], *common, *health, *flags]
        with log.open("w") as file:
            process = subprocess.Popen(command, stdout=file, stderr=file, cwd=tmp_path)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False) as client:

                def is_ready() -> bool:
                    assert process.poll() is None, log.read_text()[-3000:]
                    try:
                        return client.get("/health").status_code == 200
                    except httpx.HTTPError:
                        return False

                until(is_ready, READY_SECONDS, "the router serves", pause=0.2)
                yield client
        finally:
            process.kill()
            process.wait(10)

    return run


def healthy(client: httpx.Client) -> set[str]:
    return {worker["url"] for worker in client.get("/workers").json()["workers"] if worker["is_healthy"]}


def joined(client: httpx.Client, workers: list[Worker]) -> None:
    """Wait until the router has asked all of them."""
    everyone = {worker.url for worker in workers}
    until(lambda: healthy(client) == everyone, READY_SECONDS, "all are registered", pause=0.2)


def complete(client: httpx.Client, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def cached(reply: dict[str, Any]) -> int:
    return reply["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_all_that_is_asked_of_workers_passes(routed: Routed, package: str, workers: list[Worker]) -> None:
    """The name of the model, texts, chats, streams, embeddings' refusal and errors: as without a router."""
    with routed("--policy", "round_robin", "--worker-urls", *(worker.url for worker in workers)) as client:
        joined(client, workers)
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["tiny"]
        with httpx.Client(base_url=workers[0].url, timeout=60) as direct:
            for prompt in ("One text", "Another text"):
                wanted = complete(direct, prompt)["choices"][0]["text"]
                assert [complete(client, prompt)["choices"][0]["text"] for _ in range(2)] == [wanted] * 2
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
            said = client.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
            assert said == direct.post("/v1/chat/completions", json=chat).json()["choices"][0]["message"]["content"]
        with client.stream("POST", "/v1/chat/completions", json=chat | {"stream": True}) as stream:
            events = [line.removeprefix("data: ") for line in stream.iter_lines() if line.startswith("data: ")]
        assert events[-1] == "[DONE]"
        deltas = [json.loads(event)["choices"] for event in events[:-1]]
        assert "".join(choice["delta"].get("content") or "" for [choice] in filter(None, deltas)) == said
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 5000})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "prompt"
        native = client.post("/generate", json={"text": "One text", "sampling_params": {"max_new_tokens": 2}})
        assert native.status_code == 200, native.text
        assert native.json()["meta_info"]["completion_tokens"] == 2


def test_a_prefix_stays_with_its_worker(routed: Routed, workers: list[Worker]) -> None:
    """``cache_aware``: each conversation's turns find their beginning cached, and not all of them at one worker."""
    before = [worker.num_requests() for worker in workers]
    with routed("--policy", "cache_aware", "--worker-urls", *(worker.url for worker in workers)) as client:
        joined(client, workers)

        def converse(number: int) -> None:
            text = f"{number}{letters(number)}"
            for turn in range(3):
                reply = complete(client, text)
                assert turn == 0 or cached(reply) >= len(text) // 2 // BLOCK * BLOCK
                text += letters(number + turn + 1)

        with ThreadPoolExecutor(8) as pool:  # at once: to one that is idle, a router always prefers the first
            list(pool.map(converse, range(8)))
    took = [worker.num_requests() - earlier for worker, earlier in zip(workers, before, strict=True)]
    assert sum(took) == 24
    assert all(took), "every conversation went to one worker"


def letters(number: int) -> str:
    """A hundred letters."""
    return chr(ord("a") + number % 26) * 50 + chr(ord("A") + number % 26) * 50


def test_workers_come_and_go(routed: Routed, package: str, workers: list[Worker]) -> None:
    """One is added while the router runs; killed, its share goes to the other; started anew, it serves again."""
    first, second = workers
    retries = ("--cb-failure-threshold", "1", "--cb-timeout-duration-secs", "1")
    with routed("--policy", "round_robin", "--worker-urls", first.url, *retries) as client:
        if package == "sglang-router":
            assert client.post("/workers", json={"url": second.url}).status_code == 202
        else:
            assert client.post("/add_worker", params={"url": second.url}).status_code == 200
        joined(client, workers)
        before = second.num_requests()
        for _ in range(4):
            complete(client, "x")
        assert second.num_requests() - before == 2
        second.server.process.kill()
        for _ in range(6):
            complete(client, "x")
        until(lambda: healthy(client) == {first.url}, READY_SECONDS, "it is seen to have gone", pause=0.2)
        second.server.close()
        second.start()
        joined(client, workers)

        def serves() -> bool:
            complete(client, "x")
            return second.num_requests() > 0

        until(serves, READY_SECONDS, "it serves again", pause=0.2)


@pytest.mark.parametrize("package", ["vllm-router"], indirect=True)
def test_events_tell_where_a_prompt_is_cached(routed: Routed, workers: list[Worker]) -> None:
    """``kv_aware``: a prompt that a worker has computed unseen by the router goes there, as a text and as a chat."""
    sources = [word for one in workers for word in ("--kv-event-source", f"{one.url}={one.events}")]
    flags = ("--policy", "kv_aware", "--kv-event-model", "tiny", "--kv-event-block-size", str(BLOCK), *sources)
    with routed(*flags, "--worker-urls", *(worker.url for worker in workers)) as client:
        joined(client, workers)
        for number in range(4):
            owner = workers[number % 2]
            text = f"event {number}: " + letters(number + 10)
            messages = [{"role": "user", "content": text}]
            chat = {"model": "tiny", "messages": messages, "max_tokens": 2, "ignore_eos": True}
            for ask in (complete_text(text), ("/v1/chat/completions", chat)):
                path, body = ask
                assert httpx.post(f"{owner.url}{path}", json=body, timeout=60).status_code == 200
                time.sleep(0.3)  # an event on its way to the router is told by nobody
                before = owner.num_requests()
                reply = client.post(path, json=body).json()
                assert owner.num_requests() == before + 1, "it went to the other worker"
                assert cached(reply) >= len(text) // BLOCK * BLOCK - BLOCK


def complete_text(text: str) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"model": "tiny", "prompt": text, "max_tokens": 2, "ignore_eos": True}


def test_a_routers_own_mode_for_prefill_is_refused_with_a_sentence(
    routed: Routed, package: str, workers: list[Worker]
) -> None:
    """fwk's decode servers find prefill servers themselves; a router that wants to say which is told so."""
    first, second = workers
    mode = "--pd-disaggregation" if package == "sglang-router" else "--vllm-pd-disaggregation"
    with routed(mode, "--prefill", first.url, "9000", "--decode", second.url) as client:
        joined(client, workers)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=chat)
        assert reply.status_code >= 400
        assert "--disaggregation-registry" in reply.text
