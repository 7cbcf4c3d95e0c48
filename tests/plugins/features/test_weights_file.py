"""Files of packed weights: what is written is mapped back, and nothing else ever is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fwk_features.weights_cache import file as weights_file
from fwk_features.weights_cache.file import TEMPORARY, DamagedFile, Entry, read, reserved
from fwk_features.weights_cache.unfinished import UnfinishedFile, write
from fwk_native.thread_pool import ThreadPool

KEY = "the key"
ENTRIES: dict[str, Entry] = {
    "first": ({"size": [3, 5]}, {"words": torch.arange(15, dtype=torch.int32).view(3, 5), "none": torch.empty(0)}),
    "second": ({}, {"matrix": torch.randn(7, 9, generator=torch.Generator().manual_seed(0)).bfloat16()}),
    "large": ({}, {"numbers": torch.arange(3 << 20, dtype=torch.int32)}),
}

KILLED = """
import os, sys
from pathlib import Path
from fwk_features.weights_cache import file as weights_file, unfinished
from tests.plugins.features.test_weights_file import ENTRIES, KEY
path = Path(sys.argv[1])
CALLS = ("pwrite", "ftruncate", "fchmod", "fsync", "replace", "close")
for last in range(1, 200):
    child = os.fork()
    if child == 0:
        left = [last]
        def dying(function):
            def call(*arguments):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), 9)
                return function(*arguments)
            return call
        for name in CALLS:
            setattr(os, name, dying(getattr(os, name)))
        with weights_file.reserved(path) as descriptor:
            unfinished.write(descriptor, path, KEY, ENTRIES)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 0:
        break
    print(last, int(path.exists()), flush=True)
"""
"""Children that write the file, each killed at a later call of the system's than the last, until one is not."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.weights"


@pytest.fixture
def threads() -> ThreadPool:
    return ThreadPool(2)


def store(path: Path, key: str = KEY) -> None:
    with reserved(path) as descriptor:
        assert descriptor is not None
        write(descriptor, path, key, ENTRIES)


def assert_whole(path: Path, threads: ThreadPool) -> None:
    found = read(path, KEY, threads)
    assert list(found) == list(ENTRIES)
    for name, (facts, tensors) in ENTRIES.items():
        assert dict(found[name][0]) == facts
        for label, x in tensors.items():
            assert found[name][1][label].dtype == x.dtype
            assert torch.equal(found[name][1][label], x)


def test_comes_back_as_it_was(path: Path, threads: ThreadPool) -> None:
    store(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert_whole(path, threads)
    assert list(path.parent.iterdir()) == [path]


def test_is_mapped_and_shared(path: Path, threads: ThreadPool) -> None:
    store(path)
    found = read(path, KEY, threads)
    with open("/proc/self/maps", encoding="ascii") as file:
        mine = [line for line in file if line.rstrip().endswith(str(path))]
    assert len(mine) == 1
    assert mine[0].split()[1].startswith("r--")
    low, high = (int(x, 16) for x in mine[0].split()[0].split("-"))
    assert low <= found["large"][1]["numbers"].data_ptr() < high


def test_another_key_is_refused(path: Path, threads: ThreadPool) -> None:
    store(path, "another key")
    with pytest.raises(DamagedFile, match="another model"):
        read(path, KEY, threads)


@pytest.mark.parametrize("others", [0o020, 0o002])
def test_files_that_others_may_write_to_are_refused(path: Path, threads: ThreadPool, others: int) -> None:
    store(path)
    path.chmod(0o600 | others)
    with pytest.raises(DamagedFile, match="other users"):
        read(path, KEY, threads)


def test_another_owners_is_refused(path: Path, threads: ThreadPool, monkeypatch: pytest.MonkeyPatch) -> None:
    store(path)
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    with pytest.raises(DamagedFile, match="belongs to another user"):
        read(path, KEY, threads)


@pytest.mark.parametrize("part", [0.0, 0.001, 0.3, 0.7, 0.999])
def test_a_truncated_one_is_refused(path: Path, threads: ThreadPool, part: float) -> None:
    store(path)
    os.truncate(path, int(path.stat().st_size * part))
    with pytest.raises(DamagedFile):
        read(path, KEY, threads)


@pytest.mark.parametrize("part", [0.0, 0.0001, 0.2, 0.5, 0.8, 0.9999, 0.999999])
@pytest.mark.parametrize("bit", [0, 7])
def test_a_flipped_bit_is_refused(path: Path, threads: ThreadPool, part: float, bit: int) -> None:
    store(path)
    place = int((path.stat().st_size - 1) * part)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))
    with pytest.raises(DamagedFile):
        read(path, KEY, threads)


