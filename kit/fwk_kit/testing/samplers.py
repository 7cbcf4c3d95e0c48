"""What every sampler must do."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fwk.interfaces.sampling import Sampler, SamplerSpec, SamplingContext, SamplingRows
from fwk.plugins import Registered
from fwk_kit.testing.served import ServedSuite
from fwk_native.thread_pool import ThreadPool

INF = float("inf")


def rows_of(seeds: Any, positions: Any, is_greedy: Any = None) -> SamplingRows:
    """How to pick, per row."""
    seeds = np.asarray(seeds).astype(np.uint64)
    greedy = np.zeros(len(seeds), bool) if is_greedy is None else np.asarray(is_greedy)
    return SamplingRows(greedy, seeds, np.asarray(positions, np.int64), bool(greedy.all()))


def chi_square_is_plausible(counts: np.ndarray, expected: np.ndarray) -> bool:
    """Whether the statistic lies within 4 standard deviations of its mean (Wilson and Hilferty's cube root)."""
    freedom = len(expected) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    return abs(z) < 4


def logits_of(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    """Random logits, every third row truncated."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    logits[::3, vocab_size // 4 :] = -INF
    return logits


class SamplerSuite(ServedSuite):
    """The right distribution, a pick that depends on its own row alone, and nothing impossible ever picked."""

    family = "samplers"
    interface = Sampler
    num_picks: ClassVar[int] = 8000
    """Drawn of each distribution; fewer where a pick takes an interpreter a hundredth of a second."""

    def sample(self, item: Registered, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Pick with a sampler that has seen nothing before."""
        context = SamplingContext(logits.shape[1], 8, torch.device("cpu"), (), self.given(item), ThreadPool())
        given = logits.clone()
        with torch.inference_mode():
            picks = self.make(item, context).sample(given, rows)
        assert torch.equal(given.nan_to_num(9.0), logits.nan_to_num(9.0)), "sample() changed the logits"
        assert picks.dtype == torch.int64
        assert picks.shape == (len(logits),)
        return picks

    def exercise(self, item: Registered) -> None:
        self.test_greedy_takes_the_first_of_equals(item)

    def test_greedy_takes_the_first_of_equals(self, item: Registered) -> None:
        logits = torch.zeros(3, 300)
        logits[0, [7, 200]] = 1.0
        logits[1, 299] = 0.5
        assert self.sample(item, logits, rows_of([1, 2, 3], [0, 5, 9], [True] * 3)).tolist() == [7, 299, 0]

    def test_picks_follow_the_distribution(self, item: Registered) -> None:
        for logits in (torch.randn(7, generator=torch.Generator().manual_seed(1)), torch.zeros(64)):
            seeds, positions = np.divmod(np.arange(self.num_picks), 100)
            picks = self.sample(item, logits.expand(self.num_picks, -1).contiguous(), rows_of(seeds, positions))
            counts = np.bincount(picks.numpy(), minlength=len(logits))
            assert chi_square_is_plausible(counts, logits.double().softmax(0).numpy() * self.num_picks), counts

    def test_what_was_truncated_is_never_picked(self, item: Registered) -> None:
        logits = torch.full((2000, 500), -INF)
        kept = [0, 17, 499]
        logits[:, kept] = torch.tensor([1.0, 0.0, 0.5])
        picks = self.sample(item, logits, rows_of(np.full(2000, 3), np.arange(2000))).numpy()
        counts = np.array([(picks == token).sum() for token in kept])
        assert counts.sum() == 2000, "a token of logit -inf was picked"
        assert chi_square_is_plausible(counts, logits[0, kept].double().softmax(0).numpy() * 2000)

    def test_a_pick_is_the_same_alone_and_in_any_batch(self, item: Registered) -> None:
        logits, count = logits_of(24, 12_345), 24
        rows = rows_of(np.arange(count) * 7 + 2**40, np.arange(count) * 3, np.arange(count) % 5 == 0)
        together = self.sample(item, logits, rows)
        order = np.random.default_rng(0).permutation(count)
        shuffled = rows_of(rows.seeds[order], rows.positions[order], rows.is_greedy[order])
        assert torch.equal(self.sample(item, logits[torch.from_numpy(order)], shuffled), together[order])
        for i in range(count):
            one = rows_of(rows.seeds[i : i + 1], rows.positions[i : i + 1], rows.is_greedy[i : i + 1])
            assert self.sample(item, logits[i : i + 1], one).item() == together[i]

    def test_earlier_calls_change_nothing(self, item: Registered) -> None:
        context = SamplingContext(50, 8, torch.device("cpu"), (), self.given(item), ThreadPool())
        sampler: Sampler = self.make(item, context)
        logits, rows = logits_of(6, 50), rows_of(range(6), range(6))
        first = sampler.sample(logits.clone(), rows)
        sampler.sample(logits_of(3, 50, 9), rows_of([9, 9, 9], [1, 2, 3]))
        assert torch.equal(sampler.sample(logits.clone(), rows), first)

    def test_the_same_logits_may_come_with_other_numbers(self, item: Registered) -> None:
        context = SamplingContext(50, 8, torch.device("cpu"), (), self.given(item), ThreadPool())
        sampler: Sampler = self.make(item, context)
        for greedy, dtype in product((True, False), (torch.bfloat16, torch.float16)):
            logits = logits_of(3, 50).to(dtype)
            for best in (7, 31, 7):
                logits.zero_()[:, best] = 1000.0
                assert sampler.sample(logits, rows_of(range(3), range(3), [greedy] * 3)).tolist() == [best] * 3

    def test_seed_and_position_matter(self, item: Registered) -> None:
        logits = torch.zeros(64, 1000)
        for rows in (rows_of(range(64), [5] * 64), rows_of([5] * 64, range(64))):
            assert len(set(self.sample(item, logits, rows).tolist())) > 32

    def test_positions_may_come_late(self, item: Registered) -> None:
        declaration = item.declaration
        assert isinstance(declaration, SamplerSpec)
        if not declaration.late_positions:
            pytest.skip("it does not declare late_positions")
        logits, seeds, fewer = torch.zeros(24, 1000), np.arange(24), np.arange(24) % 4
        late = rows_of(seeds, 5 + 3 * seeds + fewer, seeds % 5 == 0)
        late.num_fewer, late.most_fewer = torch.from_numpy(fewer), 5
        assert torch.equal(
            self.sample(item, logits, late), self.sample(item, logits, rows_of(seeds, 5 + 3 * seeds, seeds % 5 == 0))
        )

    def test_broken_rows_say_so(self, item: Registered) -> None:
        """NaN, +inf, or nothing left: -1, greedy or not, and the others stand."""
        logits = torch.zeros(5, 5000)
        logits[0, 3], logits[1, 3], logits[2] = float("nan"), INF, -INF
        logits[3, 8] = logits[4, 8] = 60.0
        for greedy in (True, False):
            picks = self.sample(item, logits, rows_of(range(5), range(5), [greedy] * 5))
            assert picks.tolist() == [-1, -1, -1, 8, 8]

    def test_no_rows(self, item: Registered) -> None:
        assert self.sample(item, torch.zeros(0, 40), rows_of([], [])).tolist() == []
