"""Stages say what one worker says, whatever else is going on; one that dies takes the server down loudly."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, FwkError, ModelLoadError
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.client import connect
from tests.helpers.engine_death import begin, check_killed_loudly
from tests.helpers.rig import Server
from tests.helpers.servers import Start

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40, 1, 90, 16, 33, 64)]
LARGE: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "check_blocks": True}
SMALL: dict[str, Any] = {**LARGE, "max_total_tokens": 108, "page_size": 4, "chunked_prefill_size": 16}
"""With blocks for a few of the prompts at once, which are computed in chunks."""
TWO: dict[str, Any] = {"pipeline_parallel_size": 2}
THREE: dict[str, Any] = {"pipeline_parallel_size": 3}
FOUR: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
WINDOWS = {"sliding_window": 24, "use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"] * 2}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dense": ("llama", {}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {}),
    "MoE": ("qwen3_moe", {}, {}),
    "MLA": ("deepseek_v2", {}, {}),
    "sliding windows": ("gemma3", {}, {}),
    "window groups": ("qwen3", WINDOWS, {}),
    "int8": ("llama", {}, {"quantization": "int8"}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of four layers, by the names in ``MODELS``; made when they are asked for."""

    class Folders(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            kind, changes, _ = MODELS[name]
            self[name] = tmp_path_factory.mktemp(kind)
            make_checkpoint(self[name], kind, **{"num_hidden_layers": 4, **changes})
            return self[name]

    return Folders()


def outputs(llm: fwk.LLM, sampling: SamplingParams, n: int = 1) -> list[Any]:
    return [(done.token_ids, done.logprobs, done.prompt_logprobs) for done in llm.generate(PROMPTS, sampling, n)]


def check_same(
    folder: Path, one: dict[str, Any], stages: dict[str, Any], every: list[tuple[SamplingParams, int]]
) -> None:
    with fwk.LLM(str(folder), **LARGE, **one, prefix_cache="none") as llm:
        wanted = [outputs(llm, *each) for each in every]
    with fwk.LLM(str(folder), **{**SMALL, **one, **stages}) as llm:
        for expected, each in zip(wanted, every, strict=True):
            for (tokens, *rest), (ours, *own) in zip(expected, outputs(llm, *each), strict=True):
                assert ours == tokens
                for entries, mine in zip(rest, own, strict=True):
                    assert (entries is None) == (mine is None)
                    for a, b in zip(entries or [], mine or [], strict=True):
                        assert (a is None) == (b is None)
                        assert a is None or (a.token_id, pytest.approx(a.logprob, abs=1e-4)) == (b.token_id, b.logprob)
        stats = llm.engine.stats()
        assert stats.preemptions > 0
        assert stats.cached_prompt_tokens > 0
        assert llm.engine.info.chosen["executors"] == "processes"


GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=2, ignore_eos=True)
SCORED = SamplingParams(max_tokens=4, temperature=0, prompt_logprobs=2, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=12, temperature=1, seed=5, top_p=0.9, repetition_penalty=1.1, ignore_eos=True)
ENDED = SamplingParams(max_tokens=18, temperature=1, seed=8, stop_token_ids=tuple(range(0, 320, 9)))


def test_two_stages_say_what_one_worker_says(folders: dict[str, Path]) -> None:
    """Chunks, the prefix cache and pre-emption are all in it."""
    check_same(folders["dense"], {}, TWO, [(GREEDY, 1), (SCORED, 1), (DRAWN, 2), (ENDED, 1)])


@pytest.mark.sweep
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("stages", [TWO, THREE, FOUR], ids=["pp 2", "pp 3", "pp 2 x tp 2"])
def test_stages_of_every_kind(folders: dict[str, Path], model: str, stages: dict[str, Any]) -> None:
    check_same(folders[model], MODELS[model][2], stages, [(GREEDY, 1), (DRAWN, 2)])


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"pp_max_micro_batch_size": 1},
        {"disable_overlap_schedule": True},
        {"chunked_prefill_size": -1},
        {"prefix_cache": "hierarchical", "hicache_ratio": 20.0},
        {"enable_mixed_chunk": False},
    ],
    ids=str,
)
def test_stages_with_other_schedules(folders: dict[str, Path], options: dict[str, Any]) -> None:
    check_same(folders["dense"], {}, {**THREE, **options}, [(GREEDY, 1), (DRAWN, 2)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"executor": "inprocess"}, "it runs models whole, but --pipeline-parallel-size is 2: leave --executor out"),
        ({"pipeline_parallel_size": 5}, "-size 5 is not possible: .* has 4 layers, and each stage needs one"),
        ({"task": "embed"}, "stages are of models that generate, and --task embed makes something else"),
        ({"enable_lora": True}, "--enable-lora: .* adapters are for layers of one worker; leave --pipeline-parallel"),
        ({"speculative_algorithm": "ngram"}, "and --pipeline-parallel-size 2 divides the two: leave one out"),
        ({"expert_distribution_recorder_mode": "stat"}, "-mode: one worker counts, and --pipeline-parallel-size 2"),
        ({"tensor_parallel_size": 2, "expert_parallel_size": 2, "enable_eplb": True}, "--enable-eplb: .* all layers"),
    ],
    ids=str,
)
def test_what_cannot_be_in_stages_is_said_before_serving(
    folders: dict[str, Path], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(FwkError, match=message) as caught:
        fwk.LLM(str(folders["dense"]), **{**LARGE, **TWO, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.sweep
def test_a_model_that_keeps_its_layers_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"model 'transformers' builds all layers of .* in one worker"):
        fwk.LLM(str(folders["dense"]), **LARGE, **TWO, model_impl="transformers")


@pytest.mark.sweep
def test_tensors_that_no_stage_reads_are_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelLoadError, match=r"9 tensors belong to no layer of llama \(model\.layers\.3\."):
        fwk.LLM(str(tmp_path), **LARGE, **TWO)


@pytest.mark.sweep
@pytest.mark.parametrize("index", range(3))
async def test_a_killed_stage_takes_the_server_down_loudly(spawn: Start, index: int) -> None:
    override = json.dumps({"num_hidden_layers": 3})
    server: Server = spawn("--pp-size", "3", "--json-model-override-args", override)
    assert server.engine is not None
    ranks = server.engine.children()
    assert len(ranks) == 3
    async with connect(server) as client:
        streams, running = await begin(client, 8, max_tokens=1500)
        ranks[index].send_signal(signal.SIGKILL)
        await running
    assert all(len(stream.errors) == 1 for stream in streams)
    check_killed_loudly(server, index, ranks[index].pid)