def test_two_highest_bits_of_one_lane_are_refused(path: Path, threads: ThreadPool) -> None:
    """A sum that only multiplies would let the second cancel the first."""
    store(path)
    with path.open("r+b") as file:
        for place in (1 << 20, (1 << 20) + 64):
            file.seek(place + 7)
            byte = file.read(1)[0]
            file.seek(place + 7)
            file.write(bytes([byte ^ 128]))
    with pytest.raises(DamagedFile, match="checksum"):
        read(path, KEY, threads)


def test_one_writer_at_a_time(path: Path, threads: ThreadPool) -> None:
    with reserved(path) as first:
        assert first is not None
        with reserved(path) as second:
            assert second is None
        write(first, path, KEY, ENTRIES)
    assert_whole(path, threads)


def test_what_was_not_finished_is_removed(path: Path) -> None:
    with pytest.raises(RuntimeError), reserved(path):
        raise RuntimeError
    assert not list(path.parent.iterdir())


def test_killed_at_any_point(path: Path, threads: ThreadPool) -> None:
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", KILLED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=True, timeout=100)
    points = [line.split() for line in done.stdout.splitlines()]
    assert len(points) >= 10
    assert points[0][1] == "0"
    assert points[-1][1] == "1"  # after it was moved into its place
    assert_whole(path, threads)


def unfinished_file(path: Path, count: int) -> None:
    """What a writer leaves that is stopped after so many entries."""
    with reserved(path, keeps=True) as descriptor:
        assert descriptor is not None
        file = UnfinishedFile(descriptor, path, KEY)
        for name, entry in list(ENTRIES.items())[:count]:
            file.add(name, entry)


def recovered(path: Path, threads: ThreadPool, key: str = KEY) -> list[str]:
    with reserved(path, keeps=True) as descriptor:
        assert descriptor is not None
        found = UnfinishedFile(descriptor, path, key).recover(threads)
        for name, (facts, tensors) in found.items():
            assert facts == ENTRIES[name][0]
            assert all(torch.equal(x, ENTRIES[name][1][label]) for label, x in tensors.items())
        return list(found)


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_entries_of_a_stopped_writer_are_recovered(path: Path, threads: ThreadPool, count: int) -> None:
    """And the next writer adds the others to the same file."""
    unfinished_file(path, count)
    assert recovered(path, threads) == list(ENTRIES)[:count]
    with reserved(path, keeps=True) as descriptor:
        assert descriptor is not None
        file = UnfinishedFile(descriptor, path, KEY)
        file.recover(threads)
        for name, entry in ENTRIES.items():
            if name not in file:
                file.add(name, entry)
        file.finish()
    assert_whole(path, threads)
    assert list(path.parent.iterdir()) == [path]


def test_what_is_not_whole_is_not_recovered(path: Path, threads: ThreadPool) -> None:
    unfinished_file(path, 3)
    temporary = path.with_name(path.name + TEMPORARY)
    size = temporary.stat().st_size
    with temporary.open("r+b") as file:
        file.seek(size - 1000)
        file.write(b"x")
    assert recovered(path, threads) == ["first", "second"], "a byte of the third differs"
    assert temporary.stat().st_size < size, "it is cut off"
    os.truncate(temporary, temporary.stat().st_size - 1)
    assert recovered(path, threads) == ["first"]
    assert recovered(path, threads, "another key") == []
    unfinished_file(path, 2)
    temporary.chmod(0o660)
    assert recovered(path, threads) == [], "others might have written to it"


def test_room_is_made_by_age(tmp_path: Path, threads: ThreadPool) -> None:
    for age, name in enumerate(("old.weights", "middle.weights", "new.weights")):
        (tmp_path / name).write_bytes(bytes(100))
        os.utime(tmp_path / name, (age, age))
    (tmp_path / "killed.weights.tmp").write_bytes(bytes(100))
    (tmp_path / "other.txt").write_bytes(bytes(100))
    for age, name in ((0, "stopped.weights"), (3, "lately.weights")):
        unfinished_file(tmp_path / name, 1)
        temporary = tmp_path / (name + TEMPORARY)
        os.truncate(temporary, 100)
        os.utime(temporary, (age, age))
    with reserved(tmp_path / "written.weights"):
        weights_file.make_room(tmp_path, ".weights", 300)
        left = sorted(file.name for file in tmp_path.iterdir())
    assert left == ["lately.weights.tmp", "middle.weights", "new.weights", "other.txt", "written.weights.tmp"]
