"""The threads that run native operators."""

from __future__ import annotations

import ctypes
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.helpers.tiny import TINY

from fwk import native
from fwk.team import Tape, Team, operator

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

SOURCE = """
#include "fwk/team.h"

extern "C" {

struct Count { int64_t n; int32_t* taken; int64_t* sum; int32_t* seen; };

// Every chunk marks itself; after the barrier each member adds up what all have marked.
void count(const void* args, fwk::Member& m) {
    const Count& a = *(const Count*)args;
    m.chunks(a.n, [&](int64_t i) { a.taken[i]++; });
    int64_t sum = 0;
    for (int64_t i = 0; i < a.n; i++) sum += a.taken[i];
    a.sum[m.index] = sum;
    __atomic_add_fetch(a.seen + m.index, 1, __ATOMIC_RELAXED);
    m.barrier();
}

struct Step { int64_t n; const int64_t* from; int64_t* to; };

// Each chunk reads what the operator before wrote into another chunk.
void shift(const void* args, fwk::Member& m) {
    const Step& a = *(const Step*)args;
    m.chunks(a.n, [&](int64_t i) { a.to[i] = a.from[(i + 1) % a.n] + 1; });
}

// One member is late.
void late(const void* args, fwk::Member& m) {
    if (m.index == m.size - 1) usleep(*(const int64_t*)args);
    m.barrier();
}

}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    path = tmp_path_factory.mktemp("team") / "sample.cpp"
    path.write_text(SOURCE)
    return native.load(path, "plain")


class Count(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("taken", "sum", "seen"))]


class Step(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int64), ("from_", ctypes.c_void_p), ("to", ctypes.c_void_p)]


class Pause(ctypes.Structure):
    _fields_ = [("microseconds", ctypes.c_int64)]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("n", [0, 1, 3, 1000])
def test_each_chunk_is_taken_once_and_seen_by_all(library: ctypes.CDLL, size: int, n: int) -> None:
    taken, sums, seen = (ctypes.c_int32 * max(n, 1))(), (ctypes.c_int64 * size)(), (ctypes.c_int32 * size)()
    args = Count(n, *map(ctypes.addressof, (taken, sums, seen)))
    team = Team(size)
    for turn in range(1, 20):
        team.run(operator(library, "count"), args)
        assert list(taken[:n]) == [turn] * n
        assert list(sums) == [turn * n] * size
        assert list(seen) == [turn] * size


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_tape_runs_operators_one_after_the_other(library: ctypes.CDLL, size: int) -> None:
    n, length = 7, 300
    buffers = [(ctypes.c_int64 * n)(), (ctypes.c_int64 * n)()]
    team, tape = Team(size), Tape()
    team.tape = tape
    for i in range(length):
        ends = (buffers[i % 2], buffers[(i + 1) % 2])
        team.run(operator(library, "shift"), Step(n, *map(ctypes.addressof, ends)), is_small=i % 3 == 0)
    team.tape = None
    first = list(buffers[0])
    assert first == [length] * n  # recording runs them too
    assert len(tape) == length
    for turn in range(2, 8):
        team.replay(tape)
        assert list(buffers[0]) == [turn * length] * n
    team.run(operator(library, "shift"), Step(n, *map(ctypes.addressof, buffers)))
    assert len(tape) == length


def test_a_late_member_is_waited_for_asleep(library: ctypes.CDLL) -> None:
    """The others give their cores away: two members that wait 0.6 s take a small part of that."""
    team, args = Team(3), Pause(600_000)
    team.run(operator(library, "late"), Pause(0))
    before, started = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    team.run(operator(library, "late"), args)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert time.monotonic() - started >= 0.6
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


def test_an_idle_team_uses_no_cpu(library: ctypes.CDLL) -> None:
    team = Team(2)
    team.run(operator(library, "late"), Pause(0))
    before = resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(0.5)
    after = resource.getrusage(resource.RUSAGE_SELF)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.1


def test_cpu_threads_are_torchs_and_the_teams(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    code = (
        "import fwk, torch\n"
        f"with fwk.LLM({str(tmp_path)!r}, load_format='dummy', cpu_threads=3) as llm:\n"
        "    print(torch.get_num_threads(), llm.engine.executor._worker._team.size)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["3", "3"]
