"""Which mutations of the sources the tests notice: ``python -m tests.helpers.mutations [--only PATTERN]``.

``tests/mutations.toml`` lists them. Sources and tests are copied once; each mutation is written into the copy, whose
packages come before the installed ones in every process, and the tests named with it run there until the first
failure. They must pass without the mutation first.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "mutations.toml"
SECONDS = 300.0

PRELOADED = ("torch", "numpy", "tokenizers", "pydantic", "msgspec", "starlette", "httpx", "zmq", "pytest")
"""Imported once, before the processes that run tests are forked: half of what a short test file takes."""

BETWEEN_LOOKS = 0.02
TIME_IS_OVER = "time is over"


class Wrong(Exception):
    """The list cannot be run; the sentence says which entry, and why."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """``find``, which stands once in ``file``, becomes ``replace``. about: what goes wrong then."""

    id: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...]
    about: str

    @property
    def package(self) -> str:
        """The part of the sources it is in: of core, its folder; of what is in no package, the first folder."""
        parts = Path(self.file).parts
        place = next((i for i, part in enumerate(parts) if part.startswith("fwk")), 0)
        return "/".join(parts[place : place + 2]) if parts[place] == "fwk" else parts[place]

    def applied(self, text: str) -> str:
        """The file's text with it. Raises ``Wrong``."""
        if (count := text.count(self.find)) != 1:
            raise Wrong(f"{self.id}: 'find' stands {count} times in {self.file}, and has to stand there once")
        return text.replace(self.find, self.replace)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one mutation. result: ``caught``, ``survived``, or ``unproved`` where the tests fail without it."""

    id: str
    package: str
    result: str
    seconds: float
    noticed_by: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Of some tests. status: pytest's, or None where time was over."""

    status: int | None
    num_passed: int
    seconds: float
    output: str

    @property
    def first_failure(self) -> str:
        found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", self.output, re.MULTILINE)
        return found[1] if found else (TIME_IS_OVER if self.status is None else f"pytest ends with {self.status}")


def read(path: Path = LIST) -> list[Mutation]:
    """All of the list."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return [Mutation(name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in entries.items()]


def import_path() -> list[str]:
    """The folders that hold the packages, as ``pyproject.toml`` has them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    return list(dict.fromkeys(str(Path(package).parent) for package in packages))


class Copy:
    """Sources and tests in a folder of their own, with a cache of their own for built kernels."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "sources"
        self._cache = folder / "cache"
        self._output = folder / "output"
        self._paths = [str(self.root / place) for place in import_path()]
        self._num_mutations = 0
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0"):
            if name and (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name)
        self._fill_cache()

    def _fill_cache(self) -> None:
        """Kernels that are built already, and models that are there; what comes of mutated sources stays here."""
        here = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        own = self._cache / "fwk"
        own.mkdir(mode=0o700, parents=True)
        for entry in here.iterdir() if here.is_dir() else ():
            if entry.name != "fwk":
                (self._cache / entry.name).symlink_to(entry)
        if (here / "fwk" / "models").is_dir():
            (own / "models").symlink_to(here / "fwk" / "models")
        if (here / "fwk" / "native").is_dir():
            shutil.copytree(here / "fwk" / "native", own / "native")

    @contextmanager
    def mutated(self, mutation: Mutation) -> Iterator[None]:
        """Bytecode is kept of the original alone: its time is put back, and each mutation has one of its own."""
        path = self.root / mutation.file
        original, status = path.read_text(encoding="utf-8"), path.stat()
        self._num_mutations += 1
        path.write_text(mutation.applied(original), encoding="utf-8")
        os.utime(path, (status.st_atime, status.st_mtime + self._num_mutations))
        try:
            yield
        finally:
            path.write_text(original, encoding="utf-8")
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def check(self) -> None:
        """Raise ``Wrong`` unless fresh processes, those of ``-P`` too, import the copy."""
        modules = [path.parent.name for place in self._paths for path in Path(place).glob("fwk*/__init__.py")]
        program = f"import importlib\nfor name in {modules}: print(importlib.import_module(name).__file__)"
        command = [sys.executable, "-P", "-c", program]
        found = subprocess.run(command, env=self._environment(True), cwd=self.root, capture_output=True, text=True)
        strange = [line for line in found.stdout.splitlines() if not Path(line).is_relative_to(self.root)]
        if found.returncode or strange or not modules:
            raise Wrong(f"the copy is not what is imported: {strange or found.stderr}")

    def run(self, tests: Sequence[str], seconds: float, *, keeps_bytecode: bool = False) -> Run:
        """Run tests in a process of their own, which begins with the libraries of this one."""
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = self._in_child(tests, keeps_bytecode)
            finally:
                os._exit(status)
        status = _wait(child, started + seconds)
        text = self._output.read_text(encoding="utf-8", errors="replace")
        passed = re.search(r"(\d+) passed", text)
        return Run(status, int(passed[1]) if passed else 0, time.monotonic() - started, text)

    def _environment(self, keeps_bytecode: bool) -> dict[str, str]:
        own = {"PYTHONPATH": os.pathsep.join(self._paths), "XDG_CACHE_HOME": str(self._cache)}
        environment = {**os.environ, **own}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        return environment if keeps_bytecode else {**environment, "PYTHONDONTWRITEBYTECODE": "1"}

    def _in_child(self, tests: Sequence[str], keeps_bytecode: bool) -> int:
        import pytest

        os.setsid()
        for descriptor, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
            os.dup2(os.open(self._output if descriptor else os.devnull, mode), descriptor)
        os.dup2(1, 2)
        environment = self._environment(keeps_bytecode)  # which has what there is now, the search path too
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(self.root)
        sys.dont_write_bytecode = not keeps_bytecode
        sys.path[:] = self._paths + [path for path in sys.path if Path(path or ".").resolve() != ROOT]
        for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
            del sys.modules[name]
        # A test that is named with its parameter runs although it is the sweep's.
        marks = ["-m", "not clients and not flashinfer"] if any("[" in test for test in tests) else []
        return int(pytest.main(["-x", "-q", "-n", "0", "-p", "no:cacheprovider", *marks, *tests]))


def _wait(child: int, end: float) -> int | None:
    """The exit status, None once time is over; what the child has started is ended with it."""
    status: int | None = None
    while time.monotonic() < end:
        ended, code = os.waitpid(child, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
            break
        time.sleep(BETWEEN_LOOKS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status


def preload() -> None:
    """Import what most tests import, as ``tests/conftest.py`` wants it."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for name in PRELOADED:
        __import__(name)


