"""K/V over TCP from and to sides that lie, stall, die or are strangers: nothing hangs, and nothing damaged is taken.

Caught when broken on purpose: tags not compared, the piece's number left out of its tag, no deadline on reads, either
side's proof not checked, blocks written before their tag is checked, places or identity not checked, an offer that
two read.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch

from fwk.errors import ConfigError
from fwk.interfaces.kv_transfer import KVTransferContext, Transfer
from fwk_kv_transfer._common import signed
from fwk_kv_transfer._common.signed import MAX_CONNECTIONS, Answer, Wanted
from fwk_kv_transfer._common.wire import HELLO_SECONDS, MAGIC, MAX_MESSAGE_BYTES, Wire, WireError
from fwk_kv_transfer.tcp import TcpOptions
from fwk_kv_transfer.tcp.transport import TcpTransfer

SECRET, IDENTITY = b"0123456789abcdef", b"i" * 32
SHAPE = (4, 2, 8)
BLOCK_BYTES = 2 * 4 * 2 * 8 * 4
SECONDS = 20.0


def make(fill: float = 0.0, secret: bytes = SECRET, num_blocks: int = 8, **options: Any) -> TcpTransfer:
    caches = [torch.full((num_blocks, *SHAPE), fill) for _ in range(2)]
    return TcpTransfer(KVTransferContext(caches, 4, TcpOptions(**options), IDENTITY, secret))


def late() -> float:
    return time.monotonic() + SECONDS


def ended(end: TcpTransfer, key: str = "k", seconds: float = SECONDS) -> Transfer:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        for transfer in end.poll():
            assert transfer.key == key
            return transfer
        time.sleep(0.005)
    raise AssertionError(f"{key} has not ended within {seconds:g} seconds")


@pytest.fixture
def receiver() -> Iterator[TcpTransfer]:
    made = make(-1.0)
    yield made
    made.close()


@pytest.fixture
def sender() -> Iterator[TcpTransfer]:
    made = make(1.0)
    yield made
    made.close()


@contextlib.contextmanager
def liar(behave: Callable[[Wire, socket.socket], None]) -> Iterator[bytes]:
    """A side that shakes hands as it should, and then does something else; its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        with contextlib.suppress(WireError, OSError):
            connection, _ = listener.accept()
            with connection:
                wire = Wire(connection, late())
                wire.shake_hands(SECRET, IDENTITY, is_client=False)
                wire.receive_message()
                behave(wire, connection)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield msgspec.msgpack.encode(listener.getsockname()[:2])
    finally:
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(SECONDS)
        assert not thread.is_alive()


def agree(wire: Wire) -> None:
    wire.send_message(msgspec.msgpack.encode(Answer(BLOCK_BYTES)))


def is_untouched(end: TcpTransfer) -> bool:
    return all(bool((cache == -1.0).all()) for cache in end.context.kv_caches)


def test_many_pieces_arrive_in_order(
    sender: TcpTransfer, receiver: TcpTransfer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for end in (sender, receiver):
        monkeypatch.setattr(end._blocks, "per_piece", 2)
    for cache in sender.context.kv_caches:
        cache.copy_(torch.arange(cache.numel()).view(cache.shape))
    sender.offer("k", [7, 6, 5, 4, 3], late())
    receiver.receive(sender.address(), "k", [0, 1, 2, 3, 4], [0, 1, 2, 3, 4], late())
    got = ended(receiver)
    assert got.is_whole
    assert got.num_bytes == 5 * BLOCK_BYTES
    assert ended(sender).is_whole
    for mine, theirs in zip(receiver.context.kv_caches, sender.context.kv_caches, strict=True):
        assert torch.equal(mine[:5], theirs[[7, 6, 5, 4, 3]])


def test_another_secret_gets_nothing(sender: TcpTransfer) -> None:
    stranger, friend = make(-1.0, b"another secret!!"), make(-1.0)
    sender.offer("k", [1], late())
    stranger.receive(sender.address(), "k", [0], [1], late())
    failed = ended(stranger)
    assert not failed.is_whole
    friend.receive(sender.address(), "k", [0], [1], late())
    assert ended(friend).is_whole, "the offer was still there"
    stranger.close()
    friend.close()


def test_a_sender_that_does_not_know_the_secret_is_not_believed(receiver: TcpTransfer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver.receive(msgspec.msgpack.encode(listener.getsockname()[:2]), "k", [0], [1], late())
        connection, _ = listener.accept()
        with connection:
            connection.sendall(struct.pack("<8sI32s32s", MAGIC, 1, b"n" * 32, IDENTITY) + b"\0" * 4096)
            assert "another secret" in ended(receiver).error
    assert is_untouched(receiver)


def test_who_does_not_know_the_secret_is_told_nothing(sender: TcpTransfer) -> None:
    """After its hello, whose numbers are random, the sender says no word without a proof."""
    host, port = msgspec.msgpack.decode(sender.address())
    with socket.create_connection((host, port), SECONDS) as stranger:
        stranger.sendall(struct.pack("<8sI32s32s", MAGIC, 1, b"n" * 32, IDENTITY) + b"\0" * 32)
        told = b""
        while piece := stranger.recv(4096):
            told += piece
    assert len(told) == struct.calcsize("<8sI32s32s")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n" * 8,
        MAGIC,
        struct.pack("<8sI32s32s", MAGIC, 1, b"n" * 32, IDENTITY),
        struct.pack("<8sI32s32s", MAGIC, 2, b"n" * 32, IDENTITY) + b"\0" * 64,
        struct.pack("<8sI32s32s", MAGIC, 1, b"n" * 32, IDENTITY) + b"\0" * 4096,
    ],
    ids=["nothing", "HTTP", "short", "no proof", "version", "wrong proof"],
)
def test_strangers_change_nothing(sender: TcpTransfer, receiver: TcpTransfer, said: bytes) -> None:
    host, port = msgspec.msgpack.decode(sender.address())
    sender.offer("k", [1], late())
    with socket.create_connection((host, port), SECONDS) as stranger:
        stranger.sendall(said)
        receiver.receive(sender.address(), "k", [0], [2], late())  # alongside
        assert ended(receiver).is_whole
    assert ended(sender).is_whole


