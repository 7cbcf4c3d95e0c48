"""A process for the checks of one group: a line for each as it ends.

    python -m benchmarks.gpu.child CHECKS.json OUT REFERENCES DEVICE

A line of JSON goes to standard output: ``{"begin": name}`` before a check, and its outcome after it. After an error of
CUDA's nothing on the device can be trusted: the process ends, and the parent begins another with what is left.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch._dynamo  # which torch else imports in the first check, for seconds

from benchmarks.gpu.cases import Check
from benchmarks.gpu.checks import FUNCTIONS, Bench, Skipped

SPOILED = 75
"""Exit code after an error of CUDA's."""
CUDA_ERRORS = (
    *("cuda error", "triton error [cuda]", "cublas_status", "cudnn_status", "cudaerror"),
    *("device-side assert", "illegal memory access", "misaligned address", "unspecified launch failure"),
    "internal assert failed",  # of torch's allocator, which knows no more what is captured
)
"""What errors say after which nothing on the device can be trusted, in small letters."""


def outcome(bench: Bench, check: Check) -> dict[str, Any]:
    """passed: True, False, or None where a check says nothing here."""
    started = time.monotonic()
    found: dict[str, Any] = {"check": check.name, "group": check.group, "passed": True}
    try:
        with _alarm(check.seconds):
            found["numbers"] = FUNCTIONS[check.function](bench, check)
    except Skipped as reason:
        found |= {"passed": None, "error": str(reason)}
    except Exception as error:
        where = "" if isinstance(error, AssertionError) else f" ({_where(error)})"
        found |= {"passed": False, "error": f"{type(error).__name__}: {error}{where}"}
        found["is_spoiled"] = is_spoiled(error)
        traceback.print_exc()
        bench.close()
    return {**found, "seconds": round(time.monotonic() - started, 1), "told": bench.told(check)}


def is_spoiled(error: BaseException | None) -> bool:
    """Whether it, or what it came of, is one of CUDA's."""
    seen: list[BaseException] = []
    while error is not None and error not in seen:
        seen.append(error)
        error = error.__cause__ or error.__context__
    return any(words in str(one).lower() for one in seen for words in CUDA_ERRORS)


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno}"


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not done in {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(checks: list[Check], bench: Bench) -> int:
    """The process's exit code."""
    for check in checks:
        print(json.dumps({"begin": check.name}), flush=True)
        found = outcome(bench, check)
        print(json.dumps(found), flush=True)
        if found.get("is_spoiled"):
            return SPOILED
    bench.close()
    return 0


def main() -> int:
    given, out, references, device = sys.argv[1:]
    checks = [Check(**check) for check in json.loads(Path(given).read_text(encoding="utf-8"))]
    if device == "pretended":
        from benchmarks.gpu.rehearsal import rehearsed

        with rehearsed(checks, Path(out), Path(references)) as (changed, bench):
            return run(changed, bench)
    return run(checks, Bench(device, torch.device(device), Path(out), Path(references)))


if __name__ == "__main__":
    sys.exit(main())
