"""Runs commands one after the other, and ends with one look: minutes of each step, and what failed in 40 lines.

``python -m tests.helpers.steps lint types ...`` runs ``make lint`` and so on; with ``--quiet`` what they print goes to
``build/check/STEP.log`` alone. A step that fails does not keep the next ones from running.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LOGS = ROOT / "build/check"
LINES = 40
TOLD = re.compile(r"^(FAILED|ERROR)\b|\berror\b[:\[ ]|^E501|^[A-Z]+\d+ |Would reformat|BROKEN|^E  ", re.IGNORECASE)


class Done(NamedTuple):
    name: str
    code: int
    seconds: float
    said: str


def run(name: str, command: list[str], quiet: bool) -> Done:
    LOGS.mkdir(parents=True, exist_ok=True)
    began, log = time.monotonic(), LOGS / f"{name.replace(' ', '_').replace('/', '_')}.log"
    with (
        log.open("w+", errors="replace") as file,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            file.write(line)
            if not quiet:
                print(line, end="", flush=True)
    return Done(name, process.returncode, time.monotonic() - began, log.read_text(errors="replace"))


def failures(done: list[Done]) -> list[str]:
    """At most ``LINES`` lines: what each failed step says of it, shared among them."""
    failed = [step for step in done if step.code]
    found: list[str] = []
    for step in failed:
        room = (LINES - len(failed)) // len(failed)
        lines = step.said.splitlines()
        told = [line[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
        told = told or [line[:200] for line in lines if TOLD.search(line)] or [line[:200] for line in lines[-room:]]
        more = [f"  ... and {len(told) - room + 1} more, in build/check"] if len(told) > room else []
        found += [f"{step.name} failed (exit {step.code}):", *(f"  {line}" for line in told[: room - len(more)]), *more]
    return found


def table(done: list[Done]) -> str:
    rows = [f"  {step.seconds / 60:5.1f} min  {'ok' if not step.code else 'FAILED'}  {step.name}" for step in done]
    return "\n".join([*rows, f"  {sum(step.seconds for step in done) / 60:5.1f} min  in all"])


def report(done: list[Done]) -> int:
    print("\n" + table(done), flush=True)
    if said := failures(done):
        print("\n" + "\n".join(said), flush=True)
    return max((abs(step.code) for step in done), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quiet", action="store_true")
    parser.add_argument("steps", nargs="+")
    given = parser.parse_args()
    return report([run(name, ["make", "--no-print-directory", name], given.quiet) for name in given.steps])


if __name__ == "__main__":
    sys.exit(main())
