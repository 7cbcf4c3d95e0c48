"""What of the collected tests is the gate, and what only the sweep has.

The gate is ``python -m pytest``: every behaviour once. The sweep is ``make sweep``: the rest of the parameters. A test
is the sweep's by ``@pytest.mark.sweep`` (also on one of its parameters), and by the two rules below.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations

import pytest

from tests.helpers.durations import file_of

SEED = int(os.environ.get("SWEEP_SEED", "0"))


def seeds(count: int) -> range:
    """Seeds of a fuzzer: the same in every run of the gate, others in each sweep, which prints the first."""
    return range(SEED, SEED + count)


def left_to_the_sweep(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Items that repeat, over other parameters, what another item of the gate tries.

    - ``@pytest.mark.gate(n)``, on a test or its class: the gate tries n of its parameters, spread evenly from the
      first to the last. On a class also ``only``: the names of the tests that the gate tries, where they are slow.
    - A product of three or more parameters: so many of its members that every two values of any two parameters
      still meet.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for path, found in tests.items():
        mark = found[0].get_closest_marker("gate")
        if mark is not None:
            name = path.rpartition("::")[2]
            kept = spread(len(found), *mark.args) if name in mark.kwargs.get("only", (name,)) else set()
        elif len(found) > 8 and (places := [parameters(item) for item in found]) and len(places[0]) > 2:
            kept = set(covering(places, 2))
        else:
            continue
        yield from (item for i, item in enumerate(found) if i not in kept)


def parameters(item: pytest.Item) -> dict[str, Hashable]:
    """Which value of each parameter an item has; parameters that are given together count once."""
    callspec = getattr(item, "callspec", None)
    if callspec is None:
        return {}
    axes = {
        tuple(mark.args[0]) if isinstance(mark.args[0], list | tuple) else tuple(mark.args[0].split(","))
        for mark in item.iter_markers("parametrize")
    }
    first = {name.strip(): axis[0].strip() for axis in axes for name in axis}
    return {name: place for name, place in callspec.indices.items() if first.get(name, name) == name}


def outside_of_parts(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Items that a short sweep leaves out: of a file it runs parts ``path#i/n``, which ``SWEEP_PARTS`` names."""
    wanted: dict[str, tuple[set[int], int]] = {}
    for part in os.environ.get("SWEEP_PARTS", "").split():
        name, _, which = part.partition("#")
        place, _, num = which.partition("/")
        wanted.setdefault(name, (set(), int(num)))[0].add(int(place))
    seen: Counter[str] = Counter()
    out: list[pytest.Item] = []
    for item in items:
        name = file_of(item)
        if name in wanted and item.get_closest_marker("sweep") is not None:
            places, num = wanted[name]
            if seen[name] % num not in places:
                out.append(item)
            seen[name] += 1
    return out


def spread(total: int, count: int) -> set[int]:
    """``count`` of ``total`` places, evenly from the first to the last."""
    if count >= total:
        return set(range(total))
    return {round(i * (total - 1) / max(count - 1, 1)) for i in range(count)}


def covering(places: Sequence[dict[str, Hashable]], num: int) -> list[int]:
    """Members of a product in which every ``num`` values of as many parameters that meet at all meet; greedy."""
    missing = [set(combinations(sorted(place.items()), num)) for place in places]
    left = set().union(*missing)
    kept: list[int] = []
    while left:
        best = max(range(len(places)), key=lambda i: (len(missing[i] & left), -i))
        kept.append(best)
        left -= missing[best]
    return kept
