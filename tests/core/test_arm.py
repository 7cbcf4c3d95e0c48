"""Programs of kernels against plain loops: on this machine, and for ARM, cross-compiled and run by an emulator.

What is for ARM needs Debian's g++-aarch64-linux-gnu and qemu-user, and is skipped without. No test here says how fast
they are.
"""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
from pathlib import Path

import pytest

from fwk_native import INCLUDE, compiler
from fwk_native.build import COMMON_FLAGS

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "tests/native"
PROGRAMS = {"kernels": 7, "more_kernels": 23}
"""Programs, and the results of each that plain loops in double have computed, too."""
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
SYSROOT = "/usr/aarch64-linux-gnu"
SOURCES = sorted([*(ROOT / "core").rglob("*.cpp"), *(ROOT / "plugins").rglob("*.cpp")])
MISSING = [name for name in (CROSS, EMULATOR) if shutil.which(name) is None]

pytestmark = pytest.mark.sweep
needs_arm = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (apt-get install g++-aarch64-linux-gnu qemu-user)"
)
needs_compiler = pytest.mark.skipif(compiler.find() is None, reason="no C++ compiler")


def build(command: list[str], name: str, target: Path) -> Path:
    plugins = ["", "quant/fwk_quant/_linear_cpu", "attention/fwk_attention/cpu"]
    folders = [INCLUDE, ROOT / "native/fwk_native", NATIVE, *(ROOT / "plugins" / folder for folder in plugins)]
    words = [
        *command,
        *COMMON_FLAGS,
        *(f"-I{folder}" for folder in folders),
        str(NATIVE / f"{name}.cpp"),
        "-o",
        str(target),
        "-lpthread",
    ]
    subprocess.run(words, check=True, timeout=300)
    return target


def results(said: str) -> list[tuple[str, float, list[float]]]:
    """Of each line: name, tolerance, numbers."""
    found = []
    for line in said.splitlines():
        words = line.split()
        at = next(i for i, word in enumerate(words) if word[0].isdigit())
        found.append((" ".join(words[:at]), float(words[at]), [float(word) for word in words[at + 1 :]]))
    return found


def are_close(ours: list[float], theirs: list[float], tolerance: float) -> bool:
    """Whether they differ by less than ``tolerance`` of the largest."""
    most = tolerance * max(map(abs, theirs))
    return len(ours) == len(theirs) and all(
        math.isfinite(a) and abs(a - b) <= most for a, b in zip(ours, theirs, strict=True)
    )


@pytest.fixture(scope="module", params=PROGRAMS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def run(command: list[str]) -> list[tuple[str, float, list[float]]]:
    return results(subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout)


@pytest.fixture(scope="module")
def emulated(name: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, float, list[float]]]:
    return run([EMULATOR, "-L", SYSROOT, str(build([CROSS], name, tmp_path_factory.mktemp("arm") / name))])


@pytest.fixture(scope="module")
def here(name: str, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, float, list[float]]]:
    return run([str(build(list(compiler.find() or ()), name, tmp_path_factory.mktemp("here") / name))])


@pytest.mark.parametrize(
    "where", [pytest.param("here", marks=needs_compiler), pytest.param("emulated", marks=needs_arm)]
)
def test_it_computes_what_plain_loops_do(name: str, where: str, request: pytest.FixtureRequest) -> None:
    checked = 0
    for before, (what, tolerance, numbers) in itertools.pairwise(request.getfixturevalue(where)):
        if what.startswith("reference"):
            assert what == f"reference {before[0]}"
            assert are_close(before[2], numbers, tolerance), what
            checked += 1
    assert checked == PROGRAMS[name]


@needs_arm
@needs_compiler
def test_it_computes_what_this_machine_does(
    here: list[tuple[str, float, list[float]]], emulated: list[tuple[str, float, list[float]]]
) -> None:
    assert [what for what, _, _ in here] == [what for what, _, _ in emulated]
    for (what, tolerance, ours), (_, _, theirs) in zip(here, emulated, strict=True):
        assert are_close(ours, theirs, tolerance), what


@needs_arm
@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_every_kernel_is_compiled(source: Path, tmp_path: Path) -> None:
    command = [CROSS, *COMMON_FLAGS, f"-I{INCLUDE}", "-shared", str(source), "-o", str(tmp_path / "kernel.so")]
    subprocess.run(command, check=True, timeout=300)
    said = subprocess.run(["file", str(tmp_path / "kernel.so")], capture_output=True, text=True, check=False).stdout
    assert "aarch64" in said or not said
