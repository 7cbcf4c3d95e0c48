"""Steps that leave out logits: the tokens, and whatever else is asked for, of steps that compute all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.interfaces.graphs import StepOutput
from fwk.types import ForwardBatch
from fwk.worker.graphs.step_graphs import StepModel
from tests.helpers.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 8, [3]]

WHOLE: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8, "seed": 3},
    "log-probabilities": {"logprobs": 2},
    "bias": {"logit_bias": {17: 2.0}},
    "penalty": {"frequency_penalty": 1.5},
}
"""What needs more logits than the largest."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    make_checkpoint(root / "llama", "llama")
    make_checkpoint(root / "gemma3", "gemma3")
    make_checkpoint(root / "capped", "gemma3", final_logit_softcapping=3.0)
    return {path.name: path for path in root.iterdir()}


class Watched(StepModel):
    """The worker's own, and of each step with logits whether some were left out."""

    def __init__(self, steps: StepModel) -> None:
        self.model, self.steps, self.left_out = steps.model, steps, list[bool]()

    def run(self, batch: ForwardBatch) -> StepOutput:
        hidden, logits = self.steps.run(batch)
        if logits is not None:
            self.left_out.append(bool(logits.isinf().any()))
        return hidden, logits


def serve(folder: Path, sampling: list[SamplingParams], **options: Any) -> tuple[list[Any], list[bool]]:
    """What is answered, and whether steps left something out."""
    settings = {"max_total_tokens": 2048, "max_running_requests": 16, "dtype": "bfloat16", **options}
    with fwk.LLM(str(folder), **settings) as llm:
        runner = llm.engine.executor._worker._runner  # type: ignore[attr-defined]
        runner.model = watched = Watched(runner.model)
        done = llm.generate(PROMPTS, sampling)
        return [(one.token_ids, one.logprobs, one.prompt_logprobs) for one in done], watched.left_out


def greedy(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, "temperature": 0.0, "ignore_eos": True, **settings})


@pytest.mark.gate(2)
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize(
    "options", [{}, {"disable_cuda_graph": True}, {"speculative_algorithm": "ngram"}, {"dtype": "float32"}], ids=str
)
def test_greedy_steps_leave_out_logits_and_choose_the_same(
    folders: dict[str, Path], kind: str, options: dict[str, Any]
) -> None:
    sampling = [greedy(prompt_logprobs=1), greedy(max_tokens=17), greedy()]
    found, left_out = serve(folders[kind], sampling, **options)
    wanted, none_left_out = serve(folders[kind], sampling, screen_head=False, **options)
    assert found == wanted
    assert any(left_out)
    assert not any(none_left_out)


@pytest.mark.gate(2)
@pytest.mark.parametrize("asked", WHOLE)
def test_who_needs_more_has_all_logits(folders: dict[str, Path], asked: str) -> None:
    sampling = [greedy(), greedy(**WHOLE[asked]), greedy(max_tokens=14)]
    found, left_out = serve(folders["llama"], sampling)
    assert found == serve(folders["llama"], sampling, screen_head=False)[0]
    assert not any(left_out[:10]), "while it ran"
    assert any(left_out[10:]), "afterwards"


def test_a_head_whose_logits_are_changed_computes_all(folders: dict[str, Path]) -> None:
    with fwk.LLM(str(folders["capped"]), max_total_tokens=256, dtype="bfloat16") as llm:
        model = llm.engine.executor._worker._runner.model.model  # type: ignore[attr-defined]
        assert model.head.head_weights is model.head.weights
