"""The sampler: right distribution, a pick that depends on its own row alone, and nothing impossible ever picked."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.interpreted import interpreted

import fwk_native as native
from fwk.interfaces.sampling import Sampler, SamplingContext, SamplingRows
from fwk.plugins import Registered
from fwk_kit.testing import SamplerSuite
from fwk_kit.testing.samplers import chi_square_is_plausible, rows_of
from fwk_native.thread_pool import ThreadPool
from fwk_sampling._common.uniform import uniform
from fwk_sampling.cpu_sampler.sampler import CpuSampler
from fwk_sampling.torch_sampler.sampler import TorchSampler, _place, sample_batch

INF = float("inf")


def needs_compiler(value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler"))


def on_cpu(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return TorchSampler(SamplingContext(logits.shape[1], 8, torch.device("cpu"), ())).sample(logits, rows)


def natively(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    return CpuSampler(SamplingContext(logits.shape[1], 8, torch.device("cpu"), (), threads=ThreadPool(1))).sample(
        logits, rows
    )


def in_triton(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    from fwk_sampling.triton_sampler.sampler import TritonSampler

    return TritonSampler(SamplingContext(logits.shape[1], 8, torch.device("cpu"), ())).sample(logits, rows)


WAYS = [on_cpu, sample_batch, needs_compiler(natively)]
EACH_WAY = pytest.mark.parametrize("sample", [*WAYS, pytest.param(in_triton, marks=interpreted)])
EACH_WAY_OF_MANY = pytest.mark.parametrize("sample", WAYS)
"""Without the interpreter, which takes minutes for thousands of rows: tests/contracts and test_triton.py ask it."""
Sample = Callable[[torch.Tensor, SamplingRows], torch.Tensor]


@pytest.mark.gate(3)
@EACH_WAY_OF_MANY
@pytest.mark.parametrize("vocab_size", [7, 1000])
def test_picks_follow_the_distribution(sample: Sample, vocab_size: int) -> None:
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    seeds, positions = np.divmod(np.arange(20_000), 100)
    picks = [
        sample(logits.expand(100, -1).contiguous(), rows_of(s, p))
        for s, p in zip(np.split(seeds, 200), np.split(positions, 200), strict=True)
    ]
    counts = np.bincount(torch.cat(picks).numpy(), minlength=vocab_size)
    assert chi_square_is_plausible(counts, logits.double().softmax(0).numpy() * 20_000)


def test_a_vocabulary_of_262144_loses_no_mass() -> None:
    logits = torch.zeros(1, 262_144)
    sampler = TorchSampler(SamplingContext(262_144, 1, torch.device("cpu"), ()))
    picks = np.array([sampler.sample(logits, rows_of([seed], [0])).item() for seed in range(3000)])
    by_id = np.bincount(picks // 16_384, minlength=16)
    by_class = np.bincount(picks % 16, minlength=16)
    for counts in (by_id, by_class):
        assert chi_square_is_plausible(counts, np.full(16, 3000 / 16))


@pytest.mark.gate(1)
@EACH_WAY_OF_MANY
def test_half_the_mass_in_tiny_pieces_is_found_half_the_time(sample: Sample) -> None:
    logits = torch.zeros(4, 262_144)
    logits[:, 1234] = np.log(262_143.0)
    picks = torch.cat([sample(logits, rows_of(range(i, i + 4), [0] * 4)) for i in range(0, 400, 4)])
    assert chi_square_is_plausible(np.array([(picks == 1234).sum(), (picks != 1234).sum()]), np.array([200.0, 200.0]))


def test_both_ways_agree_where_both_walk_the_tokens_in_order() -> None:
    logits = torch.full((200, 9000), -INF)
    logits[:, 5:300] = torch.randn(200, 295, generator=torch.Generator().manual_seed(1))
    rows = rows_of(np.arange(200), np.arange(200))
    assert torch.equal(on_cpu(logits, rows), sample_batch(logits, rows))


class OnADevice(SamplerSuite):
    """All rows are picked at once there."""

    plugin = "torch"

    def sample(self, item: Registered, logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
        given = logits.clone()
        picks = sample_batch(given, rows)
        assert torch.equal(given.nan_to_num(9.0), logits.nan_to_num(9.0))
        return picks


@pytest.mark.parametrize(
    "promise",
    [
        SamplerSuite.test_greedy_takes_the_first_of_equals,
        SamplerSuite.test_picks_follow_the_distribution,
        SamplerSuite.test_what_was_truncated_is_never_picked,
        SamplerSuite.test_a_pick_is_the_same_alone_and_in_any_batch,
        SamplerSuite.test_broken_rows_say_so,
    ],
    ids=lambda promise: promise.__name__,
)
def test_the_way_of_devices_keeps_the_contract(promise: Callable[[SamplerSuite, Registered], None]) -> None:
    promise(OnADevice(), OnADevice.registered())


@EACH_WAY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_reads_logits_of_any_precision(sample: Sample, dtype: torch.dtype) -> None:
    logits = torch.randn(3, 500).to(dtype)
    assert sample(logits, rows_of([0] * 3, [0] * 3, [True] * 3)).tolist() == logits.float().argmax(-1).tolist()


@EACH_WAY_OF_MANY
def test_impossible_tokens_are_never_picked(sample: Sample) -> None:
    generator = torch.Generator().manual_seed(5)
    for vocab_size in (3, 600, 2048):
        logits = torch.randn(300, vocab_size, generator=generator) * 3
        logits[torch.rand(300, vocab_size, generator=generator) < 0.6] = -INF
        logits[:, [0, -1]] = -INF
        logits[:, 1] = 0.0
        picks = sample(logits, rows_of(np.arange(300), np.arange(300)))
        assert logits.gather(1, picks[:, None]).isfinite().all()


# 1 itself, because what is left of a draw for the second level may round to it.
@pytest.mark.parametrize("draw", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53, 1.0])
def test_the_ends_of_the_unit_interval_hit_no_empty_place(draw: float) -> None:
    for masses in ([0.0, 1e-30, 0.0, 1.0, 0.0], [0.0, 3e-45, 0.0], [1.0, 1e-30, 0.0], [0.1] * 10 + [0.0]):
        place, rest = _place(np.cumsum(np.array(masses, np.float32), dtype=np.float64), draw)
        assert masses[place] > 0
        assert 0.0 <= rest <= 1.0


@EACH_WAY
def test_extreme_logits(sample: Sample) -> None:
    logits = torch.full((2, 4000), -3e38)
    logits[0, 9] = 3e38
    logits[1, 9] = -1e38
    assert sample(logits, rows_of([1, 2], [0, 0])).tolist() == [9, 9]


MASK = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    """The output function of SplitMix64 as published, in Python's own integers."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def splitmix64(state: int) -> Iterator[int]:
    while True:
        state = (state + GOLDEN) & MASK
        yield mix(state)


