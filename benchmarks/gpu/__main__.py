"""One command for each stage on a GPU; nothing that fails stops what comes after it.

    python -m benchmarks.gpu OUT [--stage A|B|C] [--device cuda] [--seconds 520] [--only WORD]

A proves, B measures, C does a part of both again after a mend. Each case is a process with a time of its own, appends a
line to OUT/results.jsonl, and its log is in OUT/logs; at the end, or when the time is up, OUT/STAGE.md is a table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import Case, cases

Run = Callable[[Case, str, Path, float], dict[str, Any]]
"""A case on a device, with a folder for its files and at most so many seconds."""

SHOWN = (
    "largest difference",
    "tokens alike",
    "ms a token",
    "tokens a second",
    "prompt tokens a second",
    "memory",
    "error",
)


def in_a_process(case: Case, device: str, out: Path, seconds: float) -> dict[str, Any]:
    """What ``benchmarks.gpu.measure`` wrote, or how it ended."""
    logs = out / "logs"
    logs.mkdir(exist_ok=True)
    name = "".join(c if c.isalnum() else "-" for c in f"{case.stage} {case.name}")
    asked, found = logs / f"{name}.case.json", logs / f"{name}.result.json"
    asked.write_text(json.dumps(asdict(case)), encoding="utf-8")
    found.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.gpu.measure", str(asked), str(found), device]
    with (logs / f"{name}.log").open("w") as log:
        try:
            ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return {"passed": False, "error": f"not done in {seconds:.0f} s"}
    if found.exists():
        return json.loads(found.read_text(encoding="utf-8"))
    last = (logs / f"{name}.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
    return {"passed": False, "error": f"ended with {ended.returncode}: {' '.join(last)[:200]}"}


def run_stage(
    stage: str, device: str, out: Path, seconds: float, run: Run = in_a_process, chosen: Sequence[Case] | None = None
) -> list[dict[str, Any]]:
    """Run the cases of a stage as long as there is time; returns a row for each, the last of them perhaps not run."""
    out.mkdir(parents=True, exist_ok=True)
    end, rows = time.monotonic() + seconds, list[dict[str, Any]]()
    for case in cases(stage) if chosen is None else chosen:
        left = end - time.monotonic()
        started = time.monotonic()
        if left <= 0:
            found: dict[str, Any] = {"passed": False, "error": "no time was left"}
        else:
            try:
                found = run(case, device, out, min(left, case.seconds))
            except Exception as error:
                found = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        row = {"stage": stage, "case": case.name, "seconds": round(time.monotonic() - started, 1), **found}
        rows.append(row)
        with (out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    (out / f"{stage}.md").write_text(table(rows), encoding="utf-8")
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """As Markdown."""
    shown = [name for name in SHOWN if any(name in row for row in rows)]
    lines = [f"| case | passed | {' | '.join(shown)} |", "| --- " * (len(shown) + 2) + "|"]
    for row in rows:
        cells = [_cell(row.get(name)) for name in shown]
        lines.append(f"| {row['case']} | {'yes' if row['passed'] else 'NO'} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "" if value is None else str(value).replace("|", "/")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--stage", choices=("A", "B", "C"), default="A")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=520.0)
    parser.add_argument("--only", default="", help="cases whose name has this word")
    given = parser.parse_args()
    chosen = [case for case in cases(given.stage) if given.only in case.name]
    rows = run_stage(given.stage, given.device, given.out, given.seconds, chosen=chosen)
    print(table(rows))
    return 0 if all(row["passed"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
