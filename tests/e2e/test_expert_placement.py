"""Ranks that hold replicas, and other experts every few steps, say what one rank says; the rest is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, FwkError, ModelLoadError, PluginError
from fwk_kit.testing.serving import MIXTURE, TINY
from tests.helpers.checkpoints import make_checkpoint, reference_greedy, token_ids
from tests.helpers.lazy import lazy

transformers = lazy("transformers")

PROMPTS = [token_ids(n, n) for n in (3, 40, 17)]
SAMPLING = SamplingParams(max_tokens=12, temperature=0.0, logprobs=1, prompt_logprobs=0, ignore_eos=True)
SMALL: dict[str, Any] = {"max_total_tokens": 512, "check_blocks": True, "chunked_prefill_size": 16}
DIVIDED: dict[str, Any] = {"tensor_parallel_size": 2, "ep_size": 2}
MOVING: dict[str, Any] = {"enable_eplb": True, "eplb_rebalance_num_iterations": 3}
NUM_EXPERTS = 8


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel, list[list[int]]]:
    folder = tmp_path_factory.mktemp("mixture")
    reference = make_checkpoint(folder, "qwen3_moe")
    return folder, reference, [reference_greedy(reference, prompt, 12) for prompt in PROMPTS]


def generated(folder: Path, times: int = 1, **options: Any) -> tuple[list[list[list[int]]], list[float], Any]:
    """Tokens of each time, log-probabilities of the last, and what the ranks tell of their placement."""
    found: list[list[list[int]]] = []
    chances: list[float] = []
    with fwk.LLM(str(folder), **SMALL, **options) as llm:
        for _ in range(times):
            done = llm.generate(PROMPTS, SAMPLING)
            found.append([each.token_ids for each in done])
            chances = [x.logprob for each in done for x in (*(each.logprobs or ()), *(each.prompt_logprobs or ())) if x]
        told = llm.engine.executor.call("features.expert_placement.placement") if options.get("enable_eplb") else None
    return found, chances, told


@pytest.mark.sweep
@pytest.mark.parametrize(
    "options",
    [
        {"ep_num_redundant_experts": 2},
        {"ep_num_redundant_experts": 8},
        {"ep_num_redundant_experts": 4, "ep_dispatch_algorithm": "dynamic"},
    ],
)
def test_replicas_change_no_token(checkpoint: Any, options: dict[str, Any]) -> None:
    folder, _, wanted = checkpoint
    _, chances, _ = generated(folder, dtype="float32")
    tokens, found, _ = generated(folder, dtype="float32", **DIVIDED, **options)
    assert tokens == [wanted]
    assert found == pytest.approx(chances, abs=1e-4)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("options", "num_slots"),
    [
        ({}, NUM_EXPERTS),
        ({"ep_num_redundant_experts": 4, "eplb_rebalance_layers_per_chunk": 1}, 12),
        ({"moe_runner_backend": "torch", "ep_num_redundant_experts": 2, "ep_dispatch_algorithm": "dynamic"}, 10),
    ],
)
def test_experts_that_move_while_serving_change_no_token(
    checkpoint: Any, options: dict[str, Any], num_slots: int
) -> None:
    """Before, between and after several rebalancings; both ranks then hold what they say, and agree."""
    folder, _, wanted = checkpoint
    _, chances, _ = generated(folder, dtype="float32")
    tokens, found, told = generated(folder, 3, dtype="float32", **DIVIDED, **MOVING, **options)
    assert tokens == [wanted] * 3
    assert found == pytest.approx(chances, abs=1e-4)
    assert told[0] == told[1]
    assert told[0]["num_rebalancings"] >= 2
    assert told[0]["num_moved_layers"] >= 3
    assert 0.5 <= told[0]["utilization"] <= 1.0
    for slots in told[0]["physical_to_logical_map"]:
        assert len(slots) == num_slots
        assert set(slots) == set(range(NUM_EXPERTS))


@pytest.mark.sweep
def test_packed_experts_move(checkpoint: Any) -> None:
    """What is packed anew is what was packed at the start: the same tokens as where nothing moves."""
    options: dict[str, Any] = {"dtype": "float32", "quantization": "int8", "moe_runner_backend": "torch", **DIVIDED}
    still, chances, _ = generated(checkpoint[0], 1, **options)
    tokens, found, told = generated(checkpoint[0], 2, **options, **MOVING, ep_num_redundant_experts=2)
    assert told[0]["num_moved_layers"] >= 2
    assert tokens == still * 2
    assert found == pytest.approx(chances, abs=1e-4)


@pytest.mark.sweep
def test_even_ranks_are_left_alone(checkpoint: Any) -> None:
    """A threshold that no ranks are below."""
    options = {**DIVIDED, **MOVING, "eplb_min_rebalancing_utilization_threshold": 0.1}
    tokens, _, told = generated(checkpoint[0], dtype="float32", **options)
    assert tokens == [checkpoint[2]]
    assert told[0]["num_rebalancings"] == 0
    assert told[0]["utilization"] > 0.1


def written(folder: Path, content: Any) -> str:
    (folder / "where.json").write_text(json.dumps(content))
    return str(folder / "where.json")


@pytest.mark.sweep
def test_a_file_says_where_experts_are(checkpoint: Any, tmp_path: Path) -> None:
    """Slots as they are given; of counts, what the algorithm makes of them. Two layers."""
    slots = [[7, 0, 6, 1, 5, 2, 4, 3, 0, 7], [0, 1, 2, 3, 4, 5, 6, 7, 3, 3]]
    options = {**DIVIDED, "enable_eplb": True, "ep_num_redundant_experts": 2, "dtype": "float32"}
    file = written(tmp_path, {"physical_to_logical_map": slots})
    tokens, _, told = generated(checkpoint[0], init_expert_location=file, **options)
    assert tokens == [checkpoint[2]]
    assert told[1]["physical_to_logical_map"] == slots
    counts = [[1, 1, 1, 1, 1, 1, 90, 60], [40, 1, 1, 1, 1, 1, 1, 1]]
    halves = [[[x // 2 for x in row] for row in counts], [[x - x // 2 for x in row] for row in counts]]
    for content in ({"logical_count": counts}, {"engines": [{"counts": half} for half in halves]}):
        file = written(tmp_path, content)
        tokens, _, told = generated(checkpoint[0], init_expert_location=file, **options)
        assert tokens == [checkpoint[2]]
        first, second = told[0]["physical_to_logical_map"]
        assert (first.count(6), first.count(7), second.count(0)) == (2, 2, 3)


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (MIXTURE, {"enable_eplb": True}, ConfigError, "--enable-eplb.*spreads experts over groups of ranks, and there"),
        (
            MIXTURE,
            {"redundant_expert": 2, "tp": 2},
            ConfigError,
            "--ep-num-redundant-experts.*: set --expert-parallel-",
        ),
        (
            MIXTURE,
            {**DIVIDED, "ep_num_redundant_experts": 1},
            ModelLoadError,
            r"experts and --ep-num-redundant-experts 1 do not divide by --expert-parallel-size 2: add 1 more",
        ),
        (MIXTURE, {**DIVIDED, "ep_dispatch_algorithm": "dynamic"}, ConfigError, "add --ep-num-redundant-experts"),
        (
            MIXTURE,
            {**DIVIDED, "eplb_algorithm": "deepseek"},
            ConfigError,
            "--eplb-algorithm.*goes by the tokens of each expert",
        ),
        (
            MIXTURE,
            {**DIVIDED, "enable_eplb": True, "eplb_algorithm": "acme"},
            PluginError,
            "unknown expert placement algorithm 'acme'; installed: deepseek",
        ),
        (MIXTURE, {"eplb_rebalance_num_iterations": 5}, ConfigError, "--enable-eplb"),
        (
            MIXTURE,
            {**DIVIDED, "enable_eplb": True, "enable_deterministic_inference": True},
            ConfigError,
            "cannot be with --enable-eplb, which changes the order",
        ),
        (MIXTURE, {**DIVIDED, "init_expert_location": "nowhere.json"}, ConfigError, "nowhere.json: No such file"),
        (TINY, {**DIVIDED, "enable_eplb": True}, ConfigError, "this model has no layers of experts to divide"),
    ],
)
def test_what_cannot_be_is_refused(
    config: dict[str, Any], options: dict[str, Any], error: type[FwkError], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(error, match=message) as caught:
        fwk.LLM(str(tmp_path), load_format="dummy", **SMALL, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"physical_to_logical_map": [[0, 1]]}, r"mlp\.experts has 8 slots for experts, and 2 were given"),
        ({"physical_to_logical_map": [[0, 1, 2, 3, 4, 5, 6, 6]]}, "was given no slot for expert 7"),
        ({"logical_count": [[1, 2]]}, "has 8 experts, and counts of 2"),
        ({"logical_count": [[1] * 8]}, "has 1 layers, and none for model.layers.1.mlp.experts"),
        ({"logical_count": [["1"]]}, "each layer needs a list of whole numbers from 0 on"),
        ({"other": 1}, "give physical_to_logical_map or logical_count"),
        ([], "give physical_to_logical_map or logical_count"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(content: Any, message: str, checkpoint: Any, tmp_path: Path) -> None:
    with pytest.raises(FwkError, match=message):
        fwk.LLM(str(checkpoint[0]), **SMALL, **DIVIDED, init_expert_location=written(tmp_path, content))
