"""Adapters served over HTTP by two real engines: what each says is what its merged checkpoint says."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lazy import lazy
from tests.helpers.rig import Server, assert_no_leak, install_plugins

import fwk
from fwk import SamplingParams

openai = lazy("openai")

PROMPTS = [[5 + i, 17, 3 * i + 1, 40, 200 - i] for i in range(4)]
KEY = "sk-of-the-administrator"
ADMIN = {"authorization": f"Bearer {KEY}"}
NUM_TOKENS = 12

Expected = dict[str, list[list[int]]]


@pytest.fixture(scope="module")
def expected(folders: Path) -> Expected:
    """The tokens of the base model and of the merged checkpoints, each served alone."""
    found: Expected = {}
    for name, folder in {"tiny": "base", "narrow": "narrow-merged", "wide": "wide-merged", "odd": "odd-merged"}.items():
        with fwk.LLM(str(folders / folder), max_total_tokens=2048) as llm:
            outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, temperature=0))
            found[name] = [output.token_ids for output in outputs]
    assert len({str(tokens) for tokens in found.values()}) == len(found), "the adapters must differ"
    return found


@pytest.fixture(scope="module")
def told(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder clients may load from: a good adapter, a damaged one, and links that lead out."""
    root = tmp_path_factory.mktemp("adapters")
    for name in ("wide", "odd"):
        shutil.copytree(folders / name, root / "threads" / name)
    shutil.copytree(folders / "wide", root / "damaged")
    os.truncate(root / "damaged" / "adapter_model.safetensors", 3000)
    (root / "link").symlink_to(folders / "wide")
    (root / "empty").mkdir()
    return root


