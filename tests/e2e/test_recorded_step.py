"""Captured steps through the whole engine: the tokens of computing operator by operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.interfaces.graphs import StepOutput, StepSize
from fwk.types import ForwardBatch
from fwk.worker.graphs.step_graphs import StepModel
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.quantised import gguf_twins

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 20, [3], [30 + i for i in range(40)], [8, 8, 9]]
SAMPLING = [
    SamplingParams(max_tokens=4 + 9 * i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(len(PROMPTS))
]
"""They end one after the other, so the steps' sizes go down."""

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "gemma3": ("gemma3", {}),
    "sliding window": ("mistral", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    for name, (kind, changes) in {**KINDS, "MoE": ("qwen3_moe", {"moe_intermediate_size": 128})}.items():
        make_checkpoint(root / name, kind, **changes)
    return {path.name: path for path in root.iterdir()}


class Counted(StepModel):
    """The worker's own, and how it was asked."""

    def __init__(self, steps: StepModel) -> None:
        self.model, self.steps, self.sizes = steps.model, steps, list[StepSize]()
        self.replayed = 0
        graph = getattr(steps, "graph", None)
        if graph is not None:
            self.replay, graph.replay = graph.replay, self.count

    def count(self, size: StepSize) -> StepOutput:
        self.replayed += 1
        return self.replay(size)

    def run(self, batch: ForwardBatch) -> StepOutput:
        self.sizes.append(StepSize.of(batch))
        return self.steps.run(batch)


def serve(folder: Path, **options: Any) -> tuple[list[list[int]], str, Counted]:
    """Tokens, how steps run, and those that ran."""
    settings = {"max_total_tokens": 2048, "max_running_requests": 16, "check_blocks": True, **options}
    with fwk.LLM(str(folder), **settings) as llm:
        runner = llm.engine.executor._worker._runner  # type: ignore[attr-defined]
        runner.model = counted = Counted(runner.model)
        tokens = [done.token_ids for done in llm.generate(PROMPTS, SAMPLING)]
        tokens += [done.token_ids for done in llm.generate(PROMPTS[:2], SAMPLING[:2])]
        return tokens, llm.engine.info.chosen["step"], counted


@pytest.mark.gate(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_the_same(folders: dict[str, Path], kind: str, dtype: str) -> None:
    captured, how, steps = serve(folders[kind], dtype=dtype)
    assert how == "captured"
    assert steps.replayed == len(steps.sizes)
    assert {size.num_seqs for size in steps.sizes} == {1, 2, 3, 4, 5}
    assert any(size.num_tokens > size.num_seqs for size in steps.sizes)
    eager, how, steps = serve(folders[kind], dtype=dtype, disable_cuda_graph=True)
    assert how == "eager (--disable-cuda-graph)"
    assert steps.replayed == 0
    assert captured == eager


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "options",
    [
        {"executor": "threaded"},
        {"speculative_algorithm": "ngram"},
        {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 2},
        {"chunked_prefill_size": 7, "max_prefill_tokens": 24},
        {"max_total_tokens": 160},
        {"cpu_threads": 1},
    ],
    ids=str,
)
def test_tokens_are_the_same_with(folders: dict[str, Path], options: dict[str, Any]) -> None:
    captured, how, steps = serve(folders["llama"], **options)
    assert how == "captured"
    assert steps.replayed == len(steps.sizes)
    assert captured == serve(folders["llama"], **options, disable_cuda_graph=True)[0]


def test_parts_of_several_formats_are_captured(tmp_path: Path) -> None:
    """Q, K and V of a GGUF file, V in more bits: their results are put together by an operator."""
    path = gguf_twins({"v_proj": "Q8_0", "*": "Q5_0"}, tmp_path).path
    options: dict[str, Any] = {"quantization": "gguf", "dtype": "bfloat16"}
    captured, how, steps = serve(path, **options)
    assert how == "captured"
    assert steps.replayed == len(steps.sizes)
    assert captured == serve(path, **options, disable_cuda_graph=True)[0]


def test_larger_steps_than_asked_for_are_not_replayed(folders: dict[str, Path]) -> None:
    captured, _, steps = serve(folders["llama"], cuda_graph_max_bs=2)
    assert steps.replayed == sum(size.num_seqs <= 2 for size in steps.sizes) < len(steps.sizes)
    assert captured == serve(folders["llama"], disable_cuda_graph=True)[0]


def test_a_model_that_cannot_be_recorded_says_which_operator(folders: dict[str, Path]) -> None:
    _, how, steps = serve(folders["MoE"], moe_runner_backend="torch")
    assert how.startswith("eager (torch computes aten.")
    assert steps.replayed == 0


@pytest.mark.gate(1)
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_experts_are_captured(folders: dict[str, Path], quantization: str) -> None:
    options: dict[str, Any] = {"quantization": quantization, "dtype": "bfloat16"}
    captured, how, steps = serve(folders["MoE"], **options)
    assert how == "captured"
    assert steps.replayed == len(steps.sizes)
    assert captured == serve(folders["MoE"], **options, disable_cuda_graph=True)[0]


def test_how_many_sequences_are_captured_is_checked() -> None:
    with pytest.raises(ConfigError, match="cuda-graph-max-bs"):
        fwk.LLM(cuda_graph_max_bs=0)
