"""K/V read from another process's memory (NIXL, Mooncake): peers die, stall, lie, and libraries write late.

Caught when broken on purpose: digests not compared, a buffer used again while a library may write to it, a connection
that is not watched while bytes are on their way, other blocks lent than were asked for, another transport not told.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.engine_pair import counts, split
from tests.helpers.packages import import_path
from tests.helpers.transports import transports

import fwk
from fwk.interfaces.kv_transfer import KVTransfer, KVTransferContext, Transfer
from fwk.plugins import build, discover, find
from fwk.plugins.selection import plugin_options
from fwk.types import SamplingParams
from fwk_kv_transfer._common import memory
from fwk_kv_transfer._common.memory import Lent, MemoryTransfer, Reads
from fwk_kv_transfer._common.signed import Answer
from fwk_kv_transfer._common.wire import Wire, WireError

SECRET, IDENTITY = b"0123456789abcdef", b"i" * 32
NUM_BLOCKS, SHAPES = 12, ((4, 2, 8), (6,))
BLOCK_BYTES = (4 * 2 * 8 + 6) * 4
SECONDS = 20.0

pytestmark = pytest.mark.parametrize("name", transports("nixl", "mooncake"))


def make(name: str, fill: float) -> MemoryTransfer:
    caches = [torch.full((NUM_BLOCKS, *shape), fill) for shape in SHAPES]
    item = find(discover(), "kv_transfer", name)
    made: Any = build(item, KVTransferContext(caches, 4, plugin_options(item, {}), IDENTITY, SECRET))
    return made


def late(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


def ended(end: KVTransfer, key: str = "k", seconds: float = SECONDS) -> Transfer:
    limit = late(seconds)
    while time.monotonic() < limit:
        for transfer in end.poll():
            assert transfer.key == key
            return transfer
        time.sleep(0.005)
    raise AssertionError(f"{key} has not ended within {seconds:g} seconds")


@pytest.fixture
def sender(name: str) -> Iterator[MemoryTransfer]:
    made = make(name, 0.0)
    for cache in made.context.kv_caches:
        cache.copy_(torch.arange(cache.numel()).view(cache.shape))
    yield made
    made.close()


@pytest.fixture
def receiver(name: str) -> Iterator[MemoryTransfer]:
    made = make(name, -1.0)
    yield made
    made.close()


def is_untouched(end: KVTransfer) -> bool:
    return all(bool((cache == -1.0).all()) for cache in end.context.kv_caches)


def test_pieces_of_scattered_blocks_arrive_in_order(
    sender: MemoryTransfer, receiver: MemoryTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in (sender, receiver):
        monkeypatch.setattr(end, "_per_piece", 4)
    theirs, ours = [7, 8, 9, 2, 1, 0, 11, 4, 5], [0, 1, 2, 3, 5, 4, 8, 7, 11]
    sender.offer("k", theirs, late())
    receiver.receive(sender.address(), "k", list(range(9)), ours, late())
    got = ended(receiver)
    assert got.is_whole, got.error
    assert got.num_bytes == 9 * BLOCK_BYTES
    assert ended(sender).is_whole
    for mine, other in zip(receiver.context.kv_caches, sender.context.kv_caches, strict=True):
        assert torch.equal(mine[ours], other[theirs])
        assert bool((mine[[6, 9, 10]] == -1.0).all())


def test_many_regions_have_all_come_when_a_transfer_is_whole(sender: MemoryTransfer, receiver: MemoryTransfer) -> None:
    """None of these blocks has a neighbour: libraries that say so too early are caught by the digest."""
    for _ in range(20):
        sender.offer("k", [0, 2, 4, 6, 8, 10], late())
        receiver.receive(sender.address(), "k", list(range(6)), [1, 3, 5, 7, 9, 11], late())
        got = ended(receiver)
        assert got.is_whole, got.error
        assert ended(sender).is_whole


def test_what_is_damaged_is_not_taken(
    sender: MemoryTransfer, receiver: MemoryTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = receiver.read

    def damage(source: bytes, reads: Reads, is_stopped: Callable[[], bool]) -> None:
        read(source, reads, is_stopped)
        (ctypes.c_char * 1).from_address(reads.local[0])[0] = b"\xff"

    monkeypatch.setattr(receiver, "read", damage)
    sender.offer("k", [1], late())
    receiver.receive(sender.address(), "k", [0], [1], late())
    assert "damaged" in ended(receiver).error
    assert is_untouched(receiver)


@pytest.mark.parametrize("how", ["deadline", "cancel", "closed", "sender gone"])
def test_a_read_that_does_not_end_is_left_and_its_buffer_with_it(
    name: str, sender: MemoryTransfer, receiver: MemoryTransfer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """What the library writes later is in no block, nor in what is read meanwhile."""
    begun, may_end = threading.Event(), threading.Event()
    read, stuck = receiver.read, list[Reads]()

    def stall(source: bytes, reads: Reads, is_stopped: Callable[[], bool]) -> None:
        stuck.append(reads)
        begun.set()
        may_end.wait(SECONDS)

    monkeypatch.setattr(receiver, "read", stall)
    sender.offer("k", [1], late())
    receiver.receive(sender.address(), "k", [0], [1], late(0.3 if how == "deadline" else 600))
    assert begun.wait(SECONDS)
    started = time.monotonic()
    if how == "cancel":
        receiver.cancel("k")
    if how == "closed":
        receiver.close()
    if how == "sender gone":
        sender.close()
    assert not ended(receiver).is_whole
    assert time.monotonic() - started < 5
    assert is_untouched(receiver)
    if how in ("deadline", "cancel"):
        seen: list[Reads] = []
        monkeypatch.setattr(
            receiver, "read", lambda source, reads, stop: (seen.append(reads), read(source, reads, stop))
        )
        assert not ended(sender).is_whole
        sender.offer("again", [1], late())
        receiver.receive(sender.address(), "again", [0], [1], late())
        assert ended(receiver, "again").is_whole
        assert seen[0].local[0] != stuck[0].local[0], "the library may still write there"
    may_end.set()


def test_when_all_buffers_wait_for_the_library_transfers_end_at_their_deadlines(
    sender: MemoryTransfer, receiver: MemoryTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(memory, "MAX_BUFFERS", 1)
    monkeypatch.setattr(receiver, "read", lambda source, reads, is_stopped: may_end.wait(SECONDS))
    for key in ("first", "second"):
        sender.offer(key, [1], late())
        receiver.receive(sender.address(), key, [0], [1], late(0.3))
        assert ended(receiver, key).error == "the deadline has passed"
        ended(sender, key)
    may_end.set()
    monkeypatch.undo()
    sender.offer("third", [1], late())
    receiver.receive(sender.address(), "third", [0], [1], late())
    assert ended(receiver, "third").is_whole, "the buffer has come back"


LIES = {
    "fewer blocks": (lambda lent: Lent(lent.source, lent.layers, []), "other blocks than it was asked for"),
    "other layers": (lambda lent: Lent(lent.source, lent.layers[:1], lent.block_ids), "other blocks than it was asked"),
    "no such memory": (lambda lent: Lent(lent.source, [(1 << 40, 256)] * 2, lent.block_ids), "could not read"),
    "no such process": (lambda lent: Lent(b"127.0.0.1:1", lent.layers, lent.block_ids), "could not read|damaged"),
    "garbage": (lambda lent: Lent(b"\0\xff" * 20, lent.layers, lent.block_ids), "could not read|decode"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_peer_that_lies_ends_the_transfer(name: str, receiver: MemoryTransfer, lie: str) -> None:
    """One that knows the secret."""
    other = make(name, 1.0)
    lent = Lent(b"", [(rows.ctypes.data, rows.strides[0]) for rows in other._blocks.layers], [1])
    other.address()
    lied = LIES[lie][0](Lent(other._source or b"", lent.layers, lent.block_ids))
    with lying(lied) as peer:
        receiver.receive(peer, "k", [0], [1], late())
        failed = ended(receiver)
    assert not failed.is_whole
    assert failed.error
    assert is_untouched(receiver)
    other.offer("good", [3], late())
    receiver.receive(other.address(), "good", [0], [3], late())
    assert ended(receiver, "good").is_whole, "the library works on"
    other.close()


@contextlib.contextmanager
def lying(lent: Lent) -> Iterator[bytes]:
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(WireError, OSError):
            connection, _ = listener.accept()
            with connection:
                wire = Wire(connection, late())
                wire.shake_hands(SECRET, IDENTITY, is_client=False)
                wire.receive_message()
                wire.send_message(msgspec.msgpack.encode(Answer(BLOCK_BYTES)))
                wire.send_message(msgspec.msgpack.encode(lent))
                wire.send(b"\0" * 32)
                wire.receive_message()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield msgspec.msgpack.encode(listener.getsockname()[:2])
    finally:
        listener.close()
        thread.join(SECONDS)


def test_nothing_spins_while_there_is_nothing_to_do(sender: MemoryTransfer, receiver: MemoryTransfer) -> None:
    """A worker's cores are for the model."""
    sender.offer("k", [1], late())
    receiver.receive(sender.address(), "k", [0], [1], late())
    assert ended(receiver).is_whole
    shares: list[float] = []
    for _ in range(3):
        before, used = time.monotonic(), time.process_time()
        time.sleep(0.3)
        shares.append((time.process_time() - used) / (time.monotonic() - before))
    assert min(shares) < 0.4, shares


