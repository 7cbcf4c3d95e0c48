"""What the Triton kernels become for a GPU that need not be there, compiled in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest


def compiled(*words: str) -> list[dict[str, Any]]:
    """The kernels that ``tests.helpers.compile_triton`` compiles for ``words``: of each, what it says."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compile_triton", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
