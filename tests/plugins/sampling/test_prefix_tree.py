"""Outputs are paths of the given tree, the ones a model of transformers chooses among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.lazy import lazy

import fwk
from fwk import SamplingParams
from fwk.errors import BlameSequence, ConfigError, InvalidRequest
from fwk.interfaces.sampling import SamplingContext
from fwk_sampling.prefix_tree import PrefixTreeOptions
from fwk_sampling.prefix_tree.processor import PrefixTree

transformers = lazy("transformers")

START, END = 3, 2
TREE = {
    "start_token_id": START,
    "end_token_id": END,
    "prefix_dict": {"3": [10, 20, 30], "3_10": [11, 12], "3_10_11": [13, 14, END], "3_20": [21], "3_20_21": [22, 23]},
}
PATHS = [[10, 11, 13], [10, 11, 14], [10, 11], [10, 12], [20, 21, 22], [20, 21, 23], [30]]
PROMPTS = [[3, 9, 27, 81, 243, 11], [200, 100, 50, 25], [5] * 20, [7, 8, START]]


def written(folder: Path, **changes: Any) -> str:
    path = folder / "tree.json"
    path.write_text(json.dumps(TREE | changes))
    return str(path)


@pytest.fixture
def processor(tmp_path: Path) -> PrefixTree:
    options = PrefixTreeOptions.model_validate({"tree_decode_config": written(tmp_path)})
    made = PrefixTree(SamplingContext(50, 64, torch.device("cpu"), (END,), options))
    for slot in range(5, 64):
        made.add(slot, SamplingParams())
    return made


@pytest.mark.parametrize(
    ("generated", "allowed"),
    [
        ([], [10, 20, 30]),
        ([10], [11, 12]),
        ([10, 11], [2, 13, 14]),
        ([10, 11, 13], [END]),
        ([30], [END]),
        ([30, END], [END]),
        ([40], [END]),  # something else had its way
        ([20, 21, 22, END, END, END], [END]),
    ],
)
def test_what_may_follow(processor: PrefixTree, make_view: Any, generated: list[int], allowed: list[int]) -> None:
    logits = torch.randn(2, 50)
    texts = [[1, 2, *generated], [START, 7, 8, 9]]
    out = processor.apply(logits.clone(), make_view(texts, [2, 4]))
    assert out[0].isfinite().nonzero().flatten().tolist() == allowed
    assert torch.equal(out[0, allowed], logits[0, allowed])
    assert out[1].isfinite().nonzero().flatten().tolist() == [10, 20, 30]


def test_what_other_limits_leave_nothing_of_is_refused(processor: PrefixTree, make_view: Any) -> None:
    logits = torch.zeros(1, 50)
    logits[0, [10, 20, 30]] = -torch.inf
    with pytest.raises(BlameSequence, match="the tree of --tree-decode-config, together with the limits"):
        processor.apply(logits, make_view([[1]], [1]))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    folder = tmp_path_factory.mktemp("model")
    return folder, make_checkpoint(folder, "llama", eos_token_id=END)


def best_path(model: transformers.PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy, among the tokens that lead to one of the paths."""
    generated: list[int] = []
    while True:
        width = len(generated)
        following = {(*path, END)[width] for path in PATHS if path[:width] == generated}
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *generated]])).logits[0, -1]
        token = max(following, key=lambda token: float(logits[token]))
        generated.append(token)
        if token == END:
            return generated


def serve(folder: Path, tree: str, **options: Any) -> fwk.LLM:
    given = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8, "load_format": "safetensors"}
    return fwk.LLM(str(folder), tree_decode_config=tree, **given, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"speculative_algorithm": "ngram"}, {"executor": "threaded"}, {"disable_cuda_graph": True}],
    ids=["plain", "ngram", "threaded", "eager"],
)
def test_greedy_outputs_are_the_best_paths(
    checkpoint: tuple[Path, transformers.PreTrainedModel], tmp_path: Path, options: dict[str, Any]
) -> None:
    folder, model = checkpoint
    with serve(folder, written(tmp_path), **options) as llm:
        done = llm.generate(PROMPTS, SamplingParams(max_tokens=8, temperature=0.0))
    for prompt, output in zip(PROMPTS, done, strict=True):
        wanted = best_path(model, prompt)
        assert output.token_ids in (wanted, wanted[:-1])
        assert output.finish_reason == "stop"


def test_samples_and_beams_are_paths(checkpoint: tuple[Path, transformers.PreTrainedModel], tmp_path: Path) -> None:
    with serve(checkpoint[0], written(tmp_path)) as llm:
        done = llm.generate(PROMPTS * 8, SamplingParams(max_tokens=8, temperature=5.0, seed=4))
        for output in done:
            assert [token for token in output.token_ids if token != END] in PATHS
        assert len({tuple(output.token_ids) for output in done}) > 2
        with pytest.raises(InvalidRequest, match="no token is allowed"):
            llm.generate([PROMPTS[0]], SamplingParams(max_tokens=8, allowed_token_ids=[40]))


@pytest.mark.gate(5)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prefix_dict": {"3_10": [4]}}, "prefix_dict has nothing for the start, the prefix '3'"),
        ({"prefix_dict": {"3": [9000]}}, "token 9000 after '3': the model has"),
        ({"prefix_dict": {"3": [4], "4_5": [5]}}, "the prefix '4_5' is not token ids joined by '_'"),
        ({"prefix_dict": {"3": [4], "3_x": [5]}}, "the prefix '3_x' is not token ids joined by '_'"),
        ({"prefix_dict": {"3": []}}, "prefix_dict.3: "),
        ({"prefix_dict": {"3": [-1]}}, "prefix_dict.3.0: "),
        ({"end_token_id": 9}, "end_token_id 9 does not end an output of this model"),
        ({"sep": "1"}, "sep: "),
        ({"start": 1}, "start: Extra inputs"),
    ],
)
def test_a_tree_that_cannot_be_followed_is_refused(
    checkpoint: tuple[Path, transformers.PreTrainedModel], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match="--tree-decode-config .*" + words):
        serve(checkpoint[0], written(tmp_path, **changes))


def test_a_file_that_is_none_is_refused(checkpoint: tuple[Path, transformers.PreTrainedModel], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        serve(checkpoint[0], str(tmp_path / "none.json"))
    (tmp_path / "text").write_text("{")
    with pytest.raises(ConfigError, match="Invalid JSON"):
        serve(checkpoint[0], str(tmp_path / "text"))


def test_a_large_tree_costs_a_look_up(processor: PrefixTree) -> None:
    assert processor.after(np.array([10, 11], np.int32)).tolist() == [2, 13, 14]
    assert processor.after(np.arange(100_000, dtype=np.int32)).tolist() == [END]
