"""The host and file tiers: bounded, and never a byte that was not put there for that key."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.helpers.tiers import CONTEXT, SIZE, data, key, settled

from fwk.errors import ConfigError
from fwk_cache._common import writer
from fwk_cache._common.sealed import HEADER_BYTES
from fwk_cache.file import FileOptions, entry
from fwk_cache.file.tier import FileTier
from fwk_cache.host import HostOptions
from fwk_cache.host.tier import HostTier


def buffer() -> memoryview:
    return memoryview(bytearray(SIZE))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def tiers(folder: Path) -> Iterator[list[FileTier]]:
    """Those a test opened, to be closed."""
    opened: list[FileTier] = []
    yield opened
    for one in opened:
        one.close()


def open_tier(tiers: list[FileTier], folder: Path, *, identity: bytes = b"i" * 32, gigabytes: float = 0.1) -> FileTier:
    options = FileOptions(hicache_storage_dir=str(folder), hicache_storage_size=gigabytes)
    tiers.append(FileTier(replace(CONTEXT, identity=identity, options=options)))
    return tiers[-1]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def fill(tiers: list[FileTier], folder: Path, count: int) -> FileTier:
    one = open_tier(tiers, folder)
    for i in range(count):
        assert one.put(key(i), data(i))
    return settled(one)


def misses(one: FileTier, i: int) -> bool:
    return not one.get(key(i), buffer())


# Host memory.


def test_host_gives_back_what_it_got_and_forgets_the_least_recently_used() -> None:
    one = HostTier(replace(CONTEXT, options=HostOptions(hicache_ratio=0.3)))
    assert one.num_places == 3
    for i in range(3):
        assert one.put(key(i), data(i))
    assert one.contains(key(0))
    assert one.put(key(3), data(3))
    assert [one.contains(key(i)) for i in range(4)] == [True, False, True, True]
    for i in (0, 2, 3):
        into = buffer()
        assert one.get(key(i), into)
        assert into == data(i)
    assert not one.get(key(1), buffer())


def test_host_takes_no_more_memory_than_it_was_given() -> None:
    one = HostTier(replace(CONTEXT, options=HostOptions(hicache_size=50e3 / 1e9)))
    assert one._memory.nbytes <= 50_000
    for i in range(1000):
        one.put(key(i), data(i))
    assert len(one._place_of) == one.num_places == 12
    assert sorted(one._place_of.values()) == list(range(12))
    into = buffer()
    assert one.get(key(999), into)
    assert into == data(999)


def test_host_memory_of_nothing_keeps_nothing() -> None:
    one = HostTier(replace(CONTEXT, options=HostOptions(hicache_ratio=0)))
    assert not one.put(key(1), data(1))
    assert not one.get(key(1), buffer())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hicache_size": 1e-9}, "--hicache-size 1e-09 has no room for one block"),
        ({"hicache_size": 1e5}, r"--hicache-size 100000 is 93132.* GiB of memory are free"),
    ],
)
def test_host_memory_that_cannot_be_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        HostTier(replace(CONTEXT, options=HostOptions(**options)))  # type: ignore[arg-type]


# Files.


def test_files_are_found_again_by_the_next_server(tiers: list[FileTier], folder: Path) -> None:
    first = fill(tiers, folder, 5)
    first.close()
    second = open_tier(tiers, folder)
    for i in range(5):
        into = buffer()
        assert second.contains(key(i))
        assert second.get(key(i), into)
        assert into == data(i)
    assert not second.contains(key(5))
    assert misses(second, 5)


def test_what_waits_to_be_written_can_be_read(tiers: list[FileTier], folder: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(entry, "write", lambda *_: time.sleep(0.2))
    one = open_tier(tiers, folder)
    one.put(key(1), data(1))
    into = buffer()
    assert one.contains(key(1))
    assert one.get(key(1), into)
    assert into == data(1)


def test_names_and_folders_tell_nothing(tiers: list[FileTier], folder: Path) -> None:
    fill(tiers, folder, 5)
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in folder.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0
        assert all(key(i).hex()[:8] not in path.name for i in range(5))
        assert set(path.name) <= set("0123456789abcdef")


DAMAGES = {
    "a bit of the bytes": lambda raw: raw[:2000] + bytes([raw[2000] ^ 1]) + raw[2001:],
    "the last bit": lambda raw: raw[:-1] + bytes([raw[-1] ^ 0x80]),
    "a bit of the checksum": lambda raw: raw[:85] + bytes([raw[85] ^ 4]) + raw[86:],
    "a bit of the key": lambda raw: raw[:45] + bytes([raw[45] ^ 4]) + raw[46:],
    "a bit of the identity": lambda raw: raw[:9] + bytes([raw[9] ^ 4]) + raw[10:],
    "the length": lambda raw: raw[:72] + bytes([raw[72] ^ 4]) + raw[73:],
    "another version": lambda raw: b"fwk kv 2" + raw[8:],
    "cut short": lambda raw: raw[:-1],
    "header only": lambda raw: raw[:HEADER_BYTES],
    "longer": lambda raw: raw + b"\0",
    "empty": lambda _: b"",
    "zeros": lambda raw: bytes(len(raw)),
    "something else": lambda raw: random.Random(0).randbytes(len(raw)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_a_miss_and_is_replaced(tiers: list[FileTier], folder: Path, damage: str) -> None:
    one = fill(tiers, folder, 1)
    [path] = files(folder)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert misses(one, 0)
    assert not one.contains(key(0)), "it would be asked for again and again"
    one.put(key(0), data(0))
    settled(one)
    assert not misses(one, 0)


def test_any_flipped_byte_is_noticed(tiers: list[FileTier], folder: Path) -> None:
    one = fill(tiers, folder, 1)
    [path] = files(folder)
    raw = path.read_bytes()
    for at in [*range(0, HEADER_BYTES), *random.Random(1).sample(range(len(raw)), 100)]:
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x10]) + raw[at + 1 :])
        assert misses(one, 0), at


def test_swapped_files_are_misses(tiers: list[FileTier], folder: Path) -> None:
    one = fill(tiers, folder, 2)
    a, b = files(folder)
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert misses(one, 0)
    assert misses(one, 1)


def test_another_models_files_are_misses(tiers: list[FileTier], folder: Path) -> None:
    fill(tiers, folder, 1)
    other = open_tier(tiers, folder, identity=b"j" * 32)
    assert misses(other, 0)
    [path] = files(folder)
    theirs = Path(other._path(key(0)))
    theirs.parent.mkdir(parents=True, exist_ok=True)
    theirs.write_bytes(path.read_bytes())
    assert misses(other, 0), "a copy under the right name is still of another model"


def test_what_is_no_file_is_a_miss(tiers: list[FileTier], folder: Path, tmp_path: Path) -> None:
    one = fill(tiers, folder, 3)
    a, b, c = (Path(one._path(key(i))) for i in range(3))
    kept = tmp_path / "kept"
    a.rename(kept)
    a.symlink_to(kept)
    b.unlink()
    b.mkdir()
    c.unlink()
    os.mkfifo(c)
    assert [misses(one, i) for i in range(3)] == [True] * 3
    assert kept.exists()


def test_the_folder_stays_below_its_size(tiers: list[FileTier], folder: Path) -> None:
    """The least recently used go first, another server's too; looking for an entry is a use of it."""
    other = open_tier(tiers, folder, identity=b"j" * 32, gigabytes=1e-4)
    for i in range(10):
        other.put(key(i), data(i))
    settled(other)
    one = open_tier(tiers, folder, gigabytes=1e-4)
    for i in range(100):
        one.put(key(i), data(i))
        settled(one)
        assert one.contains(key(0))
        assert sum(path.stat().st_size for path in files(folder)) <= 100_000
    assert one.contains(key(99))
    assert not one.contains(key(20))
    assert misses(other, 0)