@pytest.fixture(scope="module")
def server(folders: Path, told: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    lora = (
        "--enable-lora",
        "--lora-paths",
        f"narrow={folders / 'narrow'}",
        "--lora-dirs",
        str(told),
        "--admin-api-key",
        KEY,
    )
    flags = ("--load-format", "safetensors", "--data-parallel-size", "2", *lora)
    server = Server(folders / "base", *flags, python_path=install_plugins(tmp_path_factory.mktemp("site")))
    yield server.start()
    server.close()


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


async def ask(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> list[int]:
    sampling: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
    extra = {"return_token_ids": True}
    reply = await client.completions.create(model=model, prompt=prompt, extra_body=extra, **sampling)
    assert reply.model == model
    return reply.choices[0].model_dump()["token_ids"]


async def stream(client: openai.AsyncOpenAI, model: str, prompt: list[int]) -> list[int]:
    sampling: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
    extra = {"return_token_ids": True}
    chunks = await client.completions.create(model=model, prompt=prompt, extra_body=extra, stream=True, **sampling)
    return [token async for chunk in chunks for token in chunk.choices[0].model_dump()["token_ids"]]


def load(server: Server, name: str, path: str, status: int = 200, start: str = "/v1") -> dict[str, Any]:
    reply = server.post({"lora_name": name, "lora_path": path}, f"{start}/load_lora_adapter", ADMIN)
    assert_no_leak(reply.text)
    assert reply.status_code == status, reply.text
    return reply.json()


def unload(server: Server, name: str, status: int = 200, start: str = "/v1") -> dict[str, Any]:
    reply = server.post({"lora_name": name}, f"{start}/unload_lora_adapter", ADMIN)
    assert reply.status_code == status, reply.text
    return reply.json()


def names(server: Server) -> list[str]:
    reply = server.get("/v1/models")
    assert_no_leak(reply.text)
    return [model["id"] for model in reply.json()["data"]]


async def test_models_in_parallel_are_each_its_merged_checkpoint(server: Server, expected: Expected) -> None:
    load(server, "wide", "threads/wide")
    asked = [("tiny", "tiny"), ("narrow", "narrow"), ("tiny:narrow", "narrow"), ("wide", "wide"), ("tiny:wide", "wide")]
    work = [(model, name, i) for i in range(len(PROMPTS)) for model, name in asked]
    async with client_of(server) as client:
        whole = await asyncio.gather(*(ask(client, model, PROMPTS[i]) for model, _, i in work))
        streamed = await asyncio.gather(*(stream(client, model, PROMPTS[i]) for model, _, i in work))
    assert whole == streamed == [expected[name][i] for _, name, i in work]
    replicas = server.get("/server_info").json()["replicas"]
    assert all(replica["stats"]["finished"] >= len(work) // 2 for replica in replicas), "both engines took part"
    unload(server, "wide")
    server.check_invariants()


@pytest.mark.sweep
async def test_loading_and_unloading_under_load(server: Server, expected: Expected) -> None:
    """Whoever asks while an adapter comes and goes gets its tokens or is told; the others notice nothing.

    It is 404, or 400 for a request that was read just before the adapter went.
    """
    answers: dict[str, int] = {"served": 0, "refused": 0}
    is_over = asyncio.Event()

    async def keep_asking(client: openai.AsyncOpenAI, model: str, name: str, may_be_gone: bool) -> None:
        i = 0
        while not is_over.is_set():
            try:
                assert await ask(client, model, PROMPTS[i % 4]) == expected[name][i % 4]
                answers["served"] += may_be_gone
            except (openai.NotFoundError, openai.BadRequestError) as error:
                if not may_be_gone or (error.status_code == 400 and "no LoRA adapter" not in error.message):
                    raise
                answers["refused"] += 1
                await asyncio.sleep(0.01)
            i += 1

    async def come_and_go() -> None:
        for start in ("/v1", "") * 3:
            for path in ("threads/wide", "threads/odd"):
                name = path.removeprefix("threads/")
                await asyncio.to_thread(load, server, name, path, start=start)
                await asyncio.sleep(0.1)
                await asyncio.to_thread(unload, server, name, start=start)
        is_over.set()

    async with client_of(server) as client:
        await asyncio.gather(
            come_and_go(),
            keep_asking(client, "tiny", "tiny", False),
            keep_asking(client, "tiny:narrow", "narrow", False),
            keep_asking(client, "wide", "wide", True),
            keep_asking(client, "tiny:odd", "odd", True),
        )
    assert min(answers.values()) > 0, answers
    assert names(server) == ["tiny", "narrow"]
    server.check_invariants()


async def test_a_stream_outlives_its_adapter(server: Server, expected: Expected) -> None:
    load(server, "wide", "threads/wide")
    async with client_of(server) as client:
        chunks = await client.completions.create(
            model="wide", prompt=PROMPTS[0], max_tokens=200, temperature=0, stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )  # fmt: skip
        tokens = (await anext(aiter(chunks))).choices[0].model_dump()["token_ids"]
        await asyncio.to_thread(unload, server, "wide")
        with pytest.raises(openai.NotFoundError):
            await ask(client, "wide", PROMPTS[0])
        tokens += [token async for chunk in chunks for token in chunk.choices[0].model_dump()["token_ids"]]
    assert (len(tokens), tokens[:NUM_TOKENS]) == (200, expected["wide"][0])
    server.check_invariants()


async def test_one_name_loaded_by_many_at_once(server: Server, expected: Expected) -> None:
    """One wins, on every engine the same one."""
    body = [{"lora_name": "either", "lora_path": f"threads/{name}"} for name in ("wide", "odd")] * 3
    posts = (asyncio.to_thread(server.post, b, "/load_lora_adapter", ADMIN) for b in body)
    replies = await asyncio.gather(*posts)
    assert sorted(reply.status_code for reply in replies) == [200, 400, 400, 400, 400, 400]
    assert all("is loaded already; unload it first" in reply.text for reply in replies if reply.status_code == 400)
    root = server.get("/v1/models/either").json()["root"].removeprefix("threads/")
    async with client_of(server) as client:
        found = await asyncio.gather(*(ask(client, "either", prompt) for prompt in PROMPTS))
    assert found == expected[root]
    unload(server, "either")


@pytest.mark.parametrize(
    ("name", "path", "param", "message"),
    [
        ("x", "nowhere", "lora_path", "names no adapter in the folders this server may load from"),
        ("x", "..", "lora_path", "names no adapter"),
        ("x", ".", "lora_path", "names no adapter"),
        ("x", "threads/../../narrow", "lora_path", "names no adapter"),
        ("x", "link", "lora_path", "names no adapter"),
        ("x", "/etc", "lora_path", "names no adapter"),
        ("x", "a\0b", "lora_path", "names no adapter"),
        ("x", "empty", "lora_path", "adapter_config.json is missing"),
        ("x", "damaged", "lora_path", "'x' cannot be loaded: adapter_model.safetensors is damaged"),
        ("narrow", "threads/wide", "lora_name", "'narrow' is loaded already; unload it first"),
        ("tiny", "threads/wide", "lora_name", "'tiny' is the served model's own name"),
        ("a:b", "threads/wide", "lora_name", "lora_name must be 1 to 128 letters"),
    ],
)
def test_refused(server: Server, folders: Path, name: str, path: str, param: str, message: str) -> None:
    for start in ("/v1", ""):
        error = load(server, name, path, 400, start)["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert message in error["message"]
        assert "\n" not in error["message"]
    load(server, "x", str(folders / "wide"), 400)  # there, and good, but not below the told folder
    assert names(server) == ["tiny", "narrow"]


def test_a_whole_path_below_the_told_folder_is_not_shown(server: Server, told: Path) -> None:
    assert load(server, "wide", str(told / "threads" / "wide"))["loaded_adapters"] == {
        "narrow": "narrow",
        "wide": "wide",
    }
    assert server.get("/v1/models/wide").json()["parent"] == "tiny"
    unload(server, "wide")


def test_unknown_names(server: Server) -> None:
    for start in ("/v1", ""):
        assert unload(server, "nobody", 404, start)["error"]["param"] == "lora_name"
    assert server.get("/v1/models/nobody").status_code == 404
    assert server.post({"prompt": [5], "model": "tiny:nobody"}).status_code == 404
    server.check_invariants()
