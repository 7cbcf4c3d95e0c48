"""Other weights for a model that serves: its tokens are those of a fresh start, or it stays as it was."""

from __future__ import annotations

import asyncio
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

import fwk
from fwk import SamplingParams
from fwk.errors import EngineDead, InvalidRequest
from tests.helpers.adapters import make_adapter
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.client import Streamed, connect
from tests.helpers.gguf_converted import written
from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server

ADMIN = {"authorization": "Bearer admin-key"}
PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 90)]
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
LIMITS: dict[str, Any] = {"max_total_tokens": 2048, "max_running_requests": 8, "check_blocks": True}
MOVING_EXPERTS: dict[str, Any] = {
    "executor": "processes",
    "tensor_parallel_size": 2,
    "ep_size": 2,
    "ep_num_redundant_experts": 2,
    "enable_eplb": True,
    "eplb_rebalance_num_iterations": 2,
    "eplb_rebalance_layers_per_chunk": 1,
    "dtype": "float32",
}

Pair = Callable[..., tuple[Path, Path]]


@pytest.fixture(autouse=True)
def young_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each update all objects are looked at, of which this process has more than a server: for half a second."""
    young = SimpleNamespace(get_freeze_count=int, unfreeze=lambda: None, collect=gc.collect)
    monkeypatch.setattr("fwk.worker.loading.rebuilding.gc", young)


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint with other tensors."""
    shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def mirrored(tensors: dict[str, Any]) -> None:
    for name, tensor in tensors.items():
        tensors[name] = tensor.flip(-1).contiguous()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two checkpoints of one architecture, of other weights."""
    made: dict[str, tuple[Path, Path]] = {}

    def make(kind: str = "llama", **changes: Any) -> tuple[Path, Path]:
        key = repr((kind, changes))
        if key not in made:
            first = tmp_path_factory.mktemp("first")
            make_checkpoint(first, kind, **changes)
            made[key] = first, changed(first, tmp_path_factory.mktemp("second"), mirrored)
        return made[key]

    return make


def ids(llm: fwk.LLM, adapter: str = "") -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY, adapter=adapter)]


def started(path: Path, **options: Any) -> fwk.LLM:
    return fwk.LLM(str(path), **LIMITS, **options)


def fresh(path: Path, **options: Any) -> list[list[int]]:
    with started(path, **options) as llm:
        return ids(llm)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("kind", "changes", "options"),
    [
        ("llama", {}, {}),
        ("llama", {"tie_word_embeddings": True}, {}),
        ("llama", {}, {"quantization": "int8", "dtype": "bfloat16"}),
        ("llama", {}, {"quantization": "int4"}),
        ("llama", {}, {"quantization": "fp8"}),
        ("llama", {}, {"prefix_cache": "hierarchical"}),
        ("llama", {}, {"speculative_algorithm": "ngram"}),
        ("llama", {}, {"prefill_attention_backend": "torch", "decode_attention_backend": "flex"}),
        ("qwen3_moe", {}, {}),
        ("gemma3", {"tie_word_embeddings": False}, {}),
        ("qwen3_next", {}, {}),
        pytest.param("llama", {}, {"executor": "processes", "tensor_parallel_size": 2}, marks=pytest.mark.sweep),
        pytest.param("qwen3_moe", {}, {"quantization": "int8"}, marks=pytest.mark.sweep),
        pytest.param("qwen3_moe", {}, MOVING_EXPERTS, marks=pytest.mark.sweep),
        pytest.param("deepseek_v2", {}, {}, marks=pytest.mark.sweep),
    ],
)
def test_tokens_are_those_of_a_fresh_start(
    pair: Pair, kind: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    first, second = pair(kind, **changes)
    wanted = fresh(second, **options)
    with started(first, **options) as llm:
        before = ids(llm)
        assert before != wanted
        llm.update_weights(str(second))
        assert ids(llm) == wanted
        assert ids(llm) == wanted, "again, now from the cache"
        llm.update_weights(str(first))
        assert ids(llm) == before
        stats = llm.engine.stats()
        assert (stats.num_running, stats.num_held_blocks) == (0, 0)


@pytest.mark.sweep
async def test_calls_before_an_update_end_and_those_after_it_wait(pair: Pair) -> None:
    first, second = pair("llama")
    before, after = fresh(first), fresh(second)
    assert before != after
    long = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    async with fwk.AsyncLLM(str(first), **LIMITS) as llm:
        left = asyncio.ensure_future(llm.generate(PROMPTS[0], long))
        early = asyncio.ensure_future(llm.generate(PROMPTS, GREEDY))
        stream = llm.stream(PROMPTS[1], long)
        await anext(stream)
        update = asyncio.ensure_future(llm.update_weights(str(second)))
        late = asyncio.ensure_future(llm.generate(PROMPTS, GREEDY))
        await asyncio.sleep(0)
        left.cancel()  # who leaves is aborted, update or not
        assert [done.token_ids for done in await early] == before
        assert not update.done()
        await stream.aclose()  # type: ignore[attr-defined]
        await update
        assert [done.token_ids for done in await late] == after
        with pytest.raises(InvalidRequest, match="no such"):
            await llm.update_weights(str(second / "no such"))
        assert [done.token_ids for done in await llm.generate(PROMPTS, GREEDY)] == after


async def test_an_update_that_waits_is_told_of_the_end(pair: Pair) -> None:
    first, second = pair("llama")
    llm = fwk.AsyncLLM(str(first), **LIMITS)
    stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    await anext(stream)
    update = asyncio.ensure_future(llm.update_weights(str(second)))
    late = asyncio.ensure_future(llm.generate(PROMPTS, GREEDY))
    await asyncio.sleep(0)
    await llm.close()
    for waiting in (update, late):
        with pytest.raises(EngineDead, match="closed"):
            await asyncio.wait_for(waiting, 20)
    with pytest.raises(EngineDead, match="closed"):
        async for _ in stream:
            pass


@pytest.mark.sweep
def test_files_of_blocks_are_exchanged(pair: Pair, tmp_path: Path) -> None:
    folders = pair("lfm2", hidden_size=256, intermediate_size=256)
    files = [written(folder, tmp_path / f"{folder.name}.gguf", "lfm2", quantises="Q8_0") for folder in folders]
    before, wanted = map(fresh, files)
    assert before != wanted
    with started(files[0]) as llm:
        llm.update_weights(str(files[1]))
        assert ids(llm) == wanted
        with pytest.raises(InvalidRequest, match=r"is another model|stored as"):
            llm.update_weights(str(folders[0]))
        assert ids(llm) == wanted


@pytest.mark.sweep
def test_packed_weights_that_were_kept_are_not_those_of_another_checkpoint(pair: Pair, tmp_path: Path) -> None:
    first, second = pair()
    options = {"quantization": "int8", "dtype": "bfloat16", "weights_cache": str(tmp_path)}
    wanted = fresh(second, **options)
    before = fresh(first, **options)
    kept = sorted(tmp_path.glob("*.weights"))
    with started(first, **options) as llm:
        assert ids(llm) == before
        llm.update_weights(str(second))
        assert ids(llm) == wanted
    assert sorted(tmp_path.glob("*.weights")) == kept
    assert fresh(first, **options) == before


@pytest.mark.sweep
def test_adapters_stay(pair: Pair, tmp_path: Path) -> None:
    first, second = pair()
    adapter = make_adapter(first, tmp_path / "adapter")
    options = {"enable_lora": True, "lora_paths": (f"mine={adapter}",)}
    with started(second, **options) as llm:
        wanted, plain = ids(llm, "mine"), ids(llm)
    assert wanted != plain
    with started(first, **options) as llm:
        ids(llm, "mine")
        llm.update_weights(str(second))
        assert (ids(llm, "mine"), ids(llm)) == (wanted, plain)


def without_one(tensors: dict[str, Any]) -> None:
    mirrored(tensors)
    del tensors["model.layers.1.mlp.down_proj.weight"]  # everything before it was read


def wider(tensors: dict[str, Any]) -> None:
    mirrored(tensors)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].repeat(2)


def another(tensors: dict[str, Any]) -> None:
    mirrored(tensors)
    tensors["model.layers.2.mlp.down_proj.weight"] = tensors["model.layers.1.mlp.down_proj.weight"].clone()


def _config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=["plain", "int8"])
def test_what_does_not_fit_changes_nothing(pair: Pair, tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = pair()
    moe, _ = pair("qwen3_moe")
    cut = changed(second, tmp_path / "cut", lambda tensors: None)
    with (cut / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)
    deeper = changed(second, tmp_path / "deeper", lambda tensors: None)
    _config(deeper, num_hidden_layers=3)
    wrong = {
        changed(second, tmp_path / "missing", without_one): "down_proj",
        changed(second, tmp_path / "wider", wider): "model.norm.weight",
        changed(second, tmp_path / "more", another): "belong to no layer",
        deeper: "num_layers is 3, that of the served one 2",
        moe: "is another model",
        cut: "model.safetensors",
        tmp_path / "nothing": "no such file",
    }
    with started(first, **options) as llm:
        before = ids(llm)
        for path, words in wrong.items():
            with pytest.raises(InvalidRequest, match=words):
                llm.update_weights(str(path))
            assert ids(llm) == before, path
        with pytest.raises(InvalidRequest, match="loader"):
            llm.update_weights(str(second), "gguf")
        stream = llm.stream("hello", GREEDY)
        next(stream)
        with pytest.raises(InvalidRequest, match="under way"):
            llm.update_weights(str(second))
        stream.close()
        assert ids(llm) == before


# Over HTTP.


def post(server: Server, status: int = 200, headers: dict[str, str] = ADMIN, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}/update_weights_from_disk", json=body, headers=headers, verify=NO_TLS, timeout=60)
    assert reply.status_code == status, reply.text
    return reply.json()


def served(server: Server) -> list[list[int]]:
    bodies = [{"prompt": p, "max_tokens": 8, "temperature": 0, "ignore_eos": True} for p in PROMPTS]
    replies = [server.post(body | {"return_token_ids": True}) for body in bodies]
    return [reply.json()["choices"][0]["token_ids"] for reply in replies]


@pytest.fixture(
    scope="module",
    params=[[], pytest.param(["--data-parallel-size", "2"], marks=pytest.mark.sweep)],
    ids=["one", "two"],
)
def server(pair: Pair, python_path: str, request: pytest.FixtureRequest) -> Iterator[Server]:
    first, _ = pair()
    flags = ["--load-format", "auto", "--admin-api-key", "admin-key", "--health-monitor", "true"]
    server = Server(first, *flags, *request.param, python_path=python_path)
    yield server.start()
    server.close()


@pytest.mark.sweep
def test_a_server_takes_other_weights(server: Server, pair: Pair, tmp_path: Path) -> None:
    first, second = pair()
    before, wanted = fresh(first), fresh(second)
    assert served(server) == before
    told = post(server, model_path=str(second), weight_version="v2")
    assert told == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to v2.",
        "num_paused_requests": 0,
    }
    assert served(server) == wanted
    assert httpx.get(f"{server.url}/model_info", verify=NO_TLS).json()["weight_version"] == "v2"
    broken = changed(first, tmp_path / "broken", without_one)
    refused = post(server, 400, model_path=str(broken))
    assert not refused["success"]
    assert "down_proj" in refused["message"]
    assert served(server) == wanted
    for engine in server.engines():
        engine.kill()
    while server.health() != 200 or len(server.engines()) < 1 or server.post({"prompt": "a", "max_tokens": 1}).is_error:
        pass
    assert served(server) == wanted, "engines that are started again have them, too"
    post(server, model_path=str(first))
    assert served(server) == before
    for flags in ({"flush_cache": False}, {"keep_pause": True}, {"nothing_such": 1}, {"token_step": 3}):
        assert next(iter(flags)) in post(server, 400, model_path=str(second), **flags)["message"]
    post(server, 401, {}, model_path=str(second))
    assert served(server) == before


READS = "weights will take about"
"""In the log, when an engine begins to read some."""


async def have_read(server: Server, count: int, stream: Streamed) -> None:
    """Until engines have begun to read so many times, and go on with what was under way."""
    while server.log.count(READS) < count:
        await asyncio.sleep(0.01)
    seen = len(stream.token_ids[0])
    while len(stream.token_ids[0]) < min(seen + 8, 300):
        await asyncio.sleep(0.001)


@pytest.mark.gate(1)
@pytest.mark.parametrize("aborts", [True, False])
async def test_requests_end_or_are_aborted_and_those_that_come_wait(server: Server, pair: Pair, aborts: bool) -> None:
    first, second = pair()
    wanted = fresh(second)
    with started(first) as llm:
        (old,) = llm.generate([PROMPTS[0]], SamplingParams(max_tokens=300, temperature=0, ignore_eos=True))
    post(server, model_path=str(first))
    async with connect(server) as client:
        stream = Streamed()
        running = asyncio.create_task(client.stream(stream, prompt=PROMPTS[0], max_tokens=300, ignore_eos=True))
        await stream.has_begun.wait()
        body = {"model_path": str(second), "abort_all_requests": aborts}
        read = server.log.count(READS) + len(server.engines())
        updating = asyncio.create_task(asyncio.to_thread(post, server, **body))
        await (running if aborts else have_read(server, read, stream))
        late = await asyncio.gather(
            *(client.stream(prompt=p, max_tokens=8, temperature=0, ignore_eos=True) for p in PROMPTS)
        )
        assert (await updating)["success"]
        await running
    assert [one.token_ids[0] for one in late] == wanted
    assert (len(stream.token_ids[0]) == 300) is not aborts
    assert stream.token_ids[0] == old.token_ids[: len(stream.token_ids[0])], "those under way keep the old weights"
    assert server.health() == 200
