"""C++ kernels of plugins: built on first use by the system's compiler, kept in the user's cache, called through ctypes.

A plugin ships a source file whose entry points are plain C (``extern "C"``), and calls ``load``. The library's name in
the cache (``cache``) is a hash of what it depends on: source, flags (and so the instruction set), compiler. Sources may
use OpenMP: the library is linked without a runtime of its own and finds the one torch has loaded. Operators leave
that to the thread pool that runs them (``fwk_native.thread_pool``). A plugin's own headers are found next to the
source, core's (``fwk/thread_pool.h``) in ``INCLUDE``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fwk_errors import PluginError
from fwk_native import cache, compiler, prebuilt
from fwk_native.cpu_features import flags_of, isa, isas
from fwk_process.progress import ProgressBar, is_watched

COMMON_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-fopenmp", "-w"),
    *("-fno-math-errno", "-fno-trapping-math", "-fno-strict-aliasing"),
)

INCLUDE = Path(__file__).with_name("include")
"""Where core's headers are."""

GUARD = Path(__file__).with_name("guard.py")

BAR_EVERY = 0.2
"""Seconds from one drawing of a build's bar to the next."""

SMALLEST = Path(__file__).with_name("thread_pool.cpp")
"""What every kernel needs, and a second builds: whether that works is taken for whether others will."""


def refusal() -> str | None:
    """Why kernels cannot be built on this machine, as ``Declaration.refusal`` says it; None when they can.

    Builds the thread pool once, to find a compiler that fails, a full disk or a folder that cannot be written to.
    """
    if prebuilt.FOLDER.is_dir() and _prebuilt(SMALLEST, isas()[-1]) is not None:
        return None
    return _unavailable() or _failure(compiler.find(), os.environ.get("XDG_CACHE_HOME"))


@functools.cache
def _failure(_command: tuple[str, ...] | None, _folder: str | None) -> str | None:
    """Cached: dozens of declarations ask in a start."""
    try:
        build_library(SMALLEST, "plain")
    except PluginError as error:
        return f"is built on first use, which fails here: {error}"
    return None


def _unavailable() -> str | None:
    if os.name != "posix":
        return "is built on first use, which works on Linux and macOS only"
    if compiler.find() is None:
        return (
            f"is built on first use and finds no C++ compiler ({', '.join(compiler.COMPILERS)}, or what CXX names): "
            "install one (apt-get install g++)"
        )
    return None


def load(source: Path, instructions: str | None = None) -> ctypes.CDLL:
    """The library of one C++ file, built unless the cache has it; instructions: by default ``isa()``.

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
    One that came with the wheel is taken before any other.
    """
    found = _prebuilt(source, instructions or isa())
    if found is not None:
        return found
    target, command, flags = _plan(source, instructions)
    if not cache.is_intact(target):
        try:
            with cache.locked(target, lambda: _say(f"waiting for the kernel {source.stem}, which is being built")):
                if not cache.is_intact(target):
                    _build(source, target, command, flags)
        except OSError as error:
            raise PluginError(f"the kernel {source.stem} could not be built in {target.parent}: {error}") from None
    return target


def find_library(source: Path) -> Path | None:
    """The library for this machine's instruction set, if it is there. Raises ``PluginError`` as ``load`` does."""
    target = _prebuilt(source, isa()) or _plan(source, None)[0]
    return target if cache.is_intact(target) or target.is_relative_to(prebuilt.FOLDER) else None


def _plan(source: Path, instructions: str | None) -> tuple[Path, tuple[str, ...], tuple[str, ...]]:
    """Where the library is kept once built, by which command, and with which flags."""
    try:
        command = required_compiler()
    except PluginError as error:
        raise PluginError(f"the kernel {source.stem} {error}") from None
    flags = (*COMMON_FLAGS, *flags_of(instructions or isa()))
    return cache.folder() / library_name(source, flags, compiler.version(command)), command, flags


def _prebuilt(source: Path, instructions: str) -> Path | None:
    """The library of a source that came with the wheel."""
    if not prebuilt.FOLDER.is_dir():
        return None
    return prebuilt.find(instructions, library_name(source, (*COMMON_FLAGS, *flags_of(instructions))))


