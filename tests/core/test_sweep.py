"""What the gate leaves to the sweep, and what a short sweep leaves to other days."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path

import pytest
from tests.helpers.durations import ROOT, read
from tests.helpers.selection import covering, spread
from tests.helpers.steps import LINES, Done, failures
from tests.helpers.sweep import distances, parts_of, plan


def test_pairs_of_a_product_meet() -> None:
    places = [dict(zip("abc", values, strict=True)) for values in product(range(4), range(3), range(5))]
    kept = covering(places, 2)
    assert len(kept) <= 25 < len(places)
    every, met = (
        {pair for place in some for pair in combinations(place.items(), 2)}
        for some in (places, [places[i] for i in kept])
    )
    assert met == every


def test_a_few_are_spread() -> None:
    assert spread(10, 1) == {0}
    assert spread(10, 2) == {0, 9}
    assert spread(9, 3) == {0, 4, 8}
    assert spread(3, 5) == {0, 1, 2}


def test_touched_files_come_first_and_every_part_has_its_day() -> None:
    files = {f"tests/test_{n}.py": 30.0 * (n + 1) for n in range(20)}
    parts = parts_of(files)
    assert sum(parts.values()) == pytest.approx(sum(files.values()))
    near = {"tests/test_3.py": 1, "tests/test_7.py": 2}
    seen: set[str] = set()
    for day in range(60):
        chosen = plan(files, near, 600.0, day)
        assert sum(parts[name] for name in chosen) <= 600
        assert {name for name in parts if name.partition("#")[0] in near} <= set(chosen)
        seen |= set(chosen)
    assert seen == parts.keys()


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("plugins/schedulers/fwk_schedulers/lpm/policy.py", "tests/plugins/schedulers/test_policies.py"),  # by a name
        ("core/fwk/engine/scheduler.py", "tests/core/test_scheduler.py"),  # by an import
        ("plugins/sampling/fwk_sampling/cpu_sampler/sampler.cpp", "tests/plugins/sampling/test_cpu_sampler.py"),
    ],
)
def test_a_change_reaches_its_tests(changed: str, test: str) -> None:
    assert distances([ROOT / changed])[ROOT / test] <= 2


def test_the_table_knows_the_files() -> None:
    table = read()
    assert {name for name in table["gate"].keys() | table["sweep"].keys() if not (ROOT / name).exists()} == set()


def test_what_failed_is_told_in_few_lines(tmp_path: Path) -> None:
    many = "\n".join(f"FAILED tests/test_{n}.py::test - AssertionError" for n in range(100))
    told = failures(
        [Done("lint", 0, 1.0, ""), Done("types", 1, 1.0, "a.py:1:1 - error: no"), Done("test", 1, 9.0, many)]
    )
    assert len(told) <= LINES
    assert told[0] == "types failed (exit 1):"
    assert any("test_0.py" in line for line in told)
    assert any("more, in build/check" in line for line in told)
