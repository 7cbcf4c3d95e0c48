"""Collections in order of rank, against sorting."""

from __future__ import annotations

import random

import pytest

from fwk.interfaces.ranked_list import Groups, Ranked


@pytest.mark.parametrize("seed", range(3))
def test_the_order_is_that_of_sorting(seed: int) -> None:
    rng = random.Random(seed)
    ranked: Ranked[int] = Ranked()
    wanted: dict[int, tuple[int, int]] = {}
    for number in range(8_000):
        item = rng.randrange(4_000)
        if item in wanted and rng.random() < 0.4:
            ranked.remove(item)
            del wanted[item]
        else:
            wanted[item] = (rng.randrange(50), number)
            ranked.add(item, wanted[item][0])
        if number % 500 == 0:
            assert list(ranked) == sorted(wanted, key=lambda item: wanted[item])
    assert len(ranked) == len(wanted)
    assert list(ranked) == sorted(wanted, key=lambda item: wanted[item])
    assert all((item in ranked) == (item in wanted) for item in range(4_000))
    for item in list(ranked):
        ranked.remove(item)
    assert not list(ranked)
    with pytest.raises(KeyError):
        ranked.remove(0)


def test_equals_stand_by_number_if_one_is_given() -> None:
    ranked: Ranked[str] = Ranked()
    for name, number in (("b", 2), ("c", 3), ("a", 1)):
        ranked.add(name, 0, number)
    assert list(ranked) == ["a", "b", "c"]


def test_ranks_that_have_no_order_are_told_and_nobody_else_is_removed() -> None:
    rng = random.Random(0)
    ranked: Ranked[int] = Ranked()
    for item in range(200):
        ranked.add(item, rng.choice([float("nan"), rng.random(), rng.random()]))
    items = rng.sample(range(200), 200)

    def remove_all() -> None:
        for i, item in enumerate(items):
            ranked.remove(item)
            assert set(ranked) == set(items[i + 1 :])

    with pytest.raises(ValueError, match="no order"):
        remove_all()


def test_groups_stand_by_their_own_rank_and_vanish_when_empty() -> None:
    groups: Groups[str, int] = Groups()
    groups.add("late", 1, rank=5, group_rank=9)
    groups.add("early", 2, rank=2, group_rank=1)
    groups.add("early", 3, rank=1, group_rank=1)
    assert [(name, list(groups.get(name))) for name in groups] == [("early", [3, 2]), ("late", [1])]
    groups.rank("late", 0)
    groups.rank("nobody", 0)
    assert list(groups) == ["late", "early"]
    groups.discard("late", 7)
    groups.discard("late", 1)
    groups.discard("late", 1)
    assert list(groups) == ["early"]
    assert "late" not in groups
    assert list(groups.get("late")) == []
