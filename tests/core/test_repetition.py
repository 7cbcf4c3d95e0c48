"""Texts that repeat themselves, against a plain search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fwk.errors import InvalidRequest
from fwk.types.sampling import RepetitionDetection, SamplingParams
from fwk_stops.repetition import RepetitionSearch


def repeats(ids: list[int], least: int, most: int, count: int) -> bool:
    return any(
        len(ids) >= size * count and ids[-size * count :] == ids[-size:] * count for size in range(least, most + 1)
    )


@given(
    ids=st.lists(st.integers(0, 2), max_size=40),
    least=st.integers(1, 3),
    more=st.integers(0, 4),
    count=st.integers(2, 4),
)
def test_it_is_found_at_the_token_that_completes_it(ids: list[int], least: int, more: int, count: int) -> None:
    search = RepetitionSearch(RepetitionDetection(least + more, count, least))
    for end in range(1, len(ids) + 1):
        assert search.feed(ids[end - 1]) == repeats(ids[:end], least, least + more, count)


@pytest.mark.parametrize("settings", [(0, 2, 1), (257, 2, 1), (3, 1, 1), (3, 2, 4), (3, 2, 0)])
def test_what_is_out_of_range_is_refused(settings: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidRequest, match="repetition_detection"):
        SamplingParams(repetition_detection=RepetitionDetection(*settings)).check(100)