@pytest.mark.sweep
def test_silent_connections_keep_nobody_out(sender: TcpTransfer, receiver: TcpTransfer) -> None:
    host, port = msgspec.msgpack.decode(sender.address())
    sender.offer("k", [1], late())
    with contextlib.ExitStack() as held:
        started = time.monotonic()
        silent = [
            held.enter_context(socket.create_connection((host, port), SECONDS)) for _ in range(MAX_CONNECTIONS + 8)
        ]
        receiver.receive(sender.address(), "k", [0], [1], late())
        assert ended(receiver).is_whole
        assert time.monotonic() - started < HELLO_SECONDS
        for connection in silent:
            with contextlib.suppress(ConnectionResetError):
                while connection.recv(4096):
                    pass
        assert time.monotonic() - started < HELLO_SECONDS, "they were not sent away at once"


def test_what_is_damaged_is_not_taken(receiver: TcpTransfer) -> None:
    def damage(wire: Wire, connection: socket.socket) -> None:
        agree(wire)
        original = wire._send

        def flipped(data: bytes | memoryview) -> None:
            original(bytes([data[0] ^ 1, *data[1:]]) if len(data) == BLOCK_BYTES else data)

        wire._send = flipped  # type: ignore[method-assign]
        wire.send(b"\7" * BLOCK_BYTES)

    with liar(damage) as peer:
        receiver.receive(peer, "k", [0], [1], late())
        failed = ended(receiver)
    assert "damaged" in failed.error
    assert is_untouched(receiver), "damaged bytes were written"


def test_a_piece_that_comes_again_is_not_taken(receiver: TcpTransfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiver._blocks, "per_piece", 1)

    def repeat(wire: Wire, connection: socket.socket) -> None:
        agree(wire)
        wire.send(b"\7" * BLOCK_BYTES)
        wire._num_sent -= 1
        wire.send(b"\7" * BLOCK_BYTES)

    with liar(repeat) as peer:
        receiver.receive(peer, "k", [0, 1], [1, 2], late())
        assert "damaged" in ended(receiver).error
    assert bool((receiver.context.kv_caches[0][2] == -1.0).all())


