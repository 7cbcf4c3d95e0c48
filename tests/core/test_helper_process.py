"""Work in a process that can be killed: results, limits, cancelling, and the process's own death."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import psutil
import pytest
from tests.helpers.packages import import_path
from tests.helpers.rig import write_model

from fwk.config import Config, ModelOptions
from fwk.config.wire import to_plain
from fwk.interfaces.feature import JobPart
from fwk.server import helper_process
from fwk.server.helper import HelperSetup
from fwk.server.helper_process import FeatureJobs, Jobs
from fwk.types import GrammarRequest
from fwk_grammar.grammar_masks.compiler import GrammarCompiler
from fwk_grammar.grammar_masks.jobs import GrammarJob
from fwk_jobs.client import JobError, JobProcess, Work, current_work
from fwk_jobs.frames import Job
from fwk_jobs.pool import WaitingPool


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[JobProcess]:
    monkeypatch.setenv("PYTHONPATH", import_path(Path(__file__).parents[2]))
    helper = JobProcess("tests.helpers.fork_jobs", None)
    yield helper
    helper.close()


def call(helper: JobProcess, kind: str, cpu_seconds: float = 0.2) -> bytes:
    return helper.call(kind, b"abc", cpu_seconds=cpu_seconds, max_bytes=64 << 20)


def failure(helper: JobProcess, kind: str, cpu_seconds: float = 0.2) -> JobError:
    with pytest.raises(JobError) as caught:
        call(helper, kind, cpu_seconds)
    return caught.value


def test_limits_and_results(helper: JobProcess) -> None:
    assert call(helper, "reverse") == b"cba"
    assert failure(helper, "spin").status == "cpu"
    assert failure(helper, "allocate").status == "memory"
    assert failure(helper, "sleep", 0.05).status == "cpu"
    refused = failure(helper, "refuse")
    assert (refused.status, str(refused), refused.param) == ("refused", "not that one", "field")
    assert failure(helper, "raise").status == "raised"
    assert failure(helper, "die").status == "failed"
    assert call(helper, "reverse") == b"cba"


def test_words_of_a_job_that_aborts_are_told_to_be_its_own(
    helper: JobProcess, capfd: pytest.CaptureFixture[str]
) -> None:
    assert failure(helper, "abort").status == "memory"
    first, second = capfd.readouterr().err.splitlines()[-2:]
    assert first == "memory allocation of 28672 bytes failed"
    assert second.startswith("a job of kind 'abort' was ended at its limit of 64 MiB: a line above")


def test_large_jobs_and_large_answers_pass_each_other(helper: JobProcess) -> None:
    """More than both pipes hold, in both directions at once."""
    body = bytes(4 << 20)
    with ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(helper.call, "large", body, cpu_seconds=5, max_bytes=256 << 20) for _ in range(24)]
        assert {len(job.result(60)) for job in jobs} == {4 << 20}


def test_a_cancelled_job_ends_and_its_turn_is_free_meanwhile(helper: JobProcess) -> None:
    call(helper, "reverse")
    turns = threading.Semaphore(1)
    work = Work(turns)
    failures: list[BaseException] = []

    def wait() -> None:
        current_work.set(work)
        with turns:
            try:
                call(helper, "spin", 60)
            except JobError as error:
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


def test_any_number_of_jobs_wait_and_few_threads_compute_meanwhile(helper: JobProcess) -> None:
    """Where no limit is given; what waits for the process holds up nothing else."""
    pool = WaitingPool(2, "test")
    gate, running, most = threading.Event(), [0], [0]

    def job() -> bytes:
        current_work.set(Work(pool))
        return helper.call("reverse", b"ab", cpu_seconds=5, max_bytes=64 << 20, max_waiting=None)

    def compute() -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        assert gate.wait(20)
        running[0] -= 1

    jobs = [pool.submit(job) for _ in range(64)]
    computed = [pool.submit(compute) for _ in range(6)]
    gate.set()
    assert [each.result(60) for each in jobs] == [b"ba"] * 64
    assert [each.result(20) for each in computed] == [None] * 6
    assert most[0] <= 2
    pool.shutdown()
    with pytest.raises(RuntimeError):
        pool.submit(compute)


def test_the_pool_keeps_nothing_of_what_has_failed() -> None:
    """A cycle would keep what a refused request has brought until the collector runs, which may be long."""

    class Payload:
        pass

    def refuse(payload: Payload) -> None:
        raise ValueError

    pool, payload = WaitingPool(1, "test"), Payload()
    seen = weakref.ref(payload)
    gc.disable()
    try:
        failed = pool.submit(refuse, payload)
        del payload
        assert isinstance(failed.exception(20), ValueError)
        del failed
        assert pool.submit(int).result(20) == 0, "the thread is done with it"
        assert seen() is None
    finally:
        gc.enable()
        pool.shutdown()


def test_media_beyond_a_number_are_refused(helper: JobProcess) -> None:
    with ThreadPoolExecutor(4) as threads:
        calls = [
            threads.submit(helper.call, "sleep", b"", cpu_seconds=0.05, max_bytes=1 << 20, max_waiting=2)
            for _ in range(4)
        ]
        told = [each.exception(60) for each in calls]
    assert sum(isinstance(error, JobError) and error.status == "busy" for error in told) == 2
    assert call(helper, "reverse") == b"cba", "another kind was never full"


def test_it_starts_again_after_it_died_and_not_after_close(helper: JobProcess) -> None:
    call(helper, "reverse")
    process = next(p for p in psutil.Process().children() if "tests.helpers.fork_jobs" in p.cmdline())
    process.kill()
    end = time.monotonic() + 10
    while True:  # a call that meets the dying process fails; the next ones don't
        try:
            assert call(helper, "reverse") == b"cba"
            break
        except JobError:
            assert time.monotonic() < end
    assert helper.trouble is None
    helper.close()
    assert failure(helper, "reverse").status == "closed"


def test_one_that_cannot_start_is_told_of() -> None:
    helper = JobProcess("tests.helpers.no_such_module", {})
    for number in range(2):
        assert failure(helper, "reverse").status == "failed"
        assert (helper.trouble is not None) == (number == 1), "once may be anything"
    helper.close()


def test_a_warm_up_starts_it_and_prepares_as_a_job_would(helper: JobProcess) -> None:
    answer = helper.warm_up("prepared", b"abc").result(60)
    assert (answer.status, answer.value) == ("ok", b"1"), "prepared before it ran"
    process = next(p for p in psutil.Process().children() if "tests.helpers.fork_jobs" in p.cmdline())
    assert call(helper, "prepared") == b"2"
    assert process.is_running(), "the job is computed where the warm-up was"
    helper.close()
    with pytest.raises(JobError, match="closed"):
        helper.warm_up("prepared", b"")


def test_a_warm_up_builds_the_grammar_backend_at_a_low_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    niceness: list[int] = []
    build = GrammarCompiler._build

    def watched(compiler: GrammarCompiler) -> object:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return build(compiler)

    monkeypatch.setattr(GrammarCompiler, "_build", watched)
    model = str(write_model(tmp_path / "tiny"))
    setup = HelperSetup(to_plain(Config(model=ModelOptions(model=model, load_format="dummy"))))
    jobs = Jobs(setup)

    def job(request: GrammarRequest | None) -> Job:
        body = msgspec.msgpack.encode(GrammarJob("llguidance", request))
        return Job(0, "features.grammar_masks", body, 1, 1, is_warm_up=request is None)

    own = os.getpriority(os.PRIO_PROCESS, 0)
    jobs.prepare(job(None))
    assert jobs.run(job(None)) == b""
    assert niceness == [min(own + 5, 19)]
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    grammar = job(GrammarRequest("regex", "[ab]+"))
    jobs.prepare(grammar)
    lowered: list[None] = []
    monkeypatch.setattr(helper_process, "_lower_priority", lambda: lowered.append(None))
    assert jobs.run(grammar) == b""
    assert not lowered, "a request waits for it"
    assert len(niceness) == 1, "the backend is built once"


def test_jobs_of_features_run_at_a_low_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a picture on a core that a step computes on would hold up all texts."""
    jobs = FeatureJobs.__new__(FeatureJobs)
    jobs._part = JobPart(None)  # type: ignore[arg-type]

    def priority(body: bytes) -> bytes:
        return str(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())).encode()

    monkeypatch.setattr(jobs._part, "run", priority)
    with ThreadPoolExecutor(1) as thread:  # a fork has one, too
        found = thread.submit(jobs.run, Job(0, "features.x", b"x", 1, 1)).result()
    assert int(found) == min(os.getpriority(os.PRIO_PROCESS, 0) + 5, 19)
