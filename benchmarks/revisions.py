"""A decode step of several checkouts, in turns.

    python -m benchmarks.revisions CHECKOUT CHECKOUT ... [--batches 1,32] [--rounds 5] [--quantization int8]

Each checkout has an engine in a process of its own, which sleeps while others are measured; a round measures each once.
A checkout's own environment (``.venv``) is used where it has one, so that its entry points are those it declares.
Ratios are to the first, and are told apart by where the cores were in a round (``benchmarks.core_distance``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import core_distance

ENGINE = """
import json, sys
import fwk
from benchmarks.step_time import measure
llm = fwk.LLM(prefix_cache="none", max_total_tokens=16384, **json.loads(sys.argv[1]))
print(llm.engine.info.chosen["step"], flush=True)
for line in sys.stdin:
    batch, steps = map(int, line.split())
    print(json.dumps(measure(llm, batch, steps, 128, {"temperature": 0.0})), flush=True)
"""


class Checkout:
    """The engine of one checkout: its modules come before the installed ones."""

    def __init__(self, folder: Path, options: dict[str, str]) -> None:
        self.name = folder.name
        self.rows: list[dict[str, float]] = []
        path = [folder, folder / "core", *sorted((folder / "plugins").iterdir())]
        own = folder / ".venv" / "bin" / "python"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
        self._process = subprocess.Popen(
            [str(own if own.exists() else sys.executable), "-c", ENGINE, json.dumps(options)],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.step = self._line()

    def measure(self, batch: int, steps: int) -> None:
        """Add a row: median milliseconds of each part of a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{batch} {steps}\n")
        self._process.stdin.flush()
        self.rows.append(json.loads(self._line()))

    def close(self) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def measure_rounds(checkouts: list[Checkout], batch: int, rounds: int, steps: int) -> list[str]:
    """Measure each once a round; where the cores were in each."""
    places: list[str] = []
    for checkout in checkouts:
        checkout.rows.clear()
    for _ in range(rounds):
        before = core_distance.distance()
        for checkout in checkouts:
            checkout.measure(batch, steps)
        places.append(core_distance.name_of(before, core_distance.distance()))
    return places


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkouts", nargs="+", type=Path)
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization")
    arguments = parser.parse_args()
    options = {name: value for name in ("dtype", "quantization") if (value := getattr(arguments, name)) is not None}
    checkouts = [Checkout(folder.resolve(), options) for folder in arguments.checkouts]
    try:
        print(
            "| batch | cores | rounds | checkout | step | model ms | around ms | model to the first's |\n|"
            + " --- |" * 8
        )
        for batch in map(int, arguments.batches.split(",")):
            places = measure_rounds(checkouts, batch, arguments.rounds, arguments.steps)
            for place in sorted(set(places)):
                chosen = [i for i, name in enumerate(places) if name == place]
                for checkout in checkouts:
                    rows = [checkout.rows[i] for i in chosen]
                    ratios = [checkout.rows[i]["model"] / checkouts[0].rows[i]["model"] for i in chosen]
                    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                    medians = (statistics.median(row[part] for row in rows) for part in ("model", "around"))
                    cells = " | ".join(f"{value:.2f}" for value in medians)
                    head = f"| {batch} | {place} | {len(chosen)} | {checkout.name} | {checkout.step}"
                    print(f"{head} | {cells} | {spread} |", flush=True)
    finally:
        for checkout in checkouts:
            checkout.close()


if __name__ == "__main__":
    main()
