"""C++ kernels of plugins: built on first use by the system's compiler, kept in the user's cache, called by ctypes.

A plugin ships a source file whose entry points are plain C (``extern "C"``), and calls ``load``. The library's name in
the cache is a hash of everything it depends on: source, flags (and so the instruction set), compiler. Sources may
use OpenMP: the library is linked without a runtime of its own and finds the one torch has loaded. Operators leave
that to the thread pool that runs them (``fwk.native.thread_pool``). A plugin's own headers are found next to the
source, core's (``fwk/thread_pool.h``) in ``INCLUDE``.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fwk.errors import ConfigError, PluginError
from fwk.native import cpu_features

COMPILERS = ("c++", "g++", "clang++")
TIMEOUT = 120
"""Seconds; a kernel should take a few."""

COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx512": (
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        "-mprefer-vector-width=512",
    ),
}
ISA_FLAGS["avx512_vnni"] = (*ISA_FLAGS["avx512"], "-mavx512vnni")
ISA_FLAGS["avx512_bf16"] = (*ISA_FLAGS["avx512_vnni"], "-mavx512bf16")
ISA_FLAGS["amx"] = (*ISA_FLAGS["avx512_bf16"], *cpu_features.FLAGS)
"""Instruction sets a kernel may be built for, from the least to the most, and how compilers are told."""

ISA_NEEDS: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
}
ISA_NEEDS["avx512_vnni"] = ISA_NEEDS["avx512"] | {"avx512_vnni"}
ISA_NEEDS["avx512_bf16"] = ISA_NEEDS["avx512_vnni"] | {"avx512_bf16"}
ISA_NEEDS["amx"] = ISA_NEEDS["avx512_bf16"] | cpu_features.CPU_FLAGS

EMULATED_AMX = "amx_emulated"
"""The kernels of ``amx`` with the instructions' work computed, on the most that this machine has besides: hundreds of
times as slow, for tests. Only whoever names it gets it."""

INCLUDE = Path(__file__).with_name("include")
"""Where core's headers are."""

