"""How long each test file took: ``tests/durations.json``, for the order of files and what a sweep has room for.

Made anew from the reports of a quiet run of each::

    python -m pytest --junitxml=build/gate.xml; make sweep SWEEP=--junitxml=build/sweep.xml
    python -m tests.helpers.durations build/gate.xml build/sweep.xml
"""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests/durations.json"
UNKNOWN = 20.0
"""Seconds of a file that the table has not yet."""


def read() -> dict[str, dict[str, float]]:
    """Seconds of each file: ``gate`` and ``sweep``, each a table by path."""
    return json.loads(TABLE.read_text())


def file_of(item: pytest.Item) -> str:
    """The file that collects it: of a suite of the kit, another than the one that it is written in."""
    return item.nodeid.partition("::")[0]


def longest_first(items: list[pytest.Item], suites: Collection[str]) -> None:
    """Sort whole files: a long one begun last would keep one process busy and leave the others idle."""
    took = Counter[str]()
    for suite in suites:
        took.update(read()[suite])
    items.sort(key=lambda item: -took[file_of(item)])


def of_report(path: Path) -> dict[str, float]:
    """Seconds of each file, in a report of ``--junitxml``."""
    found = Counter[str]()
    for case in ElementTree.parse(path).iter("testcase"):
        parts = case.get("classname", "").split(".")
        while parts and not (ROOT / ("/".join(parts) + ".py")).exists():
            parts.pop()
        found["/".join(parts) + ".py"] += float(case.get("time", 0))
    return {name: round(seconds, 1) for name, seconds in sorted(found.items()) if seconds >= 0.1}


def main(gate: str, sweep: str) -> None:
    reports = {"gate": of_report(Path(gate)), "sweep": of_report(Path(sweep))}
    TABLE.write_text(json.dumps(reports, indent=0) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
