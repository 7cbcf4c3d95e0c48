"""Verification of drafts: the target's distribution, whatever was drafted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.helpers.statistics import chi_squared

from fwk.interfaces.sampling import SamplingContext, SamplingRows
from fwk.interfaces.speculative import Acceptance
from fwk_sampling.torch_sampler.sampler import TorchSampler
from fwk_speculative.drafting.acceptance import EXACT, accepted, rejection_logits, replaces_picks, uniform_draws
from fwk_speculative.drafting.draft_tree import DraftTree

SAMPLES = 20_000


def round_up(p: float) -> float:
    """The rate at which a draft of probability p is kept with a single threshold of 0.3."""
    return 1.0 if p >= 0.29 else p


def test_a_chain_is_kept_up_to_the_first_difference() -> None:
    assert accepted([], [5]) == [5]
    assert accepted([1, 2, 3], [1, 2, 3, 4]) == [1, 2, 3, 4]
    assert accepted([1, 2, 3], [1, 9, 3, 4]) == [1, 9]
    assert accepted([1, 2, 3], [9, 2, 3, 4]) == [9]


@pytest.mark.gate(1)
@pytest.mark.parametrize("sharpness", [0.3, 3.0])
def test_drawn_drafts_leave_the_targets_distribution(sharpness: float) -> None:
    vocab = 8
    rng = np.random.default_rng(1)
    target = torch.tensor(rng.normal(0, 2, vocab), dtype=torch.float32)
    target[3] = -torch.inf
    proposal = torch.softmax(torch.tensor(rng.normal(0, sharpness, vocab)), 0)
    drafts = torch.tensor(rng.choice(vocab, SAMPLES, p=proposal.numpy()))
    seeds = rng.integers(0, 2**63, SAMPLES).astype(np.uint64)
    positions = np.full(SAMPLES, 7)
    draws = torch.from_numpy(uniform_draws(seeds, positions))
    logits = rejection_logits(target.expand(SAMPLES, -1), drafts, proposal.float().expand(SAMPLES, -1), draws)
    sampler = TorchSampler(SamplingContext(vocab, 1, torch.device("cpu"), ()))
    picked = sampler.sample(logits, SamplingRows(np.zeros(SAMPLES, bool), seeds, positions, False)).numpy()
    p = torch.softmax(target, 0).numpy()
    counts = np.bincount(picked, minlength=vocab)
    assert chi_squared(counts, p * SAMPLES) < 24.3  # 7 degrees of freedom less one impossible: p = 0.0005
    kept = float((picked == drafts.numpy()).mean())
    overlap = float(np.minimum(p, proposal.numpy()).sum())
    assert kept == pytest.approx(overlap, abs=0.02)  # the paper's acceptance rate: 1 - total variation


@pytest.mark.gate(3)
@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        (Acceptance(), lambda p: p),
        (Acceptance(scale=0.5), lambda p: min(1, 2 * p)),
        (Acceptance(single=0.29), round_up),
    ],
)
@pytest.mark.parametrize("draft", [0, 1, 2])
def test_thresholds_keep_as_often_as_they_say_and_all_that_exact_sampling_keeps(
    acceptance: Acceptance, expected: Callable[[float], float], draft: int
) -> None:
    p = np.array([0.6, 0.3, 0.1])
    seeds, positions = np.arange(SAMPLES, dtype=np.uint64), np.full(SAMPLES, 3)
    draws = torch.from_numpy(uniform_draws(seeds, positions))
    logits = torch.from_numpy(np.log(p)).float().expand(SAMPLES, -1)
    drafts = torch.full((SAMPLES,), draft)
    sampler = TorchSampler(SamplingContext(3, 1, torch.device("cpu"), ()))
    picked = sampler.sample(logits, SamplingRows(np.zeros(SAMPLES, bool), seeds, positions, False))
    wanted = p * (1 - expected(p[draft])) / (1 - p[draft])  # a rejected place: the target's proportions
    wanted[draft] = expected(p[draft])
    settled = torch.where(replaces_picks(logits, drafts, draws, acceptance), drafts, picked)
    assert np.bincount(settled.numpy(), minlength=3) / SAMPLES == pytest.approx(wanted, abs=0.012)
    for q in (torch.softmax(logits, 1), torch.tensor([0.2, 0.2, 0.6]).expand(SAMPLES, -1)):
        exact, relaxed = (
            rejection_logits(logits, drafts, q, draws, rule).softmax(1)[:, draft] == 1 for rule in (EXACT, acceptance)
        )
        assert bool((relaxed | ~exact).all())
    assert not replaces_picks(logits, drafts, draws, EXACT).any()


def test_draws_are_uniform_and_independent_of_place_and_seed() -> None:
    seeds = np.arange(SAMPLES, dtype=np.uint64)
    for positions in (np.zeros(SAMPLES, np.int64), np.arange(SAMPLES)):
        draws = uniform_draws(seeds, positions)
        assert ((draws >= 0) & (draws < 1)).all()
        counts = np.histogram(draws, bins=20, range=(0, 1))[0]
        assert chi_squared(counts, np.full(20, SAMPLES / 20)) < 45.3  # 19 degrees of freedom: p = 0.0006


def test_a_tree_knows_its_depths_and_who_sees_whom() -> None:
    tree = DraftTree([10, 11, 12, 13, 14], [-1, -1, 0, 2, 1])
    assert tree.depths.tolist() == [0, 0, 1, 2, 1]
    assert tree.sees[3].tolist() == [True, False, True, True, False]
    assert (tree.child(-1, 11), tree.child(0, 12), tree.child(0, 11)) == (1, 2, None)
    cut = DraftTree([10, 11], [-1, -1, 0, 2, 1])
    assert cut.parents == [-1, -1]
    with pytest.raises(ValueError, match="draft 0 of a tree names 1 as its parent"):
        DraftTree([10, 11], [1, -1])