def test_another_transport_is_told(name: str, sender: MemoryTransfer) -> None:
    tcp: Any = make("tcp", -1.0)
    sender.offer("k", [1], late())
    tcp.receive(sender.address(), "k", [0], [1], late())
    assert ended(tcp).error == f"--disaggregation-transfer-backend is {name} there, tcp here"
    tcp.close()


SENDER = """
import sys, time
from tests.plugins.kv_transfer.test_memory import make
end = make(sys.argv[1], 5.0)
print("address", end.address().hex(), flush=True)
for number in range(40):
    end.offer(f"k{number}", [number % 12], time.monotonic() + 60)
time.sleep(120)
"""


@contextlib.contextmanager
def elsewhere(name: str) -> Iterator[tuple[subprocess.Popen[str], bytes]]:
    """A sender in a process of its own, and its address."""
    root = Path(__file__).parents[3]
    process = subprocess.Popen(
        [sys.executable, "-c", SENDER, name],
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": import_path(root)},
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("address "):
                yield process, bytes.fromhex(line.split()[1])
                break
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_process_that_dies_or_stops_ends_transfers_and_another_is_read(
    name: str, receiver: MemoryTransfer, how: str
) -> None:
    for _ in range(2):
        with elsewhere(name) as (process, address):
            receiver.receive(address, "k0", [0], [0], late())
            assert ended(receiver, "k0").is_whole
            os.kill(process.pid, signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            started = time.monotonic()
            receiver.receive(address, "k1", [0], [1], late(1.0))
            assert not ended(receiver, "k1").is_whole
            assert time.monotonic() - started < 5
    assert bool((receiver.context.kv_caches[0][0] == 5.0).all())
    assert bool((receiver.context.kv_caches[0][1] == -1.0).all())


def test_prompts_are_continued_as_one_engine_does(name: str, tiny_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": "float32",
        "page_size": 4,
        "max_total_tokens": 512,
        "check_blocks": True,
        "device": "cpu",
    }
    greedy = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[(seed * 37 + i * i * 11 + i) % 200 + 10 for i in range(30)] for seed in range(4)]
    with fwk.LLM(str(tiny_folder), **options) as alone:
        wanted = [x.token_ids for x in alone.generate(prompts, greedy)]
    with split(str(tiny_folder), tmp_path, **options, disaggregation_transfer_backend=name) as (llm, pair):
        assert [x.token_ids for x in llm.generate(prompts, greedy)] == wanted
        pair.settle()
        assert counts(pair.decode).kv_transfers == counts(pair.prefill).kv_transfers == 4