@pytest.mark.parametrize("how", ["end", "reset"])
def test_a_sender_that_dies_midway_is_noticed_at_once(receiver: TcpTransfer, how: str) -> None:
    def die(wire: Wire, connection: socket.socket) -> None:
        agree(wire)
        connection.sendall(b"\7" * (BLOCK_BYTES // 2))
        if how == "reset":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with liar(die) as peer:
        receiver.receive(peer, "k", [0], [1], time.monotonic() + 600)
        failed = ended(receiver)
    assert not failed.is_whole
    assert "connection" in failed.error
    assert is_untouched(receiver)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
def test_a_sender_that_stalls_is_left(receiver: TcpTransfer, how: str) -> None:
    has_begun, is_over = threading.Event(), threading.Event()

    def stall(wire: Wire, connection: socket.socket) -> None:
        agree(wire)
        connection.sendall(b"\7" * (BLOCK_BYTES // 2))
        has_begun.set()
        is_over.wait(SECONDS)

    with liar(stall) as peer:
        receiver.receive(peer, "k", [0], [1], time.monotonic() + (0.3 if how == "deadline" else 600))
        assert has_begun.wait(SECONDS)
        if how == "cancel":
            assert receiver.poll() == []
            receiver.cancel("k")
        failed = ended(receiver)
        is_over.set()
    assert not failed.is_whole
    assert is_untouched(receiver)


def test_a_receiver_that_does_not_read_is_left_at_the_deadline() -> None:
    """Its blocks are more than the sockets' buffers hold, so the sender waits for it."""
    sender = TcpTransfer(KVTransferContext([torch.ones(64, 2**20)], 4, TcpOptions(), IDENTITY, SECRET))
    host, port = msgspec.msgpack.decode(sender.address())
    sender.offer("k", range(64), time.monotonic() + 0.5)  # type: ignore[arg-type]
    with socket.create_connection((host, port), SECONDS) as connection:
        wire = Wire(connection, late())
        wire.shake_hands(SECRET, IDENTITY, is_client=True)
        wire.send_message(msgspec.msgpack.encode(Wanted("k", list(range(64)))))
        failed = ended(sender)
    assert failed.error == "the deadline has passed"
    sender.close()


def test_places_that_an_offer_has_not_are_refused(sender: TcpTransfer, receiver: TcpTransfer) -> None:
    sender.offer("k", [1, 2], late())
    receiver.receive(sender.address(), "k", [1, 2], [1, 2], late())
    assert "fewer blocks" in ended(receiver).error
    assert not ended(sender).is_whole
    assert is_untouched(receiver)


def test_blocks_of_another_size_are_refused(receiver: TcpTransfer) -> None:
    with liar(lambda wire, _: wire.send_message(msgspec.msgpack.encode(Answer(8)))) as peer:
        receiver.receive(peer, "k", [0], [1], late())
        assert ended(receiver).error == f"blocks have 8 bytes there, {BLOCK_BYTES} here"


def test_an_offer_is_read_once(sender: TcpTransfer, receiver: TcpTransfer) -> None:
    sender.offer("k", [1], late())
    receiver.receive(sender.address(), "k", [0], [1], late())
    assert ended(receiver).is_whole
    receiver.receive(sender.address(), "k", [0], [1], late())
    assert "no such offer" in ended(receiver).error


def test_two_do_not_read_an_offer_at_once(sender: TcpTransfer, receiver: TcpTransfer) -> None:
    host, port = msgspec.msgpack.decode(sender.address())
    sender.offer("k", [1], late())
    with socket.create_connection((host, port), SECONDS) as connection:
        wire = Wire(connection, late())
        wire.shake_hands(SECRET, IDENTITY, is_client=True)
        wire.send_message(msgspec.msgpack.encode(Wanted("k", [0])))
        assert msgspec.msgpack.decode(wire.receive_message(), type=Answer).block_bytes == BLOCK_BYTES
        receiver.receive(sender.address(), "k", [0], [1], late())
        assert "no such offer" in ended(receiver).error
        assert sender.poll() == [], "the first one has not said that it has them"
        wire.receive_into(memoryview(bytearray(BLOCK_BYTES)))
        wire.send_message(b"")
        assert ended(sender).is_whole


def test_a_message_that_is_too_long_is_not_read() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        one, other = Wire(ours, late()), Wire(theirs, late())
        one.send(struct.pack("<I", MAX_MESSAGE_BYTES + 1))
        with pytest.raises(WireError, match="longer than allowed"):
            other.receive_message()


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        peer = msgspec.msgpack.encode(gone.getsockname()[:2])
    receiver = make()
    receiver.receive(peer, "k", [0], [1], late())
    host, port = msgspec.msgpack.decode(peer)
    assert ended(receiver).error == f"nothing can be reached at {host}:{port} (Connection refused)"
    receiver.close()


def test_more_receptions_than_threads_end_at_their_deadlines(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    with liar(lambda wire, _: is_over.wait(SECONDS) and None) as peer:
        monkeypatch.setattr(signed, "MAX_RECEPTIONS", 1)
        receiver = make()
        for number in range(4):
            receiver.receive(peer, f"k{number}", [0], [number], time.monotonic() + 0.3)
        found: list[Transfer] = []
        limit = late()
        while len(found) < 4 and time.monotonic() < limit:
            found += receiver.poll()
            time.sleep(0.01)
        is_over.set()
    assert sorted(transfer.key for transfer in found) == ["k0", "k1", "k2", "k3"]
    assert not any(transfer.is_whole for transfer in found)
    receiver.close()


def test_a_port_that_is_taken_is_told_by_its_option() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port} .*--disaggregation-bootstrap-port"):
            make(disaggregation_bootstrap_port=port).address()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_cannot_reach_is_refused(host: str) -> None:
    with pytest.raises(ValueError, match="must be an address that decode servers reach"):
        TcpOptions(disaggregation_transfer_host=host)


def test_closing_ends_what_is_under_way(sender: TcpTransfer) -> None:
    is_over = threading.Event()
    with liar(lambda wire, _: is_over.wait(SECONDS) and None) as peer:
        receiver = make()
        receiver.receive(peer, "k", [0], [1], time.monotonic() + 600)
        time.sleep(0.1)
        started = time.monotonic()
        receiver.close()
        assert not ended(receiver).is_whole
        assert time.monotonic() - started < 5
        is_over.set()


def test_a_port_that_there_is_not_is_told() -> None:
    end = make(disaggregation_bootstrap_port=65535)
    object.__setattr__(end.context, "rank", 1)
    with pytest.raises(ConfigError, match=r"65535 leaves no port for each worker .* begin 1 or more below"):
        end.address()
