"""The rest of ``.ci/run``, once the README's command, the gate, has run."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from tests.helpers import durations
from tests.helpers.steps import LOGS, ROOT, Done, report, run
from tests.helpers.sweep import PROCESSES

MINUTES = 27.0
"""Of the whole run; what the steps before leave is the sweep's."""
LATE = 1.0
"""Minutes that the sweep's tests may begin later than that, where the table of durations is wrong."""
INSTALL = 120.0
"""Seconds of the README's command that install."""
CLIENTS = 4.0
"""Minutes of the newest client libraries, which change without a commit of ours: what they find holds nothing up."""
RECENT = 4 * 3600
"""Seconds before the newest commit from which on commits are the change."""


def base() -> str:
    """The last commit that is not of the change: made so long before the newest one."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()

    (newest,) = git("log", "-1", "--format=%ct")
    found = git("rev-list", "-1", f"--before={int(newest) - RECENT}", "HEAD")
    return (found or git("rev-list", "--max-parents=0", "HEAD"))[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gate-code", type=int, required=True)
    parser.add_argument("--gate-seconds", type=float, required=True)
    given = parser.parse_args()
    log = LOGS / "gate.log"
    done = [Done("gate", given.gate_code, given.gate_seconds, log.read_text(errors="replace"))]
    done += [
        run(name, ["make", "--no-print-directory", name], False)
        for name in ("lint", "types", "imports", "examples", "site")
    ]
    took = sum(step.seconds for step in done) / 60
    slower = max(given.gate_seconds - INSTALL, 60) * PROCESSES / max(sum(durations.read()["gate"].values()), 60)
    minutes = min(max(MINUTES - took - CLIENTS, 3.0), 15.0)
    # The table may be wrong: tests that have not begun by then are told as LEFT OUT.
    until = time.time() + (minutes + LATE) * 60
    sweep = [
        "env",
        f"TESTS_UNTIL={int(until)}",
        "make",
        "--no-print-directory",
        "sweep",
        f"CHANGED={base()}",
        f"MINUTES={minutes:.1f}",
        f"SLOWER={slower:.2f}",
        "SEED=0",
    ]
    # A test that hangs ends at its own limit; interrupted, pytest reports what it has; a minute later it is killed.
    done.append(
        run("sweep", ["timeout", "--signal=INT", "--kill-after=60", f"{minutes * 120 + 300:.0f}", *sweep], False)
    )
    clients = run(
        "clients", ["timeout", "--kill-after=10", f"{CLIENTS}m", "make", "--no-print-directory", "clients"], False
    )
    if clients.code:
        print("THE REAL CLIENTS FOUND SOMETHING, or took too long: see above", flush=True)
    done.append(clients._replace(code=0, name="clients" + (" (told only: failed)" if clients.code else "")))
    return report(done)


if __name__ == "__main__":
    sys.exit(main())