def outcomes(mutations: Sequence[Mutation], copy: Copy, seconds: float) -> Iterator[Outcome]:
    """One after the other; before the first of some tests, these without it."""
    wrong: dict[tuple[str, ...], str] = {}
    for mutation in mutations:
        tests = mutation.tests
        if tests not in wrong:
            found = copy.run(tests, seconds, keeps_bytecode=True)
            is_proof = found.status == 0 and found.num_passed > 0
            wrong[tests] = "" if is_proof else found.first_failure
            print(f"{found.seconds:7.1f} s  {'passes' if is_proof else 'FAILS'}  {' '.join(tests)}", flush=True)
        if wrong[tests]:
            yield Outcome(mutation.id, mutation.package, "unproved", 0.0, wrong[tests])
            continue
        with copy.mutated(mutation):
            found = copy.run(tests, seconds)
        is_caught = found.status != 0
        noticed_by = found.first_failure if is_caught else ""
        yield Outcome(mutation.id, mutation.package, "caught" if is_caught else "survived", found.seconds, noticed_by)


def table(found: Iterable[Outcome], before: Iterable[Outcome] = ()) -> str:
    """By package. before: of an earlier run, in columns to the left."""
    runs = [run for run in (list(before), list(found)) if run]
    kinds = ("caught", "survived", "unproved")
    heads = [f"{kind}{' before' if run is not runs[-1] else ''}" for run in runs for kind in (*kinds, "seconds")]
    lines = [f"| package | {' | '.join(heads)} |", "|---" + "|---:" * len(heads) + "|"]
    packages = sorted({outcome.package for run in runs for outcome in run})
    for package in [*packages, None]:
        cells: list[str] = []
        for run in runs:
            mine = [outcome for outcome in run if package in (None, outcome.package)]
            cells += [str(sum(outcome.result == kind for outcome in mine)) for kind in kinds]
            cells.append(f"{sum(outcome.seconds for outcome in mine):.0f}")
        lines.append(f"| {package or '**all**'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def report(mutations: Sequence[Mutation], found: Sequence[Outcome], before: Sequence[Outcome]) -> str:
    """The table, and what was not caught."""
    about = {mutation.id: f"{mutation.about} (`{mutation.file}`)" for mutation in mutations}
    lines = [table(found, before), ""]
    for title, left in (
        ("Survived", [outcome for outcome in found if outcome.result == "survived"]),
        ("The tests fail without it", [outcome for outcome in found if outcome.result == "unproved"]),
        ("Caught by the limit of time alone", [outcome for outcome in found if outcome.noticed_by == TIME_IS_OVER]),
    ):
        lines += [f"{title}: {len(left)}.", ""]
        lines += [f"- `{each.id}`: {about[each.id]} {each.noticed_by}" for each in left]
        lines += [""] if left else []
    return "\n".join(line.rstrip() for line in lines)


def load(path: Path) -> list[Outcome]:
    """What ``--json`` has written."""
    return [Outcome(**each) for each in json.loads(path.read_text(encoding="utf-8"))]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.helpers.mutations", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["*"], help="ids or packages, as a shell's patterns")
    parser.add_argument("--report", type=Path, help="a file for the table, in Markdown")
    parser.add_argument("--json", type=Path, help="a file for the outcomes")
    parser.add_argument("--before", type=Path, help="what --json wrote in an earlier run, for the table")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for the tests of one mutation")
    arguments = parser.parse_args()
    chosen = [m for m in read() if any(fnmatch.fnmatch(name, p) for p in arguments.only for name in (m.id, m.package))]
    before = load(arguments.before) if arguments.before else []
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="fwk-mutations-") as folder:
        try:
            for mutation in chosen:
                mutation.applied((ROOT / mutation.file).read_text(encoding="utf-8"))
            preload()
            copy = Copy(Path(folder))
            copy.check()
            for outcome in outcomes(chosen, copy, arguments.seconds):
                found.append(outcome)
                words = f"{outcome.seconds:7.1f} s  {outcome.result}  {outcome.id}  {outcome.noticed_by}"
                print(words, flush=True)
                if arguments.json:
                    arguments.json.write_text(json.dumps([asdict(each) for each in found], indent=1) + "\n")
        except Wrong as error:
            print(error, file=sys.stderr)
            return 2
    text = report(chosen, found, before)
    print(text)
    if arguments.report:
        arguments.report.write_text(text)
    return int(any(outcome.result != "caught" for outcome in found))


if __name__ == "__main__":
    sys.exit(main())
