"""The Triton sampler: its picks are the torch sampler's, and what its kernels become for GPUs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.helpers.interpreted import check_never_chosen_by_itself, interpreted
from tests.helpers.machine_code import compiled
from torch import Tensor

from fwk.interfaces.sampling import LogitsView, SamplingContext, SamplingRows
from fwk.plugins import find
from fwk.types import SamplingParams
from fwk_kit.testing.base import installed
from fwk_kit.testing.samplers import chi_square_is_plausible
from fwk_sampling.processors.temperature import Temperature
from fwk_sampling.processors.truncation import LimitArrays, truncate_batch
from fwk_sampling.torch_sampler.sampler import sample_batch

PLUGINS = installed()
TRITON = find(PLUGINS, "samplers", "triton")
CPU = torch.device("cpu")
INF = float("inf")


ASKED = [
    {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    {"temperature": 1.3, "top_k": 50},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.99},
    {"temperature": 0.5, "top_k": 1000, "top_p": 0.5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 2.0, "top_k": 30, "top_p": 0.9, "min_p": 0.3},
    {"temperature": 1.5, "top_p": 0.8, "min_p": 0.001},
    {"temperature": 0.9},
    {"temperature": 1.0},
    {"temperature": 1e-7},
    {"temperature": 0.0, "top_k": 5},
]
EVERY = [SamplingParams(**some) for some in ASKED]


def rows_of(params: list[SamplingParams], positions: np.ndarray) -> SamplingRows:
    """A slot for each of ``params``, its work left to the sampler; the rows take them in turn."""
    slots = np.arange(len(positions)) % len(params)
    is_greedy = np.array([params[slot].temperature == 0.0 for slot in slots])
    seeds = np.full(len(positions), 7, np.uint64)
    return SamplingRows(is_greedy, seeds, positions, bool(is_greedy.all()), np.where(is_greedy, -1, slots))


def pick(logits: Tensor, params: list[SamplingParams], positions: np.ndarray) -> Tensor:
    from fwk_sampling.triton_sampler.sampler import TritonSampler

    sampler = TritonSampler(SamplingContext(logits.shape[1], len(params), CPU, ()))
    for slot, some in enumerate(params):
        sampler.add(slot, some)
    return sampler.sample(logits, rows_of(params, positions))


def pick_by_torch(logits: Tensor, params: list[SamplingParams], positions: np.ndarray) -> Tensor:
    """What the processors and the torch sampler do on a device: divide, sort, draw."""
    rows = rows_of(params, positions)
    slots, logits = np.arange(len(positions)) % len(params), logits.float().clone()
    temperature = Temperature(SamplingContext(logits.shape[1], len(params), CPU, ()))
    for slot, some in enumerate(params):
        temperature.add(slot, some)
    view = LogitsView(slots, positions, positions, np.zeros((len(params), 1), np.int32))
    logits = temperature.apply(logits, view)
    asked = np.flatnonzero(~rows.is_greedy)
    of = [params[slot] for slot in slots[asked]]
    top_k = np.array([some.top_k if 0 < some.top_k < logits.shape[1] else 0 for some in of])
    min_logit = np.log(np.array([max(some.min_p, 1e-300) for some in of]))
    limits = LimitArrays(top_k, np.array([some.top_p for some in of]), np.where(min_logit < -690, -np.inf, min_logit))
    return sample_batch(truncate_batch(logits, asked, limits), rows)


@pytest.mark.gate(1)
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("vocab_size", "spread"), [(9, 2.0), (4096, 1.0), (9001, 3.0)])
def test_picks_are_the_torch_samplers(vocab_size: int, spread: float, dtype: torch.dtype) -> None:
    """In half precision many logits are equal, at the k-th place and at the nucleus' end too."""
    logits = torch.randn(28, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread
    logits[::5, vocab_size // 3 :] = -INF
    logits[:, vocab_size // 4] = 0.0
    logits, positions = logits.to(dtype), np.arange(28) * 3
    assert torch.equal(pick(logits, EVERY, positions), pick_by_torch(logits, EVERY, positions))


@pytest.mark.gate(3)
@interpreted
@pytest.mark.parametrize("params", EVERY, ids=[str(some) for some in ASKED])
def test_plateaus_and_far_apart_logits(params: SamplingParams) -> None:
    """Equal logits, zeros of either sign, and logits that lie further apart than float32 reaches."""
    signed = torch.zeros(3, 5000)
    signed[:, ::2] = -0.0
    far = torch.full((3, 5000), -3e38 * min(params.temperature or 1.0, 1.0))
    far[:, [5, 4170]] *= -1.0
    few = torch.full((3, 5000), -INF)
    few[:, [17, 4999]] = torch.tensor([-2e-39, 1e-40])
    for logits in (signed, far, few):
        found = pick(logits, [params], np.arange(3))
        assert torch.equal(found, pick_by_torch(logits, [params], np.arange(3)))


@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.sweep)])
def test_a_pick_is_the_same_in_any_batch(every: int) -> None:
    logits = torch.randn(28, 6000, generator=torch.Generator().manual_seed(3)) * 2
    positions = np.arange(28) * 5
    together = pick(logits, EVERY, positions)
    for i in range(0, 28, every):
        assert pick(logits[i : i + 1], [EVERY[i % len(EVERY)]], positions[i : i + 1]).item() == together[i]


@interpreted
@pytest.mark.sweep
@pytest.mark.timeout(900)
def test_picks_follow_the_distribution() -> None:
    """1,000 of one row: what the rules keep, as often as it is likely. The contract has 16,000 of whole rows."""
    row = torch.randn(500, generator=torch.Generator().manual_seed(8)) * 2
    params = SamplingParams(temperature=1.2, top_k=60, top_p=0.9, min_p=0.01)
    picks = pick(row.expand(1_000, -1), [params], np.arange(1_000)).numpy()
    scaled = (row.double() / 1.2).numpy()
    mass = np.exp(scaled - scaled.max())
    mass[scaled < np.sort(scaled)[-60]] = 0.0
    order = np.argsort(-scaled)
    above = np.cumsum(mass[order]) - mass[order]
    mass[order[above >= 0.9 * mass.sum()]] = 0.0
    mass[scaled < scaled.max() + np.log(0.01)] = 0.0
    kept = mass > 0
    counts, expected = np.bincount(picks, minlength=500), mass / mass.sum() * 1_000
    assert 10 < kept.sum() < 60
    assert not counts[~kept].any()
    assert chi_square_is_plausible(counts[kept], expected[kept])


def test_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_never_chosen_by_itself(PLUGINS, "samplers", monkeypatch)


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_machine_code(target: str, dtype: str) -> None:
    """No numbers in local memory, and memory read 128 bits at a time."""
    found = compiled(target, dtype, "sampler")
    assert [code["name"] for code in found] == ["chunk_tops", "chunk_tops", "pick_rows", "pick_rows", "mask_rows"]
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["shared"] <= 48 * 1024, code
        if target != "gfx942" and (code is found[3] or code["name"] == "chunk_tops"):  # there a thread has fewer
            assert code["loads_of_128_bits"] > 0, code
