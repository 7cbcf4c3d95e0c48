"""What the Triton kernels become for a GPU that need not be there, compiled in a process without the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

import pytest
from packaging.version import Version


def is_triton_before(release: str) -> bool:
    """Of the compiler that is installed: a GPU machine's may be older than the extra [dev] has it."""
    return Version(version("triton")) < Version(release)


def compiled(*words: str) -> list[dict[str, Any]]:
    """The kernels that ``tests.helpers.compile_triton`` compiles for ``words``: of each, what it says."""
    pytest.importorskip("triton.backends.nvidia")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.helpers.compile_triton", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