def required_compiler() -> tuple[str, ...]:
    """The command that compiles. Raises ``PluginError`` where there is none."""
    why, command = _unavailable(), compiler.find()
    if why is not None or command is None:
        raise PluginError(str(why))
    return command


def library_name(source: Path, flags: tuple[str, ...], version: str = "") -> str:
    """The name of a library: of what it depends on. version: of the compiler, where it is built for this machine."""
    key = hashlib.sha256()
    said = (" ".join(flags), version, platform.machine())
    for part in (*(file.read_bytes() for file in _files(source)), *map(str.encode, said)):
        key.update(len(part).to_bytes(8, "little") + part)
    return f"{source.stem}-{key.hexdigest()[:24]}.so"


def _files(source: Path) -> list[Path]:
    """The source and the headers it includes from its own folder or core's, in the order they are met."""
    found = [source]
    for file in found:
        for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', file.read_text(encoding="utf-8"), re.MULTILINE):
            header = next((path for path in (file.parent / name, INCLUDE / name) if path.is_file()), None)
            if header is not None and header not in found:
                found.append(header)
    return found


def _say(what: str) -> None:
    print(f"fwk: {what} ...", file=sys.stderr, flush=True)


def _build(source: Path, target: Path, command: tuple[str, ...], flags: tuple[str, ...]) -> None:
    told = f"building the kernel {source.stem} (once, some seconds)"
    if not is_watched():
        _say(told)
    with (
        _termination_delayed(source),
        cache.workspace(target) as folder,
        ProgressBar(told, "steps", 2) as bar,
    ):
        linked = folder / "kernel.so"
        compile_library(source, linked, command, flags, bar)
        cache.store(linked, target)


def compile_library(
    source: Path, target: Path, command: tuple[str, ...], flags: tuple[str, ...], bar: ProgressBar | None = None
) -> None:
    """Compile and link one source. Raises ``PluginError`` with what the compiler says."""
    compiled = target.with_suffix(".o")
    # Linking does not get -fopenmp: it would bring a second OpenMP runtime, with threads of its own.
    undefined = ["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else []
    _run([*command, *flags, f"-I{INCLUDE}", "-c", str(source), "-o", str(compiled)], source, bar)
    _run([*command, "-shared", *undefined, str(compiled), "-o", str(target)], source, bar)
    compiled.unlink()


class _Terminated(BaseException):
    """SIGTERM came during a build."""


@contextmanager
def _termination_delayed(source: Path) -> Iterator[None]:
    """SIGTERM ends the compiler and removes its files, and then does what it would have done.

    Only in the main thread, where Python handles signals. Elsewhere the next build removes what is left.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, before)
        os.kill(os.getpid(), signal.SIGTERM)
        raise PluginError(f"the kernel {source.stem} was not built, as the process is to end") from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(command: list[str], source: Path, bar: ProgressBar | None) -> None:
    """One step of a build, at whose end the bar moves; its clock runs meanwhile."""
    try:
        code, said = _waited_for(command, bar)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PluginError(f"the kernel {source.stem} could not be built: {error}") from None
    if bar is not None:
        bar.add()
    if code:
        lines = [line for line in said.splitlines() if "error" in line.lower()] or said.splitlines()
        why = lines[0] if lines else f"exit status {code}"
        raise PluginError(f"the kernel {source.stem} could not be built by {command[0]}: {why}")


def _waited_for(command: list[str], bar: ProgressBar | None) -> tuple[int, str]:
    """A command's exit code, and what it wrote to standard error. It ends with this process, or with what is raised."""
    step = BAR_EVERY if bar is not None and bar.is_shown else compiler.TIMEOUT
    end = time.monotonic() + compiler.TIMEOUT
    with _guarded(command) as process:
        while True:
            try:
                said = process.communicate(timeout=step)[1]
                return process.returncode, said
            except subprocess.TimeoutExpired:
                if time.monotonic() >= end:
                    raise
                if bar is not None:
                    bar.refresh()


@contextmanager
def _guarded(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that ends, with all that it started, when this one does or the block is left."""
    theirs, ours = os.pipe()
    with open(ours, "wb", buffering=0) as pipe:  # a signal may end ``Popen`` before it has told of the process
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(theirs), *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                pass_fds=[theirs],
                start_new_session=True,
            )
        finally:
            os.close(theirs)
        with process:
            try:
                yield process
            finally:
                pipe.close()
