"""Steps with prompts replayed in pieces on a pretended device: the same tokens, few launches, what would be wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import JOURNAL, flashinfer_stand_in, pretended, serving

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.interfaces.graphs import StepOutput
from fwk.types import ForwardBatch
from fwk.worker.graphs.step_graphs import StepModel
from fwk_kit.testing.serving import TINY

pytestmark = interpreted

PROMPTS = [[1, 7, 3, 9] * 9, list(range(40, 75)), [5, 5, 6], [1, 7, 3, 9] * 9 + [4, 4]]
"""Together more than a step's tokens, so that some are computed in parts; the last begins as the first does."""
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "max_prefill_tokens": 64,
    "chunked_prefill_size": 40,
    "dtype": "float32",
    "check_blocks": True,
    "attention_backend": "flashinfer-stand-in",
    "operator_backend": "torch",
    "sampling_backend": "torch",
}
PIECES: dict[str, Any] = {"enable_piecewise_cuda_graph": True, "piecewise_cuda_graph_tokens": (4, 16, 32)}
LAUNCHES, FEW = 6, 6
"""For each layer: a piece, what stores K and V and reads them, and a copy with the padding; then what makes logits."""
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, top_k=20, seed=3, ignore_eos=True)


class Served:
    """What came of some requests on the pretended device, the second half of them after the first."""

    def __init__(self, folder: Path, sampling: Any = GREEDY, **options: Any) -> None:
        self.steps: list[tuple[int, int, int, bool]] = []
        """Of each step that is not replayed whole: its tokens, those of its pieces, launches, and if it mixes."""
        self.distance = 0.0
        """At most, of a hidden state in pieces from the same operator by operator."""
        settings: dict[str, Any] = OPTIONS | PIECES | options
        with (
            pytest.MonkeyPatch.context() as patch,
            flashinfer_stand_in(),
            serving(folder, **settings) as llm,
        ):
            patch.setattr(StepModel, "_run", self._counted(StepModel._run))
            self.info = llm.engine.info
            self.how = self.info.chosen["step"]
            self.tokens = generated(llm, sampling)
            self.syncs = dict(JOURNAL.syncs)
        self.faults = list(JOURNAL.faults)

    def _counted(self, real: Callable[..., StepOutput]) -> Callable[..., StepOutput]:
        def run(steps: StepModel, batch: ForwardBatch) -> StepOutput:
            before = JOURNAL.launches.total()
            found = real(steps, batch)
            launched = JOURNAL.launches.total() - before
            if batch.piece_tokens:  # computed again, operator by operator: what it stores is the same
                again: Any = steps.model.forward(batch)
                away = again.held - cast(Any, found[0]).held
                self.distance = max(self.distance, float(away.abs().max()))
            counts = np.diff(batch.query_start_np)
            mixes = bool((counts == 1).any() and (counts > 1).any())
            self.steps.append((batch.num_tokens, batch.piece_tokens, launched, mixes))
            return found

        return run


def generated(llm: fwk.LLM, sampling: Any) -> list[list[int]]:
    first = [done.token_ids for done in llm.generate(PROMPTS[:3], sampling)]
    return first + [done.token_ids for done in llm.generate(PROMPTS[2:], sampling)]


def on_cpu(folder: Path, sampling: Any = GREEDY, **options: Any) -> list[list[int]]:
    settings: dict[str, Any] = {**OPTIONS, "attention_backend": "torch", **options}
    settings.pop("piecewise_cuda_graph_tokens", None)
    with fwk.LLM(str(folder), device="cpu", **settings) as llm:
        return generated(llm, sampling)


@pytest.fixture(scope="module")
def wanted(tiny_folder: Path) -> list[list[int]]:
    return on_cpu(tiny_folder)


def test_prompts_in_pieces_say_the_same_in_few_launches(tiny_folder: Path, wanted: list[list[int]]) -> None:
    served = Served(tiny_folder)
    assert served.how.endswith("; prompts in pieces (3 numbers of tokens up to 32)")
    assert served.tokens == wanted
    assert served.distance < 1e-5
    assert served.faults == []
    assert [where for where in served.syncs if "in_flight" not in where] == [], "a launch waited"
    pieces = [step for step in served.steps if step[1]]
    assert any(mixes for *_, mixes in pieces), "none had prompts and next tokens"
    assert any(count < size for count, size, *_ in pieces), "none was padded"
    large = [(count, size, launched) for count, size, launched, _ in served.steps if count > 32]
    assert large, "none was larger than the largest size"
    assert all(size == 0 for _, size, _ in large)
    most = LAUNCHES * TINY["num_hidden_layers"] + FEW
    assert max(launched for _, _, launched, _ in pieces) <= most < min(launched for _, _, launched in large)


@pytest.mark.sweep
def test_what_pieces_take_is_left_free(tiny_folder: Path) -> None:
    with flashinfer_stand_in(), pretended() as plugins:
        graphs: list[int] = []
        for options in (OPTIONS, OPTIONS | PIECES):
            with fwk.LLM(str(tiny_folder), plugins=plugins, device="pretended", **options) as llm:
                graphs.append(llm.engine.info.memory["graphs"])
    assert graphs[0] < graphs[1]


WITH: dict[str, tuple[Any, dict[str, Any]]] = {
    "sampled": (SAMPLED, {}),
    "an attention that plans anew": (GREEDY, {"attention_backend": "torch"}),
    "n-gram drafts": (GREEDY, {"speculative_algorithm": "ngram"}),
    "shorter parts": (
        GREEDY,
        {"chunked_prefill_size": 16, "max_prefill_tokens": 16, "piecewise_cuda_graph_tokens": (4, 16)},
    ),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", WITH)
def test_it_goes_with(tiny_folder: Path, name: str) -> None:
    sampling, options = WITH[name]
    served = Served(tiny_folder, sampling, **options)
    assert served.tokens == on_cpu(tiny_folder, sampling, **options)
    assert served.distance < 1e-5
    assert served.faults == []
    assert any(size for _, size, *_ in served.steps)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"disable_cuda_graph": True}, "--enable-piecewise-cuda-graph and --disable-cuda-graph: nothing is captured"),
        ({"enable_piecewise_cuda_graph": False}, "--piecewise-cuda-graph-tokens: nothing is captured in pieces; add"),
        ({"piecewise_cuda_graph_tokens": (0,)}, "--piecewise-cuda-graph-tokens 0: a step has at least 1 token"),
        ({"piecewise_cuda_graph_tokens": (99999,)}, "--piecewise-cuda-graph-tokens 99999 is more than"),
        ({"piecewise_cuda_graph_max_tokens": 20}, "32 is more than --piecewise-cuda-graph-max-tokens 20"),
    ],
)
def test_what_cannot_be_is_refused(tiny_folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Served(tiny_folder, **options)


def test_on_a_cpu_it_is_refused(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--enable-piecewise-cuda-graph: on this device one capture serves steps"):
        on_cpu(tiny_folder, **PIECES)