def test_the_reference_is_the_published_generator() -> None:
    # The first outputs for 1234567 that its ports commonly test themselves against.
    assert list(islice(splitmix64(1234567), 3)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("seed", [0, 1, 2**32 + 1, 2**63 - 1, -1, -(2**63)])
def test_uniform_is_splitmix64_for_every_seed(seed: int) -> None:
    seeds, positions = np.full(50, seed).astype(np.uint64), np.arange(50) + 2**40
    few = [uniform(seeds[i : i + 3], positions[i : i + 3]) for i in range(0, 50, 3)]
    assert np.concatenate(few).tolist() == uniform(seeds, positions).tolist()
    numbers = uniform(np.full(50, seed).astype(np.uint64), np.arange(50))
    outputs = islice(splitmix64(mix((seed + GOLDEN) & MASK)), 50)
    assert numbers.tolist() == [((output >> 12) + 0.5) * 2.0**-52 for output in outputs]


def test_seeds_that_share_their_low_half_differ() -> None:
    seeds = np.array([5, 5 + 2**32, 5 + 2**33, 5 - 2**40], np.int64).astype(np.uint64)
    assert len(set(uniform(seeds, np.zeros(4, np.int64)).tolist())) == 4


@pytest.mark.parametrize("along", ["seed", "position"])
def test_numbers_are_uniform_and_neighbours_unrelated(along: str) -> None:
    steps, still = np.arange(200_000), np.zeros(200_000, np.int64)
    numbers = uniform(*((steps.astype(np.uint64), still) if along == "seed" else (still.astype(np.uint64), steps)))
    assert chi_square_is_plausible(np.bincount((numbers * 200).astype(int), minlength=200), np.full(200, 1000.0))
    pairs = (numbers[:-1] * 14).astype(int) * 14 + (numbers[1:] * 14).astype(int)
    assert chi_square_is_plausible(np.bincount(pairs, minlength=196), np.full(196, len(pairs) / 196))
    assert 0.0 < numbers.min() < numbers.max() < 1.0


@pytest.mark.gate(16)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [TorchSampler, needs_compiler(CpuSampler)])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000, 8192, 20_001])
@pytest.mark.parametrize("mixed", [0.0, 0.02, 1.0])
def test_what_a_mask_has_no_bit_for_is_minus_infinity_and_nothing_else(
    kind: Callable[[SamplingContext], Sampler], vocab_size: int, mixed: float, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(vocab_size)
    masks = rng.integers(-(2**31), 2**31, (5, -(-vocab_size // 32))).astype(np.int32)
    masks[rng.random(masks.shape) >= mixed] = -1
    masks[1][rng.random(masks.shape[1]) >= mixed] = 0
    masks[0, 0] = 2**31 - 1
    sampler = kind(SamplingContext(vocab_size, 8, torch.device("cpu"), (), threads=ThreadPool(2)))
    for rows in (np.arange(5), np.array([6, 0, 3, 2, 4])):
        wide = torch.from_numpy(rng.standard_normal((len(rows) + 3, vocab_size + 5), np.float32)).to(dtype)
        logits = wide[:5, :vocab_size] if rows[0] == 0 else wide[:, :vocab_size]
        wanted = wide.clone()
        for row, mask in zip(rows.tolist(), masks, strict=True):
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size]
            wanted[row, :vocab_size][torch.from_numpy(bits == 0)] = -INF
        sampler.mask(logits, rows, masks)
        assert torch.equal(wide, wanted)
