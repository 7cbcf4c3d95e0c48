"""The last layer continues with the wanted tokens alone: every reply is what it was without that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.plugins import discover, find, load_object
from tests.helpers.checkpoints import make_checkpoint

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

PROMPTS = [[5, 6, 7], [9, 10, 11, 12] * 20, [30 + i for i in range(40)]]
KINDS = {"llama": "llama", "qwen3": "qwen3", "gemma3": "gemma3"}


def sampling(*, prompt_logprobs: bool) -> list[SamplingParams]:
    """One of the requests wants log-probabilities of its prompt, or none does."""
    return [
        SamplingParams(
            max_tokens=5, temperature=0.7, seed=i, logprobs=2, prompt_logprobs=2 if prompt_logprobs and i == 1 else None
        )
        for i in range(len(PROMPTS))
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("kinds")
    for kind in KINDS:
        make_checkpoint(root / kind, kind)
    return {path.name: path for path in root.iterdir()}


class Rows:
    """A layer's MLP, and the rows it was given."""

    def __init__(self, mlp: Any) -> None:
        self.mlp, self.counts = mlp, list[int]()

    def __call__(self, x: Tensor) -> Tensor:
        self.counts.append(len(x))
        return self.mlp(x)


def serve(folder: Path, asked: list[SamplingParams], **options: Any) -> tuple[list[Any], list[list[int]]]:
    """All that the requests are told, and the rows that each layer's MLP was given while they ran."""
    settings = {"max_total_tokens": 1024, "prefix_cache": "none", "chunked_prefill_size": 32, "max_start_tokens": 64}
    settings |= options
    with fwk.LLM(str(folder), **settings) as llm:
        layers = llm.engine.executor._worker._runner.model.model.layers  # type: ignore[attr-defined]
        watched = [Rows(layer.mlp) for layer in layers]
        for layer, rows in zip(layers, watched, strict=True):
            layer.mlp = rows
        done = llm.generate(PROMPTS, asked)
        return [(x.token_ids, x.logprobs, x.prompt_logprobs) for x in done], [rows.counts for rows in watched]


def all_rows(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Have the model's last layer compute all tokens, as any model may."""
    monkeypatch.setattr(load_object(find(discover(), "models", kind)), "prunes_last_layer", False)


@pytest.mark.gate(2)
@pytest.mark.parametrize("prompt_logprobs", [False, True], ids=["", "with a prompt's log-probabilities"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_that_is_told_is_the_same(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, kind: str, prompt_logprobs: bool
) -> None:
    asked = sampling(prompt_logprobs=prompt_logprobs)
    recorded, _ = serve(folders[kind], asked)
    eager, rows = serve(folders[kind], asked, disable_cuda_graph=True)
    all_rows(monkeypatch, kind)
    wanted, all_of_them = serve(folders[kind], asked, disable_cuda_graph=True)
    assert recorded == wanted
    assert eager == wanted
    assert (wanted[1][2] is not None) == prompt_logprobs
    assert len({tuple(counts) for counts in all_of_them}) == 1
    if prompt_logprobs:  # they are made of all hidden states
        assert rows == all_of_them
        return
    assert rows[:-1] == all_of_them[:-1]
    assert rows[-1][0] < rows[-2][0]
