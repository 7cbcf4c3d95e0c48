"""top_k, top_p and min_p: transformers' warpers, a plain float64 reference, and ties."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.lazy import lazy

from fwk.interfaces.sampling import LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling.processors.truncation import LimitArrays, Limits, Truncation, truncate_batch

transformers = lazy("transformers")

INF = float("inf")
SHAPES = {"peaked": 4.0, "ordinary": 2.0, "flat": 0.1}
LIMITS = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 300},
    {"top_k": 5000},
    {"top_p": 0.001},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"top_k": 400, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 3000, "top_p": 0.99},
    {"top_p": 0.9, "min_p": 0.3},
]


def random_logits(num_rows: int, vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def limits_of(fields: dict[str, Any], vocab_size: int) -> Limits:
    k = fields.get("top_k", 0)
    min_p = fields.get("min_p", 0.0)
    return Limits(k if 0 < k < vocab_size else 0, fields.get("top_p", 1.0), math.log(min_p) if min_p > 0 else -math.inf)


def truncate(logits: torch.Tensor, limits: list[Limits]) -> torch.Tensor:
    """All rows at once."""
    columns = zip(*((some.top_k, some.top_p, some.min_logit) for some in limits), strict=True)
    return truncate_batch(logits.clone(), np.arange(len(limits)), LimitArrays(*map(np.array, columns)))


def warp(logits: torch.Tensor, fields: dict[str, Any]) -> torch.Tensor:
    """transformers' warpers, in float64: its float32 sums decide differently about a token at the very edge."""
    out, ids = logits.double(), torch.tensor([[1]])
    if fields.get("top_k"):
        out = transformers.TopKLogitsWarper(fields["top_k"])(ids, out)
    if fields.get("top_p", 1.0) < 1.0:
        out = transformers.TopPLogitsWarper(fields["top_p"])(ids, out)
    if fields.get("min_p"):
        out = transformers.MinPLogitsWarper(fields["min_p"])(ids, out)
    return out


def assert_kept_as(out: torch.Tensor, expected: torch.Tensor, logits: torch.Tensor) -> None:
    """The same tokens, but for those at an edge so fine that float32 cannot tell its two sides apart."""
    assert torch.equal(out[out != -INF], logits[out != -INF])
    differs = (out == -INF) != (expected == -INF)
    assert logits.double().softmax(-1)[differs].sum() < 2e-6


@pytest.mark.gate(60)
@pytest.mark.parametrize("fields", LIMITS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vocab_size", [50, 4096, 10_007])
def test_the_same_tokens_stay_as_with_transformers(
    apply: Any, fields: dict[str, Any], shape: str, vocab_size: int
) -> None:
    logits = random_logits(3, vocab_size, SHAPES[shape])
    expected = warp(logits, fields)
    assert_kept_as(apply(Truncation, logits, [fields] * 3), expected, logits)
    batch = truncate(logits, [limits_of(fields, vocab_size)] * 3)
    assert_kept_as(batch, expected, logits)


def test_a_real_vocabulary(apply: Any) -> None:
    fields = {"top_k": 1000, "top_p": 0.9}
    logits = random_logits(1, 262_144, 3.0)
    assert_kept_as(apply(Truncation, logits, [fields]), warp(logits, fields), logits)


def kept_by_definition(row: list[float], fields: dict[str, Any]) -> set[int]:
    """Which tokens stay, by the docstring's words: whole groups of equal logits, sums in float64."""
    top = max(row)
    groups = sorted({x for x in row if x > -INF}, reverse=True)
    k = fields.get("top_k") or len(row)
    in_k = [x for x in groups if sum(y > x for y in row) < k]
    mass = {x: row.count(x) * math.exp(x - top) for x in in_k}
    total, above, kept = sum(mass.values()), 0.0, set()
    for x in in_k:
        # A group goes as a whole once what is above its first member has reached top_p.
        if above < fields.get("top_p", 1.0) * total and x >= top + math.log(fields.get("min_p") or 1e-300):
            kept |= {i for i, y in enumerate(row) if y == x}
        above += mass[x]
    return kept


def has_room_for_one(row: list[float], fields: dict[str, Any]) -> bool:
    """Whether the first of the most likely tokens is all that the limits ask for."""
    top, k = max(row), fields["top_k"] or len(row)
    total = sum(math.exp(x - top) for x in row if sum(y > x for y in row) < k)
    return k == 1 < len(row) or (fields["top_p"] < 1.0 and fields["top_p"] * total <= 1.0)


ONE_ROW = LogitsView(np.zeros(1, np.int64), np.ones(1, np.int64), np.ones(1, np.int64), np.zeros((1, 4), np.int32))
# Halves, so that ties abound; the odd shares below leave no sum near an edge by accident.
TIED = st.lists(st.one_of(st.integers(-6, 6).map(lambda n: n / 2), st.just(-INF)), min_size=2, max_size=40).filter(
    lambda row: max(row) > -INF
)


@settings(max_examples=100, deadline=None)
@given(
    row=TIED,
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.1003, 0.3007, 0.5011, 0.7013, 0.9017, 1.0]),
    min_p=st.sampled_from([0.0, 0.011, 0.21, 0.57]),
)
def test_ties_share_one_fate(row: list[float], top_k: int, top_p: float, min_p: float) -> None:
    fields = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    of_row = fields if top_k < len(row) else fields | {"top_k": 0}
    kept = kept_by_definition(row, of_row)
    # Once as it is, and once strewn over a vocabulary large enough for the search that sorts only a few.
    for vocab_size in (len(row), 8192):
        places = [(i * 997) % vocab_size if vocab_size > len(row) else i for i in range(len(row))]
        expected = {min(kept, key=lambda i: places[i])} if has_room_for_one(row, of_row) else kept
        logits = torch.full((1, vocab_size), -INF)
        logits[0, places] = torch.tensor(row)
        limits = limits_of(fields, vocab_size)
        processor = Truncation(SamplingContext(vocab_size, 1, torch.device("cpu"), ()))
        if processor.add(0, SamplingParams(**fields)):
            out = processor.apply(logits.clone(), ONE_ROW)
            assert {places.index(i) for i in out[0].isfinite().nonzero().flatten().tolist()} == expected
            batch = truncate(logits, [limits])
            assert torch.equal(batch, out)