def _write_many(folder: str, seed: int) -> None:
    opened: list[FileTier] = []
    one = open_tier(opened, Path(folder), gigabytes=2e-4)
    rng = random.Random(seed)
    for _ in range(300):
        i = rng.randrange(60)
        into = buffer()
        if one.get(key(i), into):
            assert into == data(i)
        one.put(key(i), data(i))
        if rng.random() < 0.1:
            settled(one)
    settled(one)
    one.close()


@pytest.mark.sweep
def test_two_servers_share_a_folder(folder: Path) -> None:
    """Both write, read and remove; neither ever reads half an entry, or another's."""
    context = multiprocessing.get_context("spawn")
    servers = [context.Process(target=_write_many, args=(str(folder), seed)) for seed in range(2)]
    for server in servers:
        server.start()
    for server in servers:
        server.join(60)
        assert server.exitcode == 0
    assert files(folder)
    assert not [path for path in files(folder) if path.name.endswith(entry.UNFINISHED)]
    assert sum(path.stat().st_size for path in files(folder)) <= 200_000 * (1 + 2 / 16)


def test_a_full_disk_is_told_once(tiers: list[FileTier], folder: Path, caplog, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Nothing is left behind, what is there can be read, and writing continues when there is room again."""
    one = fill(tiers, folder, 1)
    monkeypatch.setattr(writer, "PAUSE_SECONDS", 0.0)
    write = os.replace
    monkeypatch.setattr(entry.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with caplog.at_level(logging.WARNING):
        for i in range(1, 6):
            one.put(key(i), data(i))
            settled(one)
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    assert len(files(folder)) == 1
    assert [misses(one, i) for i in range(3)] == [False, True, True]
    assert one.trouble is not None
    assert "No space left" in one.trouble
    monkeypatch.setattr(entry.os, "replace", write)
    one.put(key(7), data(7))
    settled(one)
    assert not misses(one, 7)
    assert one.trouble is None


def test_after_a_failed_write_it_pauses(tiers: list[FileTier], folder: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    one = open_tier(tiers, folder)
    monkeypatch.setattr(entry, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    one.put(key(1), data(1))
    settled(one)
    assert not one.put(key(2), data(2))


def test_a_folder_removed_while_serving_costs_misses(tiers: list[FileTier], folder: Path) -> None:
    one = fill(tiers, folder, 2)
    for path in files(folder):
        path.unlink()
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir()
    folder.rmdir()
    assert misses(one, 0)
    one.put(key(3), data(3))
    settled(one)
    assert misses(one, 3)


def test_no_more_waits_than_a_bounded_number_of_bytes(tiers: list[FileTier], folder: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(writer, "QUEUE_BYTES", 4 * SIZE)
    monkeypatch.setattr(entry, "write", lambda *_: time.sleep(0.3))
    one = open_tier(tiers, folder)
    assert [one.put(key(i), data(i)) for i in range(8)] == [True] * 4 + [False] * 4


@pytest.mark.sweep
def test_closing_gives_up_in_time(folder: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(writer, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(entry, "write", lambda *_: time.sleep(0.5))
    one = open_tier([], folder)
    for i in range(4):
        one.put(key(i), data(i))
    started = time.monotonic()
    one.close()
    assert time.monotonic() - started < 1.7  # of the two seconds that all take
    settled(one)


def test_abandoned_files_are_cleared_away(tiers: list[FileTier], folder: Path) -> None:
    fill(tiers, folder, 1)
    old, new = folder / f"old{entry.UNFINISHED}", folder / f"new{entry.UNFINISHED}"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    open_tier(tiers, folder)
    assert not old.exists()
    assert new.exists()


def _under_a_file(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path / "kv"


def _a_file(path: Path) -> Path:
    _under_a_file(path)
    return path


def _open_to_all(path: Path) -> Path:
    path.mkdir(parents=True)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("prepare", "gigabytes", "message"),
    [
        (_under_a_file, 1, "cannot write there"),
        (_a_file, 1, "is not a folder"),
        (_open_to_all, 1, "other users could read"),
        (lambda path: path, 1e-7, "--hicache-storage-size 1e-07 has no room for one block"),
    ],
)
def test_folders_that_cannot_serve_are_refused(folder: Path, prepare, gigabytes: float, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message) as error:
        open_tier([], prepare(folder), gigabytes=gigabytes)
    assert "\n" not in str(error.value)
