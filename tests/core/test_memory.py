"""Memory that is taken before it is wanted."""

from __future__ import annotations

import mmap
import socket
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fwk.engine.process import LaunchSpec
from fwk.server.engine_process import EngineProcess
from fwk.setup.checkpoint import num_bytes
from fwk_native.memory import HUGE, MAX_PREFAULT_BYTES, MemoryPrefaulter
from fwk_process.parent import Adoption

takes = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="memory is taken ahead on Linux, in huge pages")

SECONDS = 60
"""Nothing here waits for so long, unless it is wrong."""


class Taken:
    """What was asked of the system; says when there was ``enough``, and then waits for ``go_on``."""

    def __init__(self, enough: int) -> None:
        self.spans: list[tuple[int, int]] = []
        self._enough = enough
        self.is_enough, self.go_on = threading.Event(), threading.Event()

    def __call__(self, address: int, size: int) -> None:
        self.spans.append((address, size))
        if len(self.spans) == self._enough:
            self.is_enough.set()
            assert self.go_on.wait(SECONDS)


@takes
def test_whole_pages_are_taken_one_after_another() -> None:
    taken = Taken(3)
    taken.go_on.set()
    memory = MemoryPrefaulter(taken)
    memory.take(4 * HUGE - 1)
    assert taken.is_enough.wait(SECONDS)
    memory.give_back()
    first = taken.spans[0][0]
    assert first % HUGE == 0
    assert taken.spans == [(first + HUGE * number, HUGE) for number in range(3)]


@takes
def test_no_more_is_taken_once_the_memory_is_wanted() -> None:
    taken = Taken(2)
    memory = MemoryPrefaulter(taken)
    memory.take(50 * HUGE)
    assert taken.is_enough.wait(SECONDS)
    wanting = threading.Thread(target=memory.give_back)
    wanting.start()
    assert memory.are_wanted.wait(SECONDS)
    wanting.join(0.1)
    assert wanting.is_alive()  # until a call under way has come back
    taken.go_on.set()
    wanting.join()
    assert len(taken.spans) == 2


@takes
def test_there_is_a_most() -> None:
    taken = Taken(MAX_PREFAULT_BYTES // HUGE)
    taken.go_on.set()
    memory = MemoryPrefaulter(taken)
    memory.take(1 << 50)
    assert taken.is_enough.wait(SECONDS)
    memory.give_back()
    assert len(taken.spans) == MAX_PREFAULT_BYTES // HUGE


def test_nothing_is_taken_for_a_model_without_files() -> None:
    taken = Taken(1)
    memory = MemoryPrefaulter(taken)
    memory.take(HUGE - 1)
    memory.give_back()
    assert taken.spans == []


@takes
def test_the_system_has_it_back() -> None:
    def is_mapped(address: int) -> bool:
        with open("/proc/self/maps", encoding="ascii") as file:
            spans = [[int(x, 16) for x in line.split()[0].split("-")] for line in file]
        return any(start <= address < end for start, end in spans)

    taken = Taken(37)
    memory = MemoryPrefaulter(taken)
    memory.take(37 * HUGE)
    assert taken.is_enough.wait(SECONDS)
    lowest = taken.spans[0][0]
    assert is_mapped(lowest)
    taken.go_on.set()
    memory.give_back()
    assert not is_mapped(lowest)


def test_memory_is_taken_for_what_a_model_holds_until_its_engine_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "folder").mkdir()
    assert num_bytes(tmp_path) == 1002
    assert num_bytes(tmp_path / "a.safetensors") == 1000
    sent: list[socket.socket] = []
    forks: Any = SimpleNamespace(wait=lambda: -9, kill=lambda: None)
    engine = EngineProcess(lambda theirs: sent.append(theirs.dup()) or forks, Adoption())
    engine._memory = memory = Memory()  # type: ignore[assignment]
    engine.model_bytes = 1002
    engine.tell(LaunchSpec("ipc://nowhere", "client", {}, "f"))
    assert memory.taken == [2004]
    assert b'"address":"ipc://nowhere"' in sent[0].recv(1000)
    assert not engine.has_ended
    sent[0].close()
    engine.discard()
    assert (engine.pid, memory.taken) == (0, [2004, 0]), "what was to fork it has ended"


def test_memory_is_given_back_by_another_thread_while_it_begins_to_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may be there at any moment."""
    taken = Taken(1)
    memory = MemoryPrefaulter(taken)
    gave = threading.Event()
    start = threading.Thread.start

    def slow_start(thread: threading.Thread) -> None:
        if thread is not giving and not giving.ident:
            start(giving)
            gave.wait(0.2)  # it must not be through before the thread below runs
            assert not gave.is_set()
        start(thread)

    giving = threading.Thread(target=lambda: (memory.give_back(), gave.set()))
    monkeypatch.setattr(threading.Thread, "start", slow_start)
    memory.take(HUGE)
    taken.go_on.set()
    giving.join(SECONDS)
    assert gave.is_set()


class Memory:
    """Notes what is taken, and 0 when it is given back."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def take(self, num_bytes: int) -> None:
        self.taken.append(num_bytes)

    def give_back(self) -> None:
        self.taken.append(0)
