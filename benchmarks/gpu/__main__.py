"""One command for each stage on a GPU; nothing that fails, dies or hangs stops what comes after it.

    python -m benchmarks.gpu OUT --stage references
    python -m benchmarks.gpu OUT --stage prove|measure [--device cuda] [--seconds S] [--references .ref]
                                 [--only failed|WORD] [--before RESULTS.jsonl] [--slower N]

``references`` is for a CPU, beforehand: what the small models say there, into OUT. ``prove`` compares with them, in the
order of what each check decides; ``measure`` takes the time of what passed. Each group of checks is a process; a line
is printed as a check ends, and appended to OUT/results.jsonl. After S seconds (240 and 300) the stage ends itself, and
OUT/STAGE.md has what there is. ``--before`` names an earlier call's results, for ``--only failed`` and ``measure``.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.cases import FLOORS, STAGES, Check, missing_references

GRACE = 5.0
"""Seconds by which a check may be late, with its own alarm, before its process is ended."""
START = 60.0
"""Seconds in which a process begins its first check."""
Row = dict[str, Any]


class Stage:
    """Runs groups of checks in processes, as long as there is time."""

    def __init__(
        self,
        out: Path,
        references: Path,
        device: str,
        seconds: float,
        write: Callable[[str], object] = print,
        slower: float = 1.0,
    ) -> None:
        """slower: times that checks, processes' starts and the stage may take."""
        self.rows: list[Row] = []
        self._vital = ""
        """What failed without which the rest says nothing."""
        self._unloaded = ""
        """The same, of a group."""
        self._out, self._references, self._device, self._write = out, references, device, write
        self._slower = slower
        self._end = time.monotonic() + seconds * slower
        out.mkdir(parents=True, exist_ok=True)

    @property
    def left(self) -> float:
        return self._end - time.monotonic()

    def run(self, checks: Sequence[Check]) -> list[Row]:
        """A row for each check."""
        for group, some in groupby(checks, key=lambda check: check.group):
            waiting = [self._slowed(check) for check in some]
            self._unloaded = ""
            while waiting:
                why = "no time was left" if self.left <= 0 else self._vital or self._unloaded
                if why:
                    for check in waiting:
                        self._add({"check": check.name, "group": group, "passed": None, "error": why})
                    break
                first = waiting[0]
                waiting[0] = replace(first, seconds=first.seconds + first.load_seconds)
                waiting = self._child(waiting)
        return self.rows

    def _slowed(self, check: Check) -> Check:
        seconds, more = check.seconds * self._slower, check.load_seconds * self._slower
        return replace(check, seconds=seconds, load_seconds=more)

    def _child(self, checks: list[Check]) -> list[Check]:
        """Run a process; returns the checks that another has to run, which are fewer."""
        with tempfile.TemporaryDirectory() as folder:
            given = Path(folder) / "checks.json"
            given.write_text(json.dumps([asdict(check) for check in checks]), encoding="utf-8")
            command = [sys.executable, "-m", "benchmarks.gpu.child", str(given), str(self._out)]
            with (self._out / "children.log").open("ab") as log:
                child = subprocess.Popen(
                    [*command, str(self._references), self._device],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # with what it starts itself
                )
            try:
                return self._followed(child, list(checks))
            finally:
                _end(child)

    def _followed(self, child: subprocess.Popen[str], waiting: list[Check]) -> list[Check]:
        lines: queue.Queue[str | None] = queue.Queue()
        assert child.stdout is not None
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        begun = time.monotonic()
        limit = begun + START * self._slower

        def given_up(why: str, *, is_failure: bool = True) -> list[Check]:
            return self._given_up(waiting, why, time.monotonic() - begun, is_failure=is_failure)

        while waiting:
            try:
                line = lines.get(timeout=max(0.0, min(limit, self._end) - time.monotonic()))
            except queue.Empty:
                late = "no time was left" if self.left <= 0 else f"not done in {waiting[0].seconds:.0f} s, and ended"
                return given_up(late, is_failure=self.left > 0)
            if line is None:
                return given_up(f"the process ended with {child.wait()}{self._last_words()}")
            try:
                found: Row = json.loads(line)
            except ValueError:
                continue  # a library's own words
            if "begin" in found:
                begun = time.monotonic()
                limit = begun + waiting[0].seconds + GRACE
            elif found.get("check") == waiting[0].name:
                self._add(found)
                ended = waiting.pop(0)
                begun = time.monotonic()
                limit = begun + START * self._slower
                if found["passed"] is False:
                    self._failed(ended)
                if self._vital or self._unloaded or found.get("is_spoiled"):
                    return waiting
        return []

    def _given_up(self, waiting: list[Check], why: str, seconds: float, *, is_failure: bool) -> list[Check]:
        check = waiting[0]
        if is_failure:
            self._failed(check)
        passed = False if is_failure else None
        row = {"check": check.name, "group": check.group, "passed": passed, "error": why}
        self._add({**row, "seconds": round(seconds, 1)})
        return waiting[1:]

    def _failed(self, check: Check) -> None:
        if check.is_vital:
            self._vital = f"{check.name} failed"
        if check.is_load:
            self._unloaded = f"{check.name} failed"

    def _last_words(self) -> str:
        last = (self._out / "children.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return f": {last[0][:200]}" if last else ""

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self._write(line_of(row))
        with (self._out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _read(stream: IO[str], lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _end(child: subprocess.Popen[str]) -> None:
    """The process, and those that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


def line_of(row: Row) -> str:
    """``PASS seconds name numbers step=...``"""
    word = {True: "PASS", False: "FAIL", None: "SKIP"}[row["passed"]]
    numbers = " ".join(f"{name}={_cell(value)}" for name, value in row.get("numbers", {}).items())
    words = (f"{word} {row.get('seconds', 0.0):6.1f} {row['check']}", numbers, row.get("told", ""), _first(row))
    return "  ".join(part for part in words if part)


def _first(row: Row) -> str:
    return row.get("error", "").strip().partition("\n")[0][:300]


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "/")


def table(rows: Sequence[Row]) -> str:
    """As Markdown; figures that have a floor stand in a table of their own, both turns alongside it."""
    lines = ["| check | passed | seconds | numbers |", "| --- | --- | --- | --- |"]
    for row in rows:
        word = {True: "yes", False: "NO", None: "not run"}[row["passed"]]
        numbers = ", ".join(f"{name} {_cell(value)}" for name, value in row.get("numbers", {}).items())
        said = "; ".join(part for part in (numbers, row.get("told", ""), _first(row).replace("|", "/")) if part)
        lines.append(f"| {row['check']} | {word} | {row.get('seconds', 0.0):.1f} | {said} |")
    figures = list(_figures(rows))
    if figures:
        lines += ["", "| served | figure | first | second | floor | of the floor |", "| --- " * 6 + "|", *figures]
    return "\n".join(lines) + "\n"


def _figures(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        served = row["check"].partition(":")[0]
        words = served.split()
        floors = FLOORS.get((words[0], words[1]), {}) if len(words) == 3 else {}
        numbers: dict[str, float] = row.get("numbers", {})
        for name in dict.fromkeys(figure.removesuffix(" (1)") for figure in numbers if figure.endswith(" (1)")):
            first, second = numbers[f"{name} (1)"], numbers[f"{name} (2)"]
            floor = floors.get(name)
            part = ""
            if floor is not None:
                best = min(first, second) if name.startswith("ms") else max(first, second)
                part = f"{floor / best if name.startswith('ms') else best / floor:.2f}"
            label = name if "prefill" not in name else f"{name}, {row['check'].rpartition(' ')[2]}"
            yield f"| {served} | {label} | {first:.4g} | {second:.4g} | {'' if floor is None else floor} | {part} |"


def chosen(stage: str, only: str, before: Path | None) -> list[Check]:
    """Those of a stage, less what ``only`` leaves out and, while measuring, what was not proven."""
    checks = list(STAGES[stage][0]())
    earlier: dict[str, bool | None] = {}
    if before is not None:
        rows = [json.loads(line) for line in before.read_text(encoding="utf-8").splitlines()]
        earlier = {row["check"]: row["passed"] for row in rows}
    if only == "failed":
        return [check for check in checks if earlier.get(check.name) is not True]
    if stage == "measure" and earlier:
        failed = {name.partition(":")[0] for name, passed in earlier.items() if passed is False and "graphs" in name}
        checks = [check for check in checks if check.options.get("attention_backend") not in failed]
    return [check for check in checks if only in check.name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", choices=("references", *STAGES), default="prove")
    parser.add_argument("--device", default="cuda", help="or pretended: a rehearsal without a GPU")
    parser.add_argument("--seconds", type=float, help="after which the stage ends itself")
    parser.add_argument("--references", type=Path, default=Path(".ref"))
    parser.add_argument("--only", default="", help="checks whose name has this word, or failed")
    parser.add_argument("--before", type=Path, help="results.jsonl of an earlier call")
    parser.add_argument("--slower", type=float, default=1.0, help="times that everything may take: a machine in use")
    given = parser.parse_args()
    if given.stage == "references":
        return _references(given.out, given.device)
    before = given.before
    if before is None and given.only == "failed":
        before = given.out / "results.jsonl"
    if before is not None and not before.exists():
        parser.error(f"{before} is not there: --before names the results.jsonl of an earlier call")
    checks = chosen(given.stage, given.only, before)
    if missing := missing_references(checks, given.references):
        parser.error(
            f"{missing[0]} is not there, one of {len(missing)} references: make them on a CPU by "
            f"python -m benchmarks.gpu {given.references} --stage references"
        )
    seconds, started = STAGES[given.stage][1] if given.seconds is None else given.seconds, time.monotonic()
    stage = Stage(
        given.out, given.references, given.device, seconds, lambda line: print(line, flush=True), given.slower
    )
    rows = stage.run(checks)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{time.monotonic() - started:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of them on a CPU", flush=True)
    (given.out / f"{given.stage}.md").write_text(table(rows), encoding="utf-8")
    print(f"\n{table([row for row in rows if given.stage == 'measure' or row['passed'] is False])}", flush=True)
    return 0 if all(row["passed"] is not False for row in rows) else 1


def _references(out: Path, device: str) -> int:
    from benchmarks.gpu.references import write_all

    if device == "pretended":
        from benchmarks.gpu.rehearsal import SMALL_MODELS, SMALL_WORKS

        written = write_all(out, SMALL_MODELS, SMALL_WORKS)
    else:
        written = write_all(out)
    size = sum(path.stat().st_size for path in written)
    print(f"{len(written)} references, {size / 2**10:.0f} KiB, in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
