"""fwk behind SGLang's and vLLM's routers: workers that come and go, and prompts sent to where they are cached."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helpers.ports import free_port
from tests.helpers.rig import Server, until, write_model
from tests.helpers.routers import MODES, ROUTERS

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
READY_SECONDS = 30.0
BLOCK = 16


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


@pytest.fixture(params=sorted(ROUTERS))
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
        command = [str(python_with(package)), "-m", ROUTERS[package], *common, *health, *flags]
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


def test_a_routers_own_mode_for_prefill_is_refused_by_servers_without_a_role(
    routed: Routed, package: str, workers: list[Worker]
) -> None:
    """Fields of routers mean nothing to a server that is neither for prompts nor decodes."""
    first, second = workers
    with routed(MODES[package], "--prefill", first.url, "9000", "--decode", second.url) as client:
        joined(client, workers)
        chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        reply = client.post("/v1/chat/completions", json=chat)
        assert reply.status_code >= 400
        assert "needs an engine started with --disaggregation-mode" in reply.text


TEXT = "All work and no play makes Jack a dull boy. " * 6
BODIES: list[dict[str, Any]] = [
    {"prompt": TEXT, "max_tokens": 12, "temperature": 0},
    {"prompt": TEXT + "!", "max_tokens": 8, "temperature": 0.8, "seed": 5},
    {"prompt": TEXT[5:], "max_tokens": 6, "temperature": 0, "logprobs": 2},
    {"prompt": [TEXT[9:], TEXT[11:], "short"], "max_tokens": 6, "temperature": 0, "min_tokens": 6},
    {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 6, "temperature": 0, "n": 2, "seed": 1},
    {"prompt": "short", "max_tokens": 5, "temperature": 0},
]


class Roles:
    """A server for prompts and one that decodes, of which the second knows the first as a router's fields need."""

    def __init__(self, package: str, model: Path, folder: Path) -> None:
        secret = folder / "secret"
        secret.write_text("0123456789abcdef" * 4)
        shared = ("--dtype", "float32", "--disaggregation-token-file", str(secret), "--disaggregation-timeout", "10")
        self.bootstrap_port = free_port()
        own = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", str(self.bootstrap_port))
        self.prefill = Server(model, *shared, *own)
        self.prefill.wait_ready()
        named = ("--disaggregation-prefill-servers", self.prefill.url) if package == "sglang-router" else ()
        self.decode = Server(model, *shared, "--disaggregation-mode", "decode", *named)
        self.decode.wait_ready()
        self.one = Server(model, "--dtype", "float32")
        self.one.wait_ready()

    @property
    def servers(self) -> tuple[Server, ...]:
        return self.prefill, self.decode, self.one

    @property
    def flags(self) -> tuple[str, ...]:
        """Of the router."""
        return "--prefill", self.prefill.url, str(self.bootstrap_port), "--decode", self.decode.url

    def are_whole(self) -> None:
        """Nothing runs, no block is held, nothing is under way."""
        for server in (self.prefill, self.decode):
            until(server.is_idle, 10, "nothing runs")
            until(lambda server=server: not server.metric("fwk:kv_cache_usage_perc"), 15, "no block is held")
            for name in ("fwk:num_kv_fetching", "fwk:num_kv_offered"):
                until(lambda server=server, name=name: not server.metric(name), 15, "no transfer is under way")


@pytest.fixture
def roles(package: str, tmp_path: Path) -> Iterator[Roles]:
    made = Roles(package, write_model(tmp_path / "tiny"), tmp_path)
    yield made
    for server in made.servers:
        server.close()


def test_prompts_are_computed_where_a_router_says(routed: Routed, package: str, roles: Roles) -> None:
    """Both routers' modes for prefill and decode: replies are those of one server, and K/V go from one to the other."""
    with routed(MODES[package], *roles.flags) as client:
        until(lambda: healthy(client) == {roles.prefill.url, roles.decode.url}, READY_SECONDS, "both", pause=0.2)
        for body in BODIES:
            path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
            body = {"model": "tiny", "ignore_eos": True, **body}
            found, wanted = client.post(path, json=body), roles.one.post(body, path)
            assert found.status_code == 200, found.text
            assert found.json()["choices"] == wanted.json()["choices"], body
        body = {"model": "tiny", **BODIES[0], "prompt": f"s {TEXT}"}
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {")]
        said = "".join(line["choices"][0]["text"] for line in lines if line["choices"])
        assert said == roles.one.post(body).json()["choices"][0]["text"]
        if package == "sglang-router":
            body = {"text": f"n {TEXT}", "sampling_params": {"max_new_tokens": 5, "temperature": 0}}
            assert (
                client.post("/generate", json=body).json()["text"] == roles.one.post(body, "/generate").json()["text"]
            )
        assert roles.decode.metric("fwk:kv_transfers_total") >= 6
        assert roles.decode.metric("fwk:kv_transfer_failures_total") == 0
        assert roles.decode.get("/health").json() == {"status": "ok"}
        roles.are_whole()
        refused = client.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 5000})
        assert 400 <= refused.status_code < 500
        assert "prompt" in refused.text
        roles.are_whole()


def test_a_decode_server_whose_prefill_server_dies_computes_alone(routed: Routed, package: str, roles: Roles) -> None:
    """Killed while it computes: what reaches the decode server is answered right, and in time."""
    with routed(MODES[package], *roles.flags, "--retry-max-retries", "1") as client:
        until(lambda: healthy(client) == {roles.prefill.url, roles.decode.url}, READY_SECONDS, "both", pause=0.2)
        bodies = [{"model": "tiny", "prompt": f"{i} {TEXT}", "max_tokens": 40, "temperature": 0} for i in range(8)]
        wanted = [roles.one.post(body).json()["choices"][0]["text"] for body in bodies]
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(client.post, "/v1/completions", json=body) for body in bodies]
            roles.prefill.process.kill()
            replies = [one.result(60) for one in asked]
        for reply, text in zip(replies, wanted, strict=True):
            assert reply.status_code >= 500 or reply.json()["choices"][0]["text"] == text
        until(roles.decode.is_idle, 15, "nothing runs")
        until(lambda: not roles.decode.metric("fwk:kv_cache_usage_perc"), 15, "no block is held")
        with httpx.Client(base_url=roles.decode.url, timeout=60) as direct:
            assert complete(direct, "after")["choices"]
