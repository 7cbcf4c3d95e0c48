"""Work in a process that can be killed: results, limits, cancelling, and the process's own death."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fwk.errors import InvalidRequest, NotServed, RequestFailed
from fwk.process.helper import Helper, Work, current_work


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    helper = Helper("tests.helpers.fork_jobs", None)
    yield helper
    helper.close()


def call(helper: Helper, kind: str, cpu_seconds: float = 0.2) -> bytes:
    return helper.call(kind, b"abc", cpu_seconds=cpu_seconds, max_bytes=64 << 20, what="the work")


def test_limits_and_results(helper: Helper) -> None:
    assert call(helper, "reverse") == b"cba"
    with pytest.raises(InvalidRequest, match=r"the work takes more than 0\.2 seconds of CPU time"):
        call(helper, "spin")
    with pytest.raises(InvalidRequest, match="the work takes more than 64 MB of memory"):
        call(helper, "allocate")
    with pytest.raises(InvalidRequest, match="seconds"):
        call(helper, "sleep", 0.05)
    with pytest.raises(InvalidRequest, match="not that one") as refused:
        call(helper, "refuse")
    assert refused.value.param == "field"
    with pytest.raises(RequestFailed):
        call(helper, "die")
    assert call(helper, "reverse") == b"cba"


def test_a_cancelled_job_ends_and_its_turn_is_free_meanwhile(helper: Helper) -> None:
    call(helper, "reverse")
    turns = threading.Semaphore(1)
    work = Work(turns)
    failures: list[BaseException] = []

    def wait() -> None:
        current_work.set(work)
        with turns:
            try:
                call(helper, "spin", 60)
            except (InvalidRequest, RequestFailed) as error:
                failures.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    process = next(p for p in psutil.Process().children() if "tests.helpers.fork_jobs" in p.cmdline())
    end = time.monotonic() + 10
    while not process.children() and time.monotonic() < end:
        time.sleep(0.005)
    assert turns.acquire(timeout=5), "another thread works while this one waits"
    turns.release()
    work.cancel()
    thread.join(10)
    assert failures
    assert not process.children()


def test_it_starts_again_after_it_died_and_not_after_close(helper: Helper) -> None:
    call(helper, "reverse")
    process = next(p for p in psutil.Process().children() if "tests.helpers.fork_jobs" in p.cmdline())
    process.kill()
    end = time.monotonic() + 10
    while True:  # a call that meets the dying process fails; the next ones don't
        try:
            assert call(helper, "reverse") == b"cba"
            break
        except RequestFailed:
            assert time.monotonic() < end
    helper.close()
    with pytest.raises(NotServed):
        call(helper, "reverse")
