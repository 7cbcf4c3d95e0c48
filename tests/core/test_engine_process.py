"""Engine processes: started before there is anything to load, and forked from one that has imported."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import psutil
import pytest
from tests.helpers.rig import until

from fwk.server.engine_forks import ENGINE, EngineForks, started_early
from fwk.server.engine_process import EngineProcess, run_engine
from fwk_jobs.terminal import TERMINAL_SIGNALS

SECONDS = 60.0


def environment(process: psutil.Process) -> dict[str, str]:
    """That of a process which may not yet have become what it was started as."""
    for _ in range(2000):
        if "fwk.engine.process" in process.cmdline():
            return process.environ()
        time.sleep(0.01)
    raise AssertionError(f"no engine was started, but {process.cmdline()}")


@pytest.fixture
def before() -> list[psutil.Process]:
    """Children that earlier tests of this process left to it."""
    return psutil.Process().children()


def new_children(before: list[psutil.Process]) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child not in before]


@pytest.fixture
def forks(before: list[psutil.Process]) -> Iterator[EngineForks]:
    found = EngineForks()
    yield found
    found.close()


def test_what_was_started_early_does_not_outlive_a_start_that_failed(
    before: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found: list[psutil.Process] = []

    def start() -> None:
        with started_early() as engines_of:
            found.extend(new_children(before))
            assert "OMP_NUM_THREADS" not in environment(found[0])
            assert len(engines_of(2).begun) == 2
            found.extend(new_children(before))
            assert "OMP_NUM_THREADS" in environment(found[1])  # two engines share the cores
            raise KeyError("the port is taken")

    with pytest.raises(KeyError, match="the port is taken"):
        start()
    assert [process.is_running() for process in found] == [False, False]


async def test_an_engine_that_is_let_go_before_it_knows_its_model_ends_without_a_word(
    forks: EngineForks, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = forks.take()
    assert not engine.has_ended
    engine.release()
    assert await asyncio.gather(engine.wait(), engine.wait()) == [1, 1]
    assert engine.has_ended
    assert capfd.readouterr() == ("", "")


async def test_what_a_terminal_sends_while_it_imports_is_its_parents(
    before: list[psutil.Process], forks: EngineForks, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C in the first seconds: the shell sends it to all, and the parent ends its engines."""
    handlers = [signal.signal(number, signal.SIG_DFL) for number in TERMINAL_SIGNALS]
    try:
        engine = forks.take()
    finally:
        for number, handler in zip(TERMINAL_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
    for _ in range(4):
        for process in new_children(before):
            for number in TERMINAL_SIGNALS:
                process.send_signal(number)
        await asyncio.sleep(0.1)
    assert not engine.has_ended
    engine.release()
    assert await engine.wait() == 1, "of itself"
    assert capfd.readouterr() == ("", "")


async def test_one_of_its_own_that_is_killed_is_waited_for() -> None:
    engine = EngineProcess(partial(run_engine, ENGINE, 1))
    engine.kill()
    assert await engine.wait() == -9
    engine.discard()  # nothing is left to do, and nothing goes wrong


async def test_forks_are_children_that_share_memory_and_outlive_what_they_were_forked_from(
    before: list[psutil.Process], forks: EngineForks
) -> None:
    first, second = forks.take(), forks.take()
    [parent] = [child for child in new_children(before) if child.pid not in (first.pid, second.pid)]
    assert {child.pid for child in new_children(before)} == {parent.pid, first.pid, second.pid}
    await asyncio.to_thread(until, lambda: psutil.Process(second.pid).name() == "fwk-engine", SECONDS, "its name")
    assert parent.name() == "fwk-forks"
    assert len(os.listdir(f"/proc/{parent.pid}/task")) == 1
    own = psutil.Process(second.pid).memory_full_info()
    assert own.uss < own.rss / 4
    first.kill()
    assert await first.wait() == -9
    parent.kill()
    parent.wait()
    assert not second.has_ended
    third = forks.take()
    assert third.pid not in (parent.pid, 0)
    third.release()
    second.release()
    assert await asyncio.gather(second.wait(), third.wait()) == [1, 1]


async def test_one_whose_fork_never_came_has_ended(before: list[psutil.Process], forks: EngineForks) -> None:
    engine = forks.take()
    for process in new_children(before):
        process.kill()
    assert await engine.wait() == -9
    assert engine.pid == 0
    engine.discard()


async def test_nothing_waits_where_nothing_is_to(before: list[psutil.Process], forks: EngineForks) -> None:
    forks.settle(stays=False)
    engine = forks.take()
    pid = await asyncio.to_thread(lambda: engine.pid)
    await asyncio.to_thread(until, lambda: [c.pid for c in new_children(before)] == [pid], SECONDS, "its end")
    engine.discard()


def test_engines_that_share_cores_otherwise_are_forked_from_another() -> None:
    forks = EngineForks()
    assert forks.of(1) is forks
    assert forks.of(2) is forks.of(2) is not forks


def test_nothing_heavy_is_imported_before_the_engine_is_started() -> None:
    code = "import sys, fwk.cli.main, fwk.cli.serve; print({'pydantic', 'pluggy', 'zmq', 'fastapi'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
