"""Steps that are launched while drafts are being verified: the device alone knows how long its sequences are."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.pretend_cuda import EXACT, JOURNAL, Steps, pretended, triton_kernels
from torch import Tensor

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.interfaces.speculative import Drafts, DraftView
from fwk.types import EngineStats
from fwk.worker import drafting
from fwk.worker.in_flight import InFlight, Launched
from fwk.worker.inputs import InputBuffers
from fwk_attention.triton_paged import backend
from fwk_kit.testing.serving import TINY
from fwk_speculative.ngram.decoder import NgramDecoder

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="its kernels run in Triton's interpreter"),
]

PROMPTS = [list(range(40, 53)), [5, 5, 6]]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 256,
    "max_running_requests": 2,
    "chunked_prefill_size": 16,
    **EXACT,
}
NGRAM: dict[str, Any] = {
    "attention_backend": "triton",
    "speculative_algorithm": "ngram",
    "speculative_num_draft_tokens": 3,
    "speculative_adaptive": False,
}


def asks(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 14, "temperature": 0.0, "ignore_eos": True, **more})


EAGER = {"disable_cuda_graph": True}
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "captured": (asks(), {}),
    "eager": (asks(), EAGER),
    "of adaptive depth": (asks(), {**EAGER, "speculative_adaptive": True}),
    "keys in parts": (asks(), {**EAGER, "triton_attention_split_tile_size": 16}),
    "that end early": ([asks(max_tokens=5), asks()], EAGER),
    "log-probabilities": ([asks(logprobs=2), asks()], EAGER),
    "alongside a sampled one": ([asks(), asks(temperature=0.9, seed=3)], EAGER),
    "alongside a grammar": ([asks(), asks(grammar=GrammarRequest("regex", "(ab|ac){20}"))], EAGER),
    "pre-empted": (asks(max_tokens=24), {**EAGER, "max_total_tokens": 48, "prefix_cache": "none"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    (made / "config.json").write_text(json.dumps(TINY))
    return made


Said = list[tuple[list[int], list[float]]]


def said(llm: fwk.LLM, sampling: Any) -> tuple[Said, EngineStats]:
    done = llm.generate(PROMPTS, sampling)
    return [(one.token_ids, [found.logprob for found in one.logprobs or []]) for one in done], llm.engine.stats()


def on_cpu(model: Path, sampling: Any) -> Said:
    with fwk.LLM(str(model), device="cpu", **OPTIONS) as llm:
        return said(llm, sampling)[0]


def foretell(patch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Have the decoder know what is coming, and be wrong about one token in six."""

    def propose(self: NgramDecoder, view: DraftView) -> Drafts:
        most = np.minimum(view.max_drafts, self._depth.of(view.slots)) + view.ahead
        rows = zip(view.slots.tolist(), view.num_tokens.tolist(), most.tolist(), strict=True)
        return Drafts([continued(view.token_ids[slot, :length].tolist(), count) for slot, length, count in rows])

    def continued(known: list[int], count: int) -> list[int]:
        text = next((text for text in texts if text[: len(known)] == known), known)
        places = range(len(known), min(len(known) + count, len(text)))
        return [text[i] if i % 6 else (text[i] + 1) % TINY["vocab_size"] for i in places]

    patch.setattr(NgramDecoder, "propose", propose)


def elsewhere(
    model: Path, sampling: Any, patch: pytest.MonkeyPatch, wanted: Said, **options: Any
) -> tuple[Said, EngineStats, Steps]:
    steps = Steps(patch)
    foretell(patch, [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, wanted, strict=True)])
    with (
        triton_kernels(),
        pretended() as plugins,
        fwk.LLM(str(model), plugins=plugins, device="pretended", **OPTIONS | NGRAM | options) as llm,
    ):
        JOURNAL.clear()
        steps.halves.clear()
        return *said(llm, sampling), steps


def num_overlapped(steps: Steps) -> int:
    """How often two steps were in flight."""
    in_flight, count = 0, 0
    for half, _ in steps.halves:
        in_flight += 1 if half == "launch" else -1
        count += in_flight == 2
    return count


def check(found: Said, wanted: Said, stats: EngineStats, steps: Steps) -> None:
    for mine, other in zip(found, wanted, strict=True):
        assert mine[0] == other[0]
        assert mine[1] == pytest.approx(other[1], abs=1e-4)
    assert JOURNAL.faults == []
    assert max(steps.waits("launch")) == 0, dict(JOURNAL.syncs)
    assert max(steps.waits("collect")) == 1, dict(JOURNAL.syncs)
    assert JOURNAL.of_kind("blocking") == {}
    assert JOURNAL.of_kind("pageable") == {}
    assert 0.4 * stats.draft_tokens < stats.accepted_draft_tokens < stats.draft_tokens
    assert num_overlapped(steps) > 3


@pytest.mark.parametrize("name", ASKED)
def test_steps_run_ahead_of_drafts(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sampling, options = ASKED[name]
    wanted = on_cpu(folder, sampling)
    found, stats, steps = elsewhere(folder, sampling, monkeypatch, wanted, **options)
    check(found, wanted, stats, steps)
    assert (stats.preemptions > 0) == (name == "pre-empted")


def nothing_is_rejected(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(InputBuffers, "_shorten", lambda *_: None)


def attention_plans_for_all_drafts(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(backend, "shortened", lambda plan, batch: plan)


def the_newest_token_is_the_first_row(patch: pytest.MonkeyPatch) -> None:
    real = InFlight._accept

    def accept(self: InFlight, step: Launched, picked: Tensor) -> None:
        before = self.newest.clone()
        real(self, step, picked)
        self.newest.copy_(before)

    patch.setattr(InFlight, "_accept", accept)


def drafts_begin_where_the_text_is_known(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drafting, "_after", lambda tokens, verified: tokens)


@pytest.mark.parametrize(
    "mutate",
    [
        nothing_is_rejected,
        attention_plans_for_all_drafts,
        the_newest_token_is_the_first_row,
        drafts_begin_where_the_text_is_known,
    ],
)
def test_what_would_be_wrong_is_noticed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, mutate: Callable[[pytest.MonkeyPatch], None]
) -> None:
    wanted = on_cpu(folder, asks(logprobs=2))
    mutate(monkeypatch)

    def serve() -> None:
        found, stats, steps = elsewhere(folder, asks(logprobs=2), monkeypatch, wanted, **EAGER)
        check(found, wanted, stats, steps)

    with pytest.raises(AssertionError):
        serve()
