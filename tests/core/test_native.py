"""Kernels built on first use."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import fwk_native as native
from fwk.config import Config, EngineOptions
from fwk.errors import ConfigError, PluginError
from fwk.plugins import discover
from fwk.plugins.selection import probable_kernels
from fwk_native import build
from fwk_native import cache as libraries
from fwk_native.ahead import build_ahead

SOURCE = 'extern "C" int answer() { return %s; }'


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fwk" / "native"


def kernel(folder: Path, body: str = "42") -> Path:
    path = folder / "sample.cpp"
    path.write_text(SOURCE % body)
    return path


def built(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


def test_builds_once_and_anew_when_anything_changes(
    cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = kernel(tmp_path)
    assert native.load(source, "plain").answer() == 42
    assert capfd.readouterr().err == "fwk: building the kernel sample (once, some seconds) ...\n"
    native.load(source, "plain")
    assert capfd.readouterr().err == ""
    assert len(built(cache)) == 1
    assert cache.stat().st_mode & 0o077 == 0
    assert native.load(kernel(tmp_path, "43"), "plain").answer() == 43
    if len(native.isas()) > 1:
        native.load(source, native.isas()[-1])
        assert len(built(cache)) == 3


def test_headers_are_found_and_a_change_of_one_builds_anew(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "sample.cpp"
    source.write_text(
        '#include "own.h"\n#include "fwk/thread_pool.h"\nextern "C" int answer() { return OWN + fwk::YIELDS; }'
    )
    (tmp_path / "own.h").write_text('#include "deeper.h"\n#define OWN DEEPER')
    (tmp_path / "deeper.h").write_text("#define DEEPER 1000")
    first = native.load(source, "plain").answer()
    (tmp_path / "deeper.h").write_text("#define DEEPER 2000")
    assert native.load(source, "plain").answer() - first == 1000
    assert len(built(cache)) == 2


@pytest.mark.sweep
def test_two_processes_build_one_library(cache: Path, tmp_path: Path) -> None:
    source = kernel(tmp_path)
    code = f"from pathlib import Path; import fwk_native as native; native.load(Path({str(source)!r}), 'plain')"
    running = [subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate()[1].decode().count("building") for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert sum(said) == 1
    assert len(built(cache)) == 1
    assert [path for path in cache.iterdir() if path.is_dir()] == []


def test_no_compiler(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "no C++ compiler" in (native.refusal() or "")
    with pytest.raises(PluginError, match=r"the kernel sample .* finds no C\+\+ compiler .* install one"):
        native.load(source)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert native.refusal() is not None


def test_a_source_that_is_wrong_names_the_error_and_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"sample could not be built by .*nothing.* was not declared"):
        native.load(kernel(tmp_path, "nothing"), "plain")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_library_that_is_damaged_is_named(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_build", lambda source, target, *_: target.write_text("no library"))
    with pytest.raises(PluginError, match=r"sample-\w+\.so cannot be loaded.*remove that file"):
        native.load(kernel(tmp_path), "plain")


@pytest.mark.parametrize("damage", ["truncated", "changed", "no checksum", "writable by others"])
def test_a_damaged_library_is_built_again(
    damage: str, cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Loading a truncated library would end the process with SIGBUS."""
    source = kernel(tmp_path)
    library = native.build_library(source, "plain")
    content = library.read_bytes()
    if damage == "truncated":
        library.write_bytes(content[: len(content) // 2])
    elif damage == "changed":
        library.write_bytes(content[:-1] + b"x")
    elif damage == "no checksum":
        library.with_suffix(".sha256").unlink()
    else:
        library.chmod(0o777)
    capfd.readouterr()
    assert native.load(source, "plain").answer() == 42
    assert "building the kernel" in capfd.readouterr().err
    assert library.read_bytes() == content
    assert library.stat().st_mode & 0o777 == 0o700
    native.load(source, "plain")
    assert capfd.readouterr().err == ""


def test_another_users_files_are_refused(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = kernel(tmp_path)
    library = native.build_library(source, "plain")
    user = os.geteuid()
    if user == 0:
        os.chown(library, 12345, -1)
        with pytest.raises(PluginError, match=r"\.so belongs to another user \(uid 12345\), whose code is not run"):
            native.load(source, "plain")
        os.chown(library, user, -1)
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(PluginError, match=rf"native belongs to another user \(uid {user}\)"):
        native.load(source, "plain")


def test_a_folder_that_others_may_write_to_is_refused(cache: Path, tmp_path: Path) -> None:
    source = kernel(tmp_path)
    native.build_library(source, "plain")
    cache.chmod(0o777)
    with pytest.raises(PluginError, match=r"other users may write to .*native.*: chmod go-w"):
        native.load(source, "plain")


def test_a_build_that_is_killed_is_cleaned_up_by_the_next(cache: Path, tmp_path: Path) -> None:
    source = kernel(tmp_path)
    library = native.build_library(source, "plain")
    library.unlink()
    left = library.with_name(f"{library.name}.build")
    left.mkdir()
    (left / "kernel.o").write_text("half")
    assert native.load(source, "plain").answer() == 42
    assert [path for path in cache.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_during_a_build_leaves_no_process(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Neither the compiler nor what that started, as g++ does; nor a file, where the process could remove it."""
    compiler, started = tmp_path / "slow-c++", tmp_path / "started"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo slow\nfor last; do :; done\n'
        f'echo half > "$last"; sleep 60 & echo $! > {started}.tmp; mv {started}.tmp {started}; wait\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    code = (
        f"from pathlib import Path; import fwk_native as native; native.load(Path({str(kernel(tmp_path))!r}), 'plain')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -number
    if number == signal.SIGTERM:
        assert [path.suffix for path in cache.iterdir()] == [".lock"]
    with suppress(psutil.NoSuchProcess):
        compiling = psutil.Process(int(started.read_text()))
        while compiling.status() != psutil.STATUS_ZOMBIE:  # ended, and whoever adopted it has not looked yet
            assert time.monotonic() < deadline, "the compiler goes on"
            time.sleep(0.02)


def test_sigterm_while_a_compiler_is_started_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes before ``Popen`` has told of the process."""
    begun: list[subprocess.Popen[str]] = []
    real = subprocess.Popen

    def slow(*words: Any, **settings: Any) -> Any:
        begun.append(real(*words, **settings))
        os.kill(os.getpid(), signal.SIGTERM)
        return begun[0]

    monkeypatch.setattr(build, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": slow}))
    ended: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: ended.append(number))
    try:
        with pytest.raises(PluginError, match="as the process is to end"), build._termination_delayed(Path("k.cpp")):
            build._waited_for(["sleep", "60"], None)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended == [signal.SIGTERM]
    with begun[0] as process:
        assert process.wait(30) == -signal.SIGTERM


def test_a_disk_that_is_full_is_said(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PluginError, match=r"sample could not be built in .*native: .*No space left"):
        native.load(kernel(tmp_path), "plain")
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


def test_a_compiler_that_fails_is_a_refusal(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "broken-c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo broken\necho "error: no cc1plus" >&2; exit 1\n')
    compiler.chmod(0o755)
    assert native.refusal() is None
    monkeypatch.setenv("CXX", str(compiler))
    assert re.search(r"fails here: the kernel thread_pool .*error: no cc1plus", native.refusal() or "")


def test_a_cache_that_cannot_be_written_to_is_a_refusal(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert re.search("fails here: no folder to keep built kernels in: .*XDG_CACHE_HOME", native.refusal() or "")


def test_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.isas()[0] == "plain"
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)
    assert native.isa() == native.isas()[-1]
    monkeypatch.setenv(native.ISA_VARIABLE, "plain")
    assert native.isa() == "plain"
    monkeypatch.setenv(native.ISA_VARIABLE, "avx1024")
    with pytest.raises(ConfigError, match="FWK_CPU_ISA=avx1024: this machine runs plain"):
        native.isa()


def test_threads_are_torchs(cache: Path, tmp_path: Path) -> None:
    """One OpenMP runtime in the process: what torch was told holds in the kernel."""
    import torch

    source = tmp_path / "threads.cpp"
    source.write_text('#include <omp.h>\nextern "C" int most() { return omp_get_max_threads(); }')
    library = native.load(source, "plain")
    assert isinstance(library, ctypes.CDLL)
    before = torch.get_num_threads()
    try:
        for count in (3, 2):
            torch.set_num_threads(count)
            assert library.most() == count
    finally:
        torch.set_num_threads(before)


def test_several_are_built_ahead_in_a_process_of_its_own(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever needs one that is under way waits for it; a source that fails is told to whoever needs it."""
    sources = [tmp_path / f"{name}.cpp" for name in ("one", "two", "wrong")]
    for number, source in enumerate(sources, 1):
        source.write_text(f'extern "C" int answer() {{ return {number}; }}')
    sources[2].write_text("no C++")
    process = build_ahead(sources)
    assert process is not None
    assert process.wait(60) == 0
    assert "building 3 kernels for this CPU" in capfd.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(build, "_build", lambda *_: pytest.fail("it is built a second time"))
        assert [native.load(source).answer() for source in sources[:2]] == [1, 2]
    assert build_ahead(sources[:2]) is None, "they are there"
    with pytest.raises(PluginError, match="the kernel wrong could not be built"):
        native.load(sources[2])
    target = build.build_library(sources[0])
    target.unlink()
    with libraries.locked(target, pytest.fail):
        waiting = threading.Thread(target=build.build_library, args=(sources[0],))
        waiting.start()
        while "waiting for the kernel one" not in capfd.readouterr().err:
            time.sleep(0.01)
    waiting.join(60)
    assert libraries.is_intact(target)


def test_what_is_built_ahead_is_what_a_run_will_probably_choose() -> None:
    plugins = discover()
    names = {path.name for path in probable_kernels([Config()], plugins)}
    assert {"attention_bfloat16.cpp", "operators.cpp", "floats.cpp", "packing.cpp", "sampler.cpp"} <= names
    assert all(path.is_file() for path in probable_kernels([Config()], plugins))
    named = Config(engine=EngineOptions(attention_backend="torch", device="cpu"))
    assert names - {path.name for path in probable_kernels([named], plugins)} == {"attention_bfloat16.cpp"}
    elsewhere = Config(engine=EngineOptions(device="cuda"))
    assert "attention_bfloat16.cpp" not in {path.name for path in probable_kernels([elsewhere], plugins)}
