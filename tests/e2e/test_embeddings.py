"""A server whose model makes embeddings: the whole way from OpenAI's client to the engine process and back."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from pydantic import TypeAdapter

import fwk
from tests.helpers.http import NO_TLS
from tests.helpers.lazy import lazy
from tests.helpers.rig import Server, assert_no_leak, until

openai = lazy("openai")
openai_types = lazy("openai.types")

TINY = {
    "architectures": ["BertModel"],
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
    "dtype": "float32",
}
TEXTS = [f"{'words, ' * (i % 7)}text {i}" for i in range(40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    server = Server(folder, "--max-running-requests", "8")
    found = until(lambda: re.search(r"serves tiny at (http://127\.0\.0\.1:\d+)", server.log), 60, "the ready line")
    server.url = found.group(1)
    yield server
    server.close()


@pytest.fixture(scope="module")
def vectors(folder: Path) -> np.ndarray:
    """The same without a server."""
    with fwk.LLM(str(folder), load_format="dummy") as llm:
        return llm.embed(TEXTS)


@pytest.mark.gate(1)
@pytest.mark.parametrize("encoding", [{}, {"encoding_format": "float"}])
async def test_many_clients_get_their_own(server: Server, vectors: np.ndarray, encoding: dict[str, str]) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        batches = [TEXTS[i : i + 10] for i in range(0, 40, 10)]
        replies = await asyncio.gather(*(client.embeddings.create(model="tiny", input=b, **encoding) for b in batches))
        (one,) = (await client.embeddings.create(model="tiny", input=TEXTS[7], **encoding)).data
    found = np.array([item.embedding for reply in replies for item in reply.data])
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    np.testing.assert_allclose(one.embedding, vectors[7], atol=1e-5)


def test_replies_are_of_the_clients_types(server: Server) -> None:
    kind = TypeAdapter(openai_types.CreateEmbeddingResponse)
    for asked in ("Hi", ["Hi", "Ho"], [72, 105], [[72], [105]]):
        kind.validate_json(server.post({"input": asked, "model": "tiny"}, "/v1/embeddings").text, strict=True)
    packed = server.post({"input": "Hi", "encoding_format": "base64"}, "/v1/embeddings").json()
    assert isinstance(packed["data"][0].pop("embedding"), str)
    kind.validate_json(json.dumps(packed | {"data": [packed["data"][0] | {"embedding": [0.0]}]}), strict=True)


def test_what_it_says_of_itself(server: Server) -> None:
    assert "embeddings of 64 numbers, inputs of at most 256 tokens" in server.log
    [card] = server.get("/v1/models").json()["data"]
    assert (card["task"], card["max_model_len"]) == ("embed", 256)
    assert server.get("/server_info").json()["chosen"]["cache"] == "none"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "Hi"}, 400),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}, 400),
        ("/generate", {"inputs": "Hi"}, 422),
    ],
)
def test_it_generates_nothing(server: Server, path: str, body: dict[str, object], status: int) -> None:
    reply = server.post(body, path)
    assert (reply.status_code, "makes embeddings and generates no text" in reply.text) == (status, True)


def test_too_long_an_input(server: Server) -> None:
    reply = server.post({"input": ["fine", "a" * 257]}, "/v1/embeddings")
    assert_no_leak(reply.text)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input[1]")
    assert "at most 256" in error["message"]


@pytest.mark.sweep
async def test_clients_that_go_away_leave_nothing_behind(server: Server, vectors: np.ndarray) -> None:
    async with httpx.AsyncClient(base_url=server.url, verify=NO_TLS) as client:
        for seconds in (0.001, 0.005, 0.01, 0.02, 0.05, 0.4):
            with pytest.raises(httpx.TimeoutException):
                await client.post("/v1/embeddings", json={"input": ["a" * 250] * 500}, timeout=seconds)
    names = ("fwk:num_requests_running", "fwk:num_requests_waiting", "fwk:kv_cache_usage_perc")
    until(lambda: not any(server.metric(name) for name in names), 10, "running = waiting = 0 and no block held")
    page = server.get("/metrics").text
    counts = {m[1]: float(m[2]) for m in re.finditer(r'request_success_total\{finished_reason="(\w+)".* (\S+)', page)}
    assert counts["abort"] > 0, page
    assert counts["error"] == 0
    reply = server.post({"input": TEXTS[3]}, "/v1/embeddings").json()
    np.testing.assert_allclose(reply["data"][0]["embedding"], vectors[3], atol=1e-5)
    assert "Traceback" not in server.log
