"""Two ranks say what one says, whatever else is going on; a rank that dies takes the server down loudly."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError, PluginError
from tests.helpers.client import connect
from tests.helpers.engine_death import begin, check_ended, check_killed_loudly
from tests.helpers.ray_cluster import ENVIRONMENT, needs_ray
from tests.helpers.rig import Server, is_alive, until
from tests.helpers.servers import Start

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40, 1, 90, 16, 33, 64)]
Tiny = Callable[..., fwk.LLM]
SMALL: dict[str, Any] = {"max_total_tokens": 108, "page_size": 4, "chunked_prefill_size": 16}


def check_same(one: fwk.LLM, two: fwk.LLM, sampling: SamplingParams, n: int = 1) -> None:
    for expected, found in zip(one.generate(PROMPTS, sampling, n), two.generate(PROMPTS, sampling, n), strict=True):
        assert found.token_ids == expected.token_ids
        for theirs, ours in (
            (expected.logprobs, found.logprobs),
            (expected.prompt_logprobs, found.prompt_logprobs),
        ):
            assert (theirs is None) == (ours is None)
            for a, b in zip(theirs or [], ours or [], strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    assert a.token_id == b.token_id
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


@pytest.fixture(scope="module")
def small_pool(tiny_llm: Tiny) -> fwk.LLM:
    """Two ranks, with blocks for a few of the prompts at once, which are computed in chunks."""
    return tiny_llm(tensor_parallel_size=2, **SMALL)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("settings", "n"),
    [
        ({"temperature": 0.0, "logprobs": 3}, 1),
        ({"temperature": 0.0, "logprobs": 0, "prompt_logprobs": 2}, 1),
        ({"temperature": 1.0, "seed": 5, "top_p": 0.9, "repetition_penalty": 1.1}, 2),
        ({"temperature": 0.8, "seed": 6, "min_tokens": 3, "logit_bias": {7: 2.0}}, 1),
    ],
)
def test_two_ranks_say_what_one_says(tiny_llm: Tiny, small_pool: fwk.LLM, settings: dict[str, Any], n: int) -> None:
    """With a small pool: chunks, the prefix cache and pre-emption are all in it."""
    one = tiny_llm(prefix_cache="none")
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, **settings)
    before = small_pool.engine.stats()
    check_same(one, small_pool, sampling, n)
    after = small_pool.engine.stats()
    assert after.preemptions > before.preemptions
    assert small_pool.engine.info.chosen["executors"] == "processes"


def test_a_prefix_found_in_the_cache_says_the_same(tiny_llm: Tiny, small_pool: fwk.LLM) -> None:
    prompt, sampling = [9] * 41, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    [expected] = tiny_llm(prefix_cache="none").generate([prompt], sampling)
    first, second = (small_pool.generate([prompt], sampling)[0] for _ in range(2))
    assert (second.cached_tokens, second.token_ids) == (40, expected.token_ids)
    assert first.token_ids == expected.token_ids


@pytest.mark.sweep
def test_ranks_that_share_a_head_of_keys_and_values(tiny_llm: Tiny) -> None:
    override = json.dumps({"num_key_value_heads": 1, "vocab_size": 321, "tie_word_embeddings": True})
    one = tiny_llm(json_model_override_args=override)
    two = tiny_llm(json_model_override_args=override, tensor_parallel_size=2, disable_overlap_schedule=True)
    check_same(one, two, SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, ignore_eos=True))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        pytest.param(
            {"tensor_parallel_size": 3},
            ModelLoadError,
            r"q_proj: 4 heads cannot be shared by 3 ranks; choose a",
            marks=pytest.mark.sweep,  # the sentence: tests/core/layers/test_linear.py; its way: test_processes.py
        ),
        (
            {"tensor_parallel_size": 2, "executor": "inprocess"},
            PluginError,
            "executor 'inprocess' .* runs one worker, but --tensor-parallel-size is 2: leave --executor out",
        ),
        ({"tensor_parallel_size": 2, "executor": "threaded"}, PluginError, "runs one worker"),
        ({"tensor_parallel_size": 2, "attention_backend": "flash"}, PluginError, "unknown attention backend 'flash'"),
    ],
)
def test_what_cannot_be_is_said_before_serving(
    tiny_folder: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        fwk.LLM(str(tiny_folder), load_format="dummy", **options)


@pytest.fixture
def pair(spawn: Start) -> Server:
    """A server whose engine has two ranks."""
    return spawn("--tensor-parallel-size", "2")


def ranks_of(server: Server) -> list[psutil.Process]:
    assert server.engine is not None
    ranks = server.engine.children()
    assert len(ranks) == 2
    return ranks


@pytest.mark.sweep
async def test_a_killed_rank_takes_the_server_down_loudly(pair: Server, tiny: Server) -> None:
    assert pair.golden == tiny.golden
    victim = ranks_of(pair)[1]
    async with connect(pair) as client:
        streams, running = await begin(client, 8, max_tokens=1500)
        victim.send_signal(signal.SIGKILL)
        await running
    assert all(len(stream.errors) == 1 for stream in streams)
    check_killed_loudly(pair, 1, victim.pid)


@pytest.mark.sweep
def test_a_rank_killed_while_idle_is_noticed_and_no_rank_outlives_a_killed_server(spawn: Start) -> None:
    server = spawn("--tensor-parallel-size", "2")
    ranks_of(server)[0].send_signal(signal.SIGKILL)
    until(lambda: server.health() == 503, 1 + 2, "health 503 within a second, on a quiet machine")
    assert "rank 0" in server.get("/health").json()["reason"]
    check_ended(server)
    server = spawn("--tensor-parallel-size", "2")
    ranks = ranks_of(server)
    psutil.Process(server.process.pid).kill()
    server.process.wait(5)
    until(lambda: not any(map(is_alive, [server.engine, *ranks])), 5, "the end of engine and ranks")
    assert not server.leftovers, server.leftovers


@needs_ray
@pytest.mark.sweep
def test_ranks_on_a_ray_of_the_servers_own(spawn: Start, tiny: Server) -> None:
    flags = ("--executor", "ray", "--ray-address", "local", "--tensor-parallel-size", "2")
    server = spawn(*flags, environment=ENVIRONMENT)
    assert server.golden == tiny.golden
    ranks = [process for process in server.engines(recursive=True) if "RankActor" in process.name()]
    assert len(ranks) == 2
    ranks[1].kill()
    until(lambda: server.health() == 503, 10, "health 503")
    assert re.search(
        rf"rank \d \(pid {ranks[1].pid} on node [\d.]+\) has ended", server.get("/health").json()["reason"]
    )
    until(lambda: not any(map(is_alive, ranks)), 10, "the end of the ranks")
    assert server.stop() == 0
    assert {path.name for path in server.leftovers} <= {"ray"}, "Ray keeps its logs"


@pytest.mark.sweep
@pytest.mark.model
def test_smollm2_on_three_ranks() -> None:
    """Nine heads, three of keys and values: a third of them each."""
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time"]
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    found: list[list[list[int]]] = []
    for size in (1, 3):
        with fwk.LLM(dtype="float32", max_total_tokens=1024, tensor_parallel_size=size) as llm:
            found.append([done.token_ids for done in llm.generate(prompts, sampling)])
    assert found[0] == found[1]
