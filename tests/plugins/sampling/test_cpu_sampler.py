"""The native sampler against temperature and truncation written out in float64, on every instruction set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.helpers.isas import isa_params

import fwk_native as native
from fwk.interfaces.sampling import SamplingContext, SamplingRows
from fwk.types import SamplingParams
from fwk_native.thread_pool import ThreadPool
from fwk_sampling._common.uniform import uniform
from fwk_sampling.cpu_sampler.sampler import CpuSampler

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

INF = float("inf")


@dataclass(frozen=True)
class Wanted:
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0


WANTED = [
    Wanted(0.8, 50, 0.95),
    Wanted(1.3, 50),
    Wanted(0.7, -1, 0.9),
    Wanted(3.0, -1, 0.99),
    Wanted(0.5, 1000, 0.5),
    Wanted(1.0, 40_000, 0.999),
    Wanted(1.0, 1),
    Wanted(1.0, -1, 1e-9),
    Wanted(2.0, -1, 1.0, 0.05),
    Wanted(2.0, 30, 0.9, 0.3),
    Wanted(1.5, -1, 0.8, 0.001),
    Wanted(0.9),
    Wanted(1e-7),
]


def kept_mass(row: np.ndarray, wanted: Wanted) -> np.ndarray:
    """[vocab_size] float64: what each token's chance is in proportion to."""
    y = (row - row.max()) / max(wanted.temperature, 1e-5)
    mass = np.exp(y)
    if 0 < wanted.top_k < len(row):
        mass[y < np.sort(y)[-wanted.top_k]] = 0
    if wanted.top_p < 1:
        order = np.argsort(-y, kind="stable")
        above = np.cumsum(mass[order]) - mass[order]
        last = np.count_nonzero(above < wanted.top_p * mass.sum()) - 1
        mass[y < y[order[max(last, 0)]]] = 0
    if wanted.min_p > 0:
        mass[y < math.log(wanted.min_p)] = 0
    if wanted.temperature < 1e-5 or wanted.top_k == 1 or np.exp(y).sum() * wanted.top_p <= 1:
        mass[np.arange(len(y)) != y.argmax()] = 0  # room for one, of equals the first
    return mass


def pick(logits: torch.Tensor, wanted: list[Wanted], positions: np.ndarray, threads: int = 1) -> np.ndarray:
    """One token for each row, of a slot with these settings."""
    sampler = CpuSampler(
        SamplingContext(logits.shape[1], len(wanted), torch.device("cpu"), (), threads=ThreadPool(threads))
    )
    for slot, of in enumerate(wanted):
        sampler.add(slot, SamplingParams(temperature=of.temperature, top_k=of.top_k, top_p=of.top_p, min_p=of.min_p))
    count = len(logits)
    slots = np.arange(count) % len(wanted)
    rows = SamplingRows(np.zeros(count, bool), np.full(count, 7, np.uint64), positions, False, slots)
    return sampler.sample(logits, rows).numpy()


def check(row: torch.Tensor, wanted: Wanted, count: int = 40) -> None:
    """Every pick is the token at which the exact cumulative distribution passes the draw, but for rounding."""
    positions = np.arange(count)
    picks = pick(row.expand(count, -1), [wanted], positions)
    mass = kept_mass(row.double().numpy(), wanted)
    cdf = np.cumsum(mass) / mass.sum()
    draws = uniform(np.full(count, 7, np.uint64), positions)
    assert (mass[picks] > 0).all()
    before = np.where(picks > 0, cdf[picks - 1], 0.0)
    assert (before - 1e-5 <= draws).all()
    assert (draws <= cdf[picks] + 1e-5).all()


@pytest.mark.gate(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_picks_where_the_distribution_passes_the_draw(wanted: Wanted, dtype: torch.dtype) -> None:
    for vocab_size, spread in ((49_152, 3.0), (5003, 1.0), (9, 2.0)):
        row = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
        if dtype == torch.bfloat16:  # equals at the k-th place and at the nucleus' end are the rule
            check(row.to(dtype), wanted, 10)
        else:
            check(row, wanted)


@pytest.mark.parametrize("isa", isa_params())
def test_every_instruction_set(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    for wanted in WANTED:
        row = torch.randn(3001, generator=torch.Generator().manual_seed(1)) * 2
        check(row.bfloat16(), wanted, 5)
        check(row, wanted, 5)
        row[torch.rand(3001, generator=torch.Generator().manual_seed(2)) < 0.995] = -INF
        check(row, wanted, 5)


@pytest.mark.parametrize("wanted", WANTED, ids=str)
def test_plateaus_and_far_apart_logits(wanted: Wanted) -> None:
    check(torch.zeros(20_000), wanted, 5)
    row = torch.full((6000,), -3e38)
    row[[5, 17]] = 3e38
    check(row, wanted, 5)


def test_a_pick_is_the_same_in_any_batch_and_with_any_number_of_threads() -> None:
    logits = torch.randn(39, 20_000, generator=torch.Generator().manual_seed(3)) * 2
    positions = np.arange(39) * 5
    together = pick(logits, WANTED, positions, threads=3)
    assert np.array_equal(together, pick(logits, WANTED, positions, threads=1))
    for i in range(39):
        alone = pick(logits[i : i + 1], [WANTED[i % len(WANTED)]], positions[i : i + 1])
        assert alone[0] == together[i]


def test_rows_that_processors_have_finished_are_not_cut_again() -> None:
    sampler = CpuSampler(SamplingContext(4, 1, torch.device("cpu"), (), threads=ThreadPool(1)))
    sampler.add(0, SamplingParams(temperature=0.01, top_k=1))
    logits = torch.tensor([[1.0, 1.1, 1.0, 1.0]]).expand(300, -1)
    seeds, positions = np.zeros(300, np.uint64), np.arange(300)
    rows = SamplingRows(np.zeros(300, bool), seeds, positions, False, np.where(positions < 150, 0, -1))
    picks = sampler.sample(logits, rows).numpy()
    assert set(picks[:150]) == {1}
    assert set(picks[150:]) == {0, 1, 2, 3}


def test_broken_rows_get_minus_one_whatever_is_wanted() -> None:
    for bad in ([1.0, float("nan"), 0.0], [1.0, INF, 0.0], [-INF] * 3):
        for wanted in WANTED:
            assert pick(torch.tensor([bad]), [wanted], np.arange(1)).tolist() == [-1]
