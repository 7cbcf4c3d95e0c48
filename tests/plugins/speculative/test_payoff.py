"""Drafting is turned off where it does not pay, and tried again by later sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.helpers.draft_heads import save_eagle3
from tests.helpers.tiny import save_llama

import fwk
from fwk import SamplingParams
from fwk.interfaces.speculative import TargetStep, Verified
from fwk_speculative._common.payoff import CHECKS, TRIES, Payoff
from fwk_speculative.eagle.head import Eagle3Head


def step(payoff: Payoff, accepted: list[int], drafts: int = 3) -> None:
    slots = np.arange(len(accepted))
    payoff.observe(Verified(slots, np.full(len(slots), drafts), np.array(accepted)))


def is_off(payoff: Payoff, slot: int = 0) -> bool:
    return bool(payoff.is_off(np.array([slot]))[0])


def test_it_is_turned_off_after_a_few_checks() -> None:
    payoff = Payoff(4, is_on=True)
    for _ in range(CHECKS - 1):
        step(payoff, [0])
        assert not is_off(payoff)
    step(payoff, [0])
    assert is_off(payoff)


def test_what_pays_for_one_does_not_for_many() -> None:
    alone, among = Payoff(4, is_on=True), Payoff(64, is_on=True)
    for _ in range(CHECKS):
        step(alone, [1])
        step(among, [1] * 32)
    assert not is_off(alone)
    assert is_off(among)


def test_steps_without_drafts_say_nothing() -> None:
    payoff = Payoff(4, is_on=True)
    for _ in range(3 * CHECKS):
        step(payoff, [0], drafts=0)
    assert not is_off(payoff)


def test_later_sequences_try_now_and_then() -> None:
    payoff = Payoff(4, is_on=True)
    for _ in range(CHECKS):
        step(payoff, [0])
    tries = 0
    for _ in range(4 * TRIES):
        payoff.reset([0])
        tries += not is_off(payoff)
    assert tries == 4
    while is_off(payoff):
        payoff.reset([0])
    for _ in range(30):  # what is asked now is foretold
        payoff.reset([0])
        for _ in range(CHECKS):
            step(payoff, [3])
    assert not is_off(payoff)


def test_it_may_be_forbidden() -> None:
    payoff = Payoff(4, is_on=False)
    for _ in range(3 * CHECKS):
        step(payoff, [0])
    assert not is_off(payoff)


@pytest.mark.gate(1)
@pytest.mark.parametrize("is_adaptive", [True, False])
def test_a_head_computes_nothing_of_what_it_does_not_draft_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_adaptive: bool
) -> None:
    """A head that is never right: soon only the target runs, and its tokens are those without."""
    save_llama(tmp_path / "target", seed=1)
    save_eagle3(tmp_path / "head")
    seen: list[int] = []
    real = Eagle3Head.features

    def features(self: Eagle3Head, step: TargetStep) -> Any:
        seen.append(len(step.slots))
        return real(self, step)

    monkeypatch.setattr(Eagle3Head, "features", features)
    asked = SamplingParams(
        max_tokens=80, temperature=0.0, ignore_eos=True, logit_bias={1: 30.0}
    )  # not in its vocabulary
    head: dict[str, Any] = {"speculative_algorithm": "eagle3", "speculative_draft_model_path": str(tmp_path / "head")}
    with fwk.LLM(str(tmp_path / "target"), **head, speculative_adaptive=is_adaptive) as llm:
        found = llm.generate([[5, 6, 7]], asked)[0].token_ids
    assert found == [1] * 80
    assert (len(seen) < 60) == is_adaptive
