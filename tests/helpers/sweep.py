"""The sweep: what repeats the gate over more parameters, all of it or what a change touches and a share of the rest.

``make sweep`` runs all of it. ``make sweep CHANGED=REV`` runs, for at most ``--minutes`` by the table of durations, the
files that the change since REV touches, nearest first, then a share of the others that changes with the date: every
file has its day. What is left out is printed before anything runs. Examples are drawn from a seed, which is printed.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import random
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tests.helpers import durations
from tests.helpers.durations import ROOT

PROCESSES = 2
FAR = 99
PART = 100.0
"""Seconds of the longest part of a file, by which a short sweep has room for some of each."""


_NAMED = re.compile(r"^ *import ([^\n]+)|^ *from ([\w.]+) import (\([^)]*\)|[^\n]+)|\"([\w.:-]{1,100})\"", re.MULTILINE)
"""Imports, and what stands in quotes: a quarter of a second for all files, where parsing them takes ten."""

_NAME = re.compile(r"[\w.]+")


def modules() -> dict[str, Path]:
    """Every module of the repository by its import name."""
    found: dict[str, Path] = {}
    packages = [*ROOT.glob("*/fwk*"), *ROOT.glob("plugins/*/fwk_*"), ROOT / "tests", ROOT / "benchmarks"]
    for package in packages:
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules that a file names: in imports, and in strings, as declarations (``module:Class``) and options do."""
    named: set[str] = set()
    for alone, module, names, said in _NAMED.findall(path.read_text()):
        named |= {*_NAME.findall(alone), module, *(f"{module}.{name}" for name in _NAME.findall(names))}
        named |= {said.partition(":")[0], *plugins().get(said, ())}
    return named & known.keys()


@cache
def plugins() -> dict[str, list[str]]:
    """Packages of the plugins that options select by a name."""
    found: dict[str, list[str]] = {}
    for name, module in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["fwk"].items():
        found.setdefault(name.partition(".")[2], []).append(module)
    return found


@cache
def _importers() -> dict[Path, set[Path]]:
    known = modules()
    found: dict[Path, set[Path]] = {}
    for path in known.values():
        for name in imported(path, known):
            found.setdefault(known[name], set()).add(path)
    return found


def distances(changed: Iterable[Path]) -> dict[Path, int]:
    """How many imports lie between each test file that reaches a changed file and the nearest one."""
    importers = _importers()
    near: dict[Path, int] = {}
    level = {near for path in changed for near in (path, *_beside(path)) if near.suffix == ".py"}
    for distance in range(FAR):
        for path in level:
            near[path] = distance
        level = {user for path in level for user in importers.get(path, ())} - near.keys()
        if not level:
            break
    return {path: distance for path, distance in near.items() if path.name.startswith("test_")}


def _beside(changed: Path) -> Iterable[Path]:
    """The declaration of a file's plugin; of a kernel, a template or a table also the Python files next to it."""
    parts = changed.relative_to(ROOT).parts
    if parts[0] == "plugins" and len(parts) > 4:
        yield ROOT.joinpath(*parts[:4], "__init__.py")
    if changed.suffix != ".py":
        yield from changed.parent.glob("*.py")


def parts_of(files: dict[str, float]) -> dict[str, float]:
    """Seconds of ``path#i/n``: a file that takes longer than ``PART`` is n of them, by the places of its tests."""
    found: dict[str, float] = {}
    for name, seconds in files.items():
        num = max(1, math.ceil(seconds / PART))
        found |= {f"{name}#{i}/{num}": seconds / num for i in range(num)}
    return found


def plan(files: dict[str, float], near: dict[str, int], seconds: float, day: int) -> list[str]:
    """Which parts of files run: touched ones by distance, then the others; each day from another place on.

    seconds: of tests, over all processes.
    """
    parts = parts_of(files)
    names = sorted(parts)
    turn = {name: ((place + day) * 0.618034) % 1 for place, name in enumerate(names)}  # neighbours lie far apart
    chosen: list[str] = []
    for name in sorted(names, key=lambda name: (near.get(name.partition("#")[0], FAR), turn[name])):
        if sum(parts[n] for n in chosen) + parts[name] <= seconds:
            chosen.append(name)
    return sorted(chosen, key=lambda name: -parts[name])


def changed_since(revision: str) -> list[Path]:
    said = subprocess.run(
        ["git", "diff", "--name-only", revision, "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [ROOT / name for name in said.stdout.split()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--changed", metavar="REV", default="")
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--slower", type=float, default=1.0, help="this machine's seconds for one of the table's")
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("pytest", nargs="*")
    given = parser.parse_args()
    files = durations.read()["sweep"]
    chosen: list[str] = []
    if given.changed:
        near = {str(path.relative_to(ROOT)): n for path, n in distances(changed_since(given.changed)).items()}
        seconds = given.minutes * 60 * PROCESSES / max(given.slower, 0.1)
        chosen = plan(files, near, seconds, datetime.date.today().toordinal())
        parts = parts_of(files)
        left = sorted(parts.keys() - set(chosen), key=lambda name: -parts[name])
        for title, names in (("runs", chosen), ("leaves out", left)):
            total = sum(parts[name] for name in names) / PROCESSES / 60
            print(f"The sweep {title} {len(names)} of {len(parts)} parts of files, {total:.1f} minutes by the table:")
            for name in names:
                told = name.removesuffix("#0/1") + (" (touched)" if name.partition("#")[0] in near else "")
                print(f"  {parts[name]:6.0f} s  {told}")
        if not chosen:
            return 0
    print(f"Seed of random examples: --seed {given.seed}", flush=True)
    command = [sys.executable, "-m", "pytest", "-m", "sweep and not clients and not flashinfer", "--dist", "loadscope"]
    command += [f"--hypothesis-seed={given.seed}", *given.pytest]
    command += sorted({name.partition("#")[0] for name in chosen})
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, "SWEEP_SEED": str(given.seed), "SWEEP_PARTS": " ".join(chosen)}
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