ISA_VARIABLE = "FWK_CPU_ISA"
"""Environment variable that names a lesser instruction set than the machine has, or ``EMULATED_AMX``."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU, in Linux' names; empty when the system does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def refusal() -> str | None:
    """Why kernels cannot be built on this machine, as ``Declaration.refusal`` says it; None when they can."""
    if os.name != "posix":
        return "is built on first use, which works on Linux and macOS only"
    if _compiler() is None:
        return (
            f"is built on first use and finds no C++ compiler ({', '.join(COMPILERS)}, or what CXX names): install one "
            "(apt-get install g++)"
        )
    return None


@functools.cache
def amx_refusal() -> str | None:
    """Why kernels do not use AMX; None when they may. A CPU that has it and may not use it is told of once."""
    if not ISA_NEEDS["amx"] <= cpu_flags():
        return "this CPU has no AMX"
    why = cpu_features.refused_by_system()
    compiler = _compiler()
    if why is None and compiler is not None:
        why = cpu_features.refused_by_compiler(compiler)
    if why is not None:
        print(f"fwk: kernels are built without this CPU's AMX: {why}", file=sys.stderr, flush=True)
    return why


def isas() -> list[str]:
    """Instruction sets this machine can run, from the least to the most."""
    flags = cpu_flags()
    possible = [name for name, needs in ISA_NEEDS.items() if needs <= flags]
    return [name for name in possible if name != "amx" or amx_refusal() is None]


def testable_isas() -> list[str]:
    """What tests of kernels go through: ``isas()`` and the emulation."""
    return [*isas(), EMULATED_AMX]


def isa() -> str:
    """The instruction set kernels are built for: the machine's best, or what ``FWK_CPU_ISA`` names.

    Raises ``ConfigError`` when that is unknown, or more than the machine has.
    """
    possible = isas()
    wanted = os.environ.get(ISA_VARIABLE) or possible[-1]
    if wanted not in (*possible, EMULATED_AMX):
        why = f"; {amx_refusal()}" if wanted == "amx" else ""
        raise ConfigError(f"{ISA_VARIABLE}={wanted}: this machine runs {', '.join(possible)}{why}")
    return wanted


def flags_of(instructions: str) -> tuple[str, ...]:
    """How compilers are told of an instruction set: one of ``testable_isas()``."""
    if instructions == EMULATED_AMX:
        most = next(name for name in reversed(isas()) if name != "amx")
        return (*ISA_FLAGS[most], "-DFWK_EMULATED_TILES", "-O1")  # built twice as fast, and slow in any case
    return ISA_FLAGS[instructions]


def has_pairs(instructions: str) -> bool:
    """Whether kernels multiply bfloat16 in pairs."""
    return "-mavx512bf16" in flags_of(instructions)


def has_tiles(instructions: str) -> bool:
    """Whether kernels multiply blocks by AMX or its emulation."""
    return instructions in ("amx", EMULATED_AMX)


def load(source: Path, instructions: str | None = None) -> ctypes.CDLL:
    """The library of one C++ file, built if nobody has; instructions: by default ``isa()``.

    Raises ``PluginError`` when there is no compiler, or it fails.
    """
    target = build_library(source, instructions)
    import torch  # noqa: F401, PLC0415 - brings the OpenMP runtime that the library is to share

    try:
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise PluginError(f"the kernel {target} cannot be loaded: {error}; remove that file to build it anew") from None


def build_library(source: Path, instructions: str | None = None) -> Path:
    """Where the library of one C++ file is: in the cache, if nothing it depends on has changed, or built there.

    instructions: one of ``ISA_FLAGS``, which this machine need not have, or ``EMULATED_AMX``. Raises as ``load`` does.
    """
    why = refusal()
    compiler = _compiler()
    if why is not None or compiler is None:
        raise PluginError(f"the kernel {source.stem} {why}")
    flags = (*COMMON_FLAGS, *flags_of(instructions or isa()))
    key = hashlib.sha256()
    said = (" ".join(flags), _version(compiler), platform.machine())
    for part in (*(file.read_bytes() for file in _files(source)), *map(str.encode, said)):
        key.update(len(part).to_bytes(8, "little") + part)
    folder = _folder()
    target = folder / f"{source.stem}-{key.hexdigest()[:24]}.so"
    if not target.exists():
        with _locked(folder / f"{target.name}.lock"):
            if not target.exists():
                _build(source, target, compiler, flags)
    return target


def _files(source: Path) -> list[Path]:
    """The source and the headers it includes from its own folder or core's, in the order they are met."""
    found = [source]
    for file in found:
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
            header = next((path for path in (file.parent / name, INCLUDE / name) if path.is_file()), None)
            if header is not None and header not in found:
                found.append(header)
    return found


def _build(source: Path, target: Path, compiler: tuple[str, ...], flags: tuple[str, ...]) -> None:
    """Compile and link in a folder of its own, then put the library into place in one move."""
    print(f"fwk: building the kernel {source.stem} (once, some seconds) ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        compiled, linked = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        # Linking does not get -fopenmp: it would bring a second OpenMP runtime, with threads of its own.
        undefined = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else []
        _run([*compiler, *flags, f"-I{INCLUDE}", "-c", str(source), "-o", str(compiled)], source)
        _run([*compiler, "-shared", *undefined, str(compiled), "-o", str(linked)], source)
        os.replace(linked, target)


def _run(command: list[str], source: Path) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"the kernel {source.stem} could not be built: {error}") from None
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
        why = lines[0] if lines else f"exit status {done.returncode}"
        raise PluginError(f"the kernel {source.stem} could not be built by {command[0]}: {why}")


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process builds; others wait and find the outcome."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fwk" / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise PluginError(f"no folder to keep built kernels in: {error}; name another in XDG_CACHE_HOME") from None
    return folder


def _compiler() -> tuple[str, ...] | None:
    """The command that compiles, with the arguments ``CXX`` may hold."""
    return _found_compiler(os.environ.get("CXX", ""), os.environ.get("PATH"), COMPILERS)


@functools.cache
def _found_compiler(named: str, path: str | None, known: tuple[str, ...]) -> tuple[str, ...] | None:
    """Looked for once: dozens of declarations ask in a start."""
    command = tuple(shlex.split(named))
    if command:
        return command if shutil.which(command[0], path=path) else None
    found = (shutil.which(name, path=path) for name in known)
    return next(((name,) for name in found if name), None)


@functools.cache
def _version(compiler: tuple[str, ...]) -> str:
    try:
        done = subprocess.run([*compiler, "--version"], capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"the C++ compiler {compiler[0]} does not run: {error}") from None
    return " ".join(compiler) + done.stdout
