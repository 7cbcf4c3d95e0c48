"""Engine processes that are started before there is anything to load."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from fwk.server.engine_process import EngineProcess, started_early
from fwk_jobs.terminal import TERMINAL_SIGNALS


def environment(process: psutil.Process) -> dict[str, str]:
    """That of a process which may not yet have become what it was started as."""
    for _ in range(2000):
        if "fwk.engine.process" in process.cmdline():
            return process.environ()
        time.sleep(0.01)
    raise AssertionError(f"no engine was started, but {process.cmdline()}")


def test_what_was_started_early_does_not_outlive_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found: list[psutil.Process] = []

    def start() -> None:
        with started_early() as engines_of:
            found.append(psutil.Process(engines_of(1)[0].pid))
            assert "OMP_NUM_THREADS" not in environment(found[0])
            found.extend(psutil.Process(engine.pid) for engine in engines_of(2))
            for process in found[1:]:
                assert "OMP_NUM_THREADS" in environment(process)  # two engines share the cores
            raise KeyError("the port is taken")

    with pytest.raises(KeyError, match="the port is taken"):
        start()
    assert [process.is_running() for process in found] == [False, False, False]


async def test_an_engine_that_is_let_go_before_it_knows_its_model_ends_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = EngineProcess()
    assert not engine.has_ended
    engine.release()
    assert await asyncio.gather(engine.wait(), engine.wait()) == [1, 1]
    assert engine.has_ended
    assert capfd.readouterr() == ("", "")


async def test_what_a_terminal_sends_while_it_imports_is_its_parents(capfd: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C in the first seconds: the shell sends it to all, and the parent ends its engines."""
    before = [signal.signal(number, signal.SIG_DFL) for number in TERMINAL_SIGNALS]
    try:
        engine = EngineProcess()
    finally:
        for number, handler in zip(TERMINAL_SIGNALS, before, strict=True):
            signal.signal(number, handler)
    for _ in range(4):
        for number in TERMINAL_SIGNALS:
            os.kill(engine.pid, number)
        await asyncio.sleep(0.1)
    assert not engine.has_ended
    engine.release()
    assert await engine.wait() == 1, "of itself"
    assert capfd.readouterr() == ("", "")


async def test_a_killed_one_is_waited_for() -> None:
    engine = EngineProcess()
    engine.kill()
    assert await engine.wait() == -9
    engine.discard()  # nothing is left to do, and nothing goes wrong


def test_nothing_heavy_is_imported_before_the_engine_is_started() -> None:
    code = "import sys, fwk.cli.main, fwk.cli.serve; print({'pydantic', 'pluggy', 'zmq', 'fastapi'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