def test_all_ties_of_the_kth_count_in_the_share_of_top_p(apply: Any) -> None:
    # Of masses e, 1, 1, 1, 1 the first has 40 %, but 73 % if only two were counted.
    for vocab_size in (5, 8192):
        logits = torch.full((1, vocab_size), -20.0)
        logits[0, :5] = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
        kept = apply(Truncation, logits, [{"top_k": 2, "top_p": 0.5}]).isfinite().sum()
        assert kept == 5


def test_rows_with_few_possible_tokens(apply: Any) -> None:
    logits = random_logits(len(LIMITS), 20_000, 2.0)
    logits[:, 10:] = -INF
    out = apply(Truncation, logits, LIMITS)
    for row, fields in enumerate(LIMITS):
        assert_kept_as(out[row], warp(logits[row : row + 1], fields)[0], logits[row])


def test_a_plateau_of_equal_logits_stays_whole(apply: Any) -> None:
    logits = torch.zeros(1, 20_000)
    for fields in ({"top_k": 5}, {"top_p": 0.5}, {"top_k": 700}, {"min_p": 0.99}):
        assert apply(Truncation, logits, [fields]).isfinite().all()
    for fields in ({"top_k": 1}, {"top_p": 1e-5}, {"min_p": 1.0}):  # which have room for one
        assert apply(Truncation, logits, [fields]).isfinite().nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize("fields", LIMITS, ids=str)
def test_extreme_logits(apply: Any, fields: dict[str, Any]) -> None:
    logits = torch.full((3, 6000), -3e38)
    logits[0, :3] = torch.tensor([3e38, 2e38, 1.0])
    logits[1, 5] = -2.9e38
    logits[2] = -INF
    logits[2, 7] = -5.0
    out = apply(Truncation, logits, [fields] * 3)
    assert out.argmax(-1).tolist() == [0, 5, 7]
    assert out.amax(-1).equal(logits.amax(-1))


@pytest.mark.parametrize("fields", LIMITS, ids=str)
def test_unusable_rows_are_left_to_the_sampler(apply: Any, fields: dict[str, Any]) -> None:
    logits = random_logits(3, 6000, 1.0)
    logits[0, 17], logits[1, 18], logits[2] = torch.nan, INF, -INF
    out = apply(Truncation, logits, [fields] * 3)
    assert torch.equal(out[1:], logits[1:])
    assert torch.equal(out[0].isnan(), logits[0].isnan())
    batch = truncate(logits, [limits_of(fields, 6000)] * 3)
    assert batch[0, 17].isnan()
    assert batch[1, 18] == INF
    assert (batch[2] == -INF).all()


def test_each_row_has_its_own_limits_whatever_its_neighbours(apply: Any) -> None:
    logits = random_logits(len(LIMITS) + 1, 6000, 2.0)
    together = apply(Truncation, logits, [*LIMITS, {}])
    assert torch.equal(together[-1], logits[-1])
    for row, fields in enumerate(LIMITS):
        assert torch.equal(apply(Truncation, logits[row : row + 1], [fields])[0], together[row])


def test_greedy_rows_and_limits_that_cut_nothing_ask_for_nothing(make_context: Any) -> None:
    processor = Truncation(make_context(100))
    nothing = [{}, {"top_k": -1}, {"top_k": 100}, {"top_p": 1.0}, {"min_p": 0.0}, {"temperature": 0.0, "top_k": 3}]
    assert not any(processor.add(1, SamplingParams(**fields)) for fields in nothing)
    assert processor.add(1, SamplingParams(top_k=99))
