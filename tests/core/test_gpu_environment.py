"""The suites of the pretended device and of kernels compiled ahead, in the versions of a GPU machine.

``make gpu-environment`` makes the environment, of 5 GB. Where it is not there, nothing is run.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("GPU_ENVIRONMENT", ROOT / "build" / "gpu-environment")) / "bin" / "python"
LISTED = re.search(r"^GPU_SUITES = ((?:.*\\\n)*.*)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
"""What ``make gpu-environment`` runs."""


def suites() -> list[str]:
    """Files of tests."""
    assert LISTED is not None
    words = re.sub(r"\$\(wildcard (.*?)\)|\\\n", r" \1 ", LISTED[1]).split()
    return sorted(path.relative_to(ROOT).as_posix() for word in words for path in ROOT.glob(word))


def compiled_ahead() -> list[str]:
    """Files of tests that look at kernels' machine code."""
    found = (ROOT / "tests" / "plugins").rglob("test_*.py")
    return sorted(
        path.relative_to(ROOT).as_posix() for path in found if "machine_code import" in path.read_text(encoding="utf-8")
    )


def test_the_list_is_found() -> None:
    assert {"tests/core/test_devices.py", "tests/core/test_pretended.py"} <= set(suites())


def test_kernels_compiled_ahead_are_those_of_the_tests_names() -> None:
    """By which ``make gpu-environment`` asks for them."""
    found = dict[str, list[str]]()
    for suite in compiled_ahead():
        for one in ast.parse((ROOT / suite).read_text(encoding="utf-8")).body:
            if isinstance(one, ast.FunctionDef) and "compiled(" in ast.unparse(one):
                found.setdefault(Path(suite).parent.name, []).append(one.name)
    assert {"attention", "moe", "quant", "sampling"} <= found.keys()
    assert [name for names in found.values() for name in names if not name.startswith("test_machine_code")] == []


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_python_that_only_names_versions_is_not_taken(tmp_path: Path) -> None:
    """As pyenv's python3.12 on the PATH does where none of its versions is the current one."""
    named, real = tmp_path / "bin" / "python3.12", tmp_path / ".pyenv" / "versions" / "3.12.9" / "bin" / "python3.12"
    for path in (named, real):
        path.parent.mkdir(parents=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    command = ["make", "--dry-run", "--no-print-directory", "-C", str(ROOT), "gpu-environment"]
    given = {**os.environ, "HOME": str(tmp_path), "PATH": f"{named.parent}:{os.environ['PATH']}"}
    given.pop("PYTHON312", None)
    for code, taken in ((127, real), (0, "python3.12")):
        named.write_text(f"#!/bin/sh\nexit {code}\n")
        ended = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
        assert f'"{taken}" -m venv' in ended.stdout
    command[1] = "PYTHON312=/nowhere/python3.12"
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, "no Python 3.12 runs here" in ended.stderr) == (2, True)


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PYTHON.exists(), reason="make gpu-environment makes it, of 5 GB")
@pytest.mark.parametrize("suite", [*suites(), *compiled_ahead()])
def test_suite(suite: str) -> None:
    command = [str(PYTHON), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", suite]
    if suite in compiled_ahead():
        command += ["-m", "sweep or not sweep", "-k", "machine_code"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
