"""Engine processes that are started before there is anything to load."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from fwk.config import Config, EngineOptions
from fwk.server.engine_process import EngineProcess, started_early


def test_what_was_started_early_does_not_outlive_a_start_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found: list[psutil.Process] = []

    def start() -> None:
        with started_early(Config(engine=EngineOptions(data_parallel_size=2))) as engines:
            found.extend(psutil.Process(engine.pid) for engine in engines)
            assert ["fwk.engine.process" in process.cmdline() for process in found] == [True, True]
            assert "OMP_NUM_THREADS" in found[0].environ()  # two engines share the cores
            raise KeyError("the port is taken")

    with pytest.raises(KeyError, match="the port is taken"):
        start()
    assert [process.is_running() for process in found] == [False, False]


async def test_an_engine_that_is_let_go_before_it_knows_its_model_ends_without_a_word(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = EngineProcess(Config())
    assert not engine.has_ended
    engine.let_go()
    assert await asyncio.gather(engine.wait(), engine.wait()) == [1, 1]
    assert engine.has_ended
    assert capfd.readouterr() == ("", "")


async def test_a_killed_one_is_waited_for() -> None:
    engine = EngineProcess(Config())
    engine.kill()
    assert await engine.wait() == -9
    engine.discard()  # nothing is left to do, and nothing goes wrong
