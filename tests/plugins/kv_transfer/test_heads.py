"""Servers with other numbers of ranks: which heads a rank reads from which ranks, and that they arrive in their places.

Caught when broken on purpose: copies of a head taken for heads of their own, pieces of several ranks written to the
same place, readers that all ask the first rank that has a head, an offer or a reception that ends with its first rank,
memory that views share named twice.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from tests.helpers.transports import transports

from fwk.interfaces.attention import AttentionLayer, KVKind
from fwk.interfaces.feature import WorkerCache, WorkerPartContext
from fwk.plugins import build, discover, find
from fwk.plugins.selection import plugin_options
from fwk_kv_transfer._common.memory import _spans
from fwk_kv_transfer._common.signed import Blocks
from fwk_kv_transfer.remote_prefill import Heads
from fwk_kv_transfer.remote_prefill.heads import cut, misfit, pieces
from fwk_kv_transfer.remote_prefill.worker import KVExchange

SECRET = b"0123456789abcdef"
NUM_BLOCKS, SECONDS = 6, 20.0


def owned(num_heads: int, num_ranks: int, rank: int) -> range:
    """The heads of a rank, told in another way than the code does: each head goes to as many ranks as there are."""
    if num_heads >= num_ranks:
        return range(num_heads)[rank * (num_heads // num_ranks) :][: num_heads // num_ranks]
    owners = [head for head in range(num_heads) for _ in range(num_ranks // num_heads)]
    return range(owners[rank], owners[rank] + 1)


def shared(num_heads: int, num_ranks: int) -> Heads:
    return Heads(num_ranks, (len(owned(num_heads, num_ranks, 0)), 0))


SIZES = [
    (heads, *ranks)
    for heads in (1, 2, 3, 4, 6, 8, 12)
    for ranks in itertools.product((1, 2, 3, 4, 6, 8), repeat=2)
    if all(heads % each == 0 or each % heads == 0 for each in ranks)
]


@pytest.mark.parametrize(("num_heads", "there", "here"), SIZES)
def test_each_rank_reads_its_heads_once(num_heads: int, there: int, here: int) -> None:
    theirs, ours = shared(num_heads, there), shared(num_heads, here)
    assert misfit(theirs, ours) is None
    for rank in range(here):
        mine = owned(num_heads, here, rank)
        found: dict[int, int] = {}
        latent = 0
        for source, read in pieces(theirs, ours, rank).items():
            for piece in read:
                latent += piece.layer
                count = piece.count if piece.layer == 0 else 0
                if piece.layer == 0 and not count:  # whole blocks: either the same number of ranks, or the same heads
                    count = len(mine)
                for place in range(count):
                    head = owned(num_heads, there, source)[piece.first_there + place]
                    assert piece.first_here + place not in found
                    found[piece.first_here + place] = head
        assert [found[place] for place in sorted(found)] == list(mine)
        assert latent == 1, "what has no heads is read once, from one rank"


def test_readers_take_ranks_in_turn() -> None:
    """Two ranks have the same head: not all readers ask the first of them."""
    for num_readers in (4, 6, 8):
        theirs, ours = Heads(4, (1,)), Heads(num_readers, (1,))
        assert misfit(theirs, ours) is None
        assert {source for rank in range(num_readers) for source in pieces(theirs, ours, rank)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (Heads(2, (3,)), Heads(3, (3,))),
        (Heads(2, (3,)), Heads(4, (2,))),
        (Heads(2, (0,)), Heads(2, (1,))),
        (Heads(3, (1,)), Heads(1, (2,))),
    ],
)
def test_heads_that_do_not_fit_are_refused(theirs: Heads, ours: Heads) -> None:
    if theirs.of_a_rank == ours.of_a_rank:
        assert misfit(theirs, ours) is None, "all ranks have all of these heads"
        return
    assert "K/V heads differ" in (misfit(theirs, ours) or "")
    assert misfit(Heads(1, (1,)), Heads(1, (1, 1))) == "layers with K/V differ: 1 and 2"


class Plugins:
    """Builds a transport as a worker does."""

    def __init__(self) -> None:
        self.found = discover()
        self.ports: list[int] = []

    def choose(self, family: str, name: str, context: Any, **fields: Any) -> Any:
        item = find(self.found, family, name)
        self.ports.append(fields["rank"])
        return build(item, context(options=plugin_options(item, {}), **fields))


SHAPES: list[tuple[int, Callable[[int], tuple[int, ...]]]] = [
    (0, lambda heads: (heads, 2, 6, 3)),
    (1, lambda heads: (2, heads, 4, 8)),
    (2, lambda heads: (2, 4, heads, 5)),
]
"""The dimension of heads in a block, and its shape: as of tiles, of rows, and of rows of all heads."""


class Server:
    """The workers of one, whose heads are those of a model of ``num_heads``; the last layer is latent."""

    def __init__(self, transport: str, mode: str, num_heads: int, num_ranks: int, fill: float | None = None) -> None:
        self.num_heads, self.num_ranks, self.plugins = num_heads, num_ranks, Plugins()
        self.workers: list[KVExchange] = []
        self.caches: list[list[torch.Tensor]] = []
        for rank in range(num_ranks):
            mine = owned(num_heads, num_ranks, rank)
            whole = [numbers(i, shape(num_heads)) for i, (_, shape) in enumerate(SHAPES)]
            kept = [
                cache.index_select(head_dim + 1, torch.tensor(list(mine)))
                for cache, (head_dim, _) in zip(whole, SHAPES, strict=True)
            ] + [numbers(9, (1, 1, 4, 8))]
            if fill is not None:
                kept = [torch.full_like(cache, fill) for cache in kept]
            layers = [
                AttentionLayer(i, len(mine), len(mine), 8, 1.0, kv_cache=cache, head_dim=head_dim)
                for i, (cache, (head_dim, _)) in enumerate(zip(kept[:-1], SHAPES, strict=True))
            ]
            layers.append(AttentionLayer(3, 1, 1, 8, 1.0, kind=KVKind.LATENT, kv_cache=kept[-1], head_dim=1))
            options: Any = SimpleNamespace(
                disaggregation_mode=mode, disaggregation_transfer_backend=transport, secret=lambda: SECRET
            )
            device = torch.device("cpu")
            context = WorkerPartContext(
                "remote_prefill", device, torch.from_numpy, lambda x: x, options=options, rank=rank, size=num_ranks,
                plugins=self.plugins,  # type: ignore[arg-type]
            )  # fmt: skip
            worker = KVExchange(context)
            worker.cache_allocated(WorkerCache(layers, NUM_BLOCKS, 4, lambda: {"the model": "one"}))
            self.workers.append(worker)
            self.caches.append(kept)

    @property
    def heads(self) -> Any:
        [heads] = {msgspec.json.encode(worker.about()["heads"]) for worker in self.workers}
        return msgspec.json.decode(heads)

    def ended(self, *keys: str) -> dict[str, list[Any]]:
        """What every worker has told of transfers."""
        found: dict[str, list[Any]] = {key: [] for key in keys}
        limit = time.monotonic() + SECONDS
        while any(len(told) < self.num_ranks for told in found.values()):
            assert time.monotonic() < limit, f"not ended: {found}"
            for worker in self.workers:
                for key, *rest in worker.poll():
                    found[key].append(rest)
            time.sleep(0.002)
        return found

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def numbers(seed: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn((NUM_BLOCKS, *shape), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


Both = Callable[[str, int, int, int], tuple[Server, Server]]


@pytest.fixture
def both() -> Iterator[Both]:
    made: list[Server] = []

    def start(transport: str, num_heads: int, there: int, here: int) -> tuple[Server, Server]:
        made.append(Server(transport, "prefill", num_heads, there))
        made.append(Server(transport, "decode", num_heads, here, fill=-1.0))
        return made[-2], made[-1]

    yield start
    for server in made:
        server.close()


def addresses(prefill: Server, decode: Server) -> list[list[bytes]]:
    return [worker.about(decode.heads)["addresses"] for worker in prefill.workers]


FEW = [(4, 1, 2), (4, 2, 1), (2, 2, 4), (2, 4, 1), (6, 2, 3)]


@pytest.mark.parametrize(
    ("num_heads", "there", "here"), [*FEW, *(pytest.param(*x, marks=pytest.mark.sweep) for x in SIZES if x not in FEW)]
)
def test_heads_arrive_in_their_places(both: Both, num_heads: int, there: int, here: int) -> None:
    exchange(both, "tcp", num_heads, there, here)


@pytest.mark.sweep
@pytest.mark.parametrize(("num_heads", "there", "here"), [(4, 1, 2), (4, 2, 1), (6, 2, 3)])
@pytest.mark.parametrize("transport", transports("nixl", "mooncake"))
def test_libraries_read_heads(both: Both, transport: str, num_heads: int, there: int, here: int) -> None:
    """Few ranks: all of them are in this process, and each has a library's engine for each rank it exchanges with."""
    exchange(both, transport, num_heads, there, here)


def exchange(both: Both, transport: str, num_heads: int, there: int, here: int) -> None:
    prefill, decode = both(transport, num_heads, there, here)
    theirs, ours = [4, 1, 3, 0], [2, 5, 0]
    where = addresses(prefill, decode)
    for key in ("wanted", "declined"):
        for worker in prefill.workers:
            worker.offer(key, theirs, SECONDS, decode.heads)
    for worker in decode.workers:
        worker.receive(where, "wanted", [0, 1, 3], ours, SECONDS, prefill.heads)
        worker.receive(where, "declined", [], [], SECONDS, prefill.heads)
    for server in (decode, prefill):
        for told in server.ended("wanted", "declined").values():
            assert all(is_whole for is_whole, *_ in told), told
    source = Server(transport, "prefill", num_heads, here)
    try:
        for got, wanted in zip(decode.caches, source.caches, strict=True):
            for cache, expected in zip(got, wanted, strict=True):
                assert torch.equal(cache[ours], expected[[4, 1, 0]])
                assert (cache[[1, 3, 4]] == -1.0).all(), "a block nobody asked for was written"
    finally:
        source.close()


def test_blocks_are_kept_for_readers_that_ask_later(both: Both) -> None:
    """A router has sent a prompt: with how many ranks it is read is known when the decode server asks where."""
    prefill, decode = both("tcp", 4, 2, 4)
    for key in ("read", "withdrawn", "late"):
        for worker in prefill.workers:
            worker.offer(key, [4, 1], 0.2 if key == "late" else SECONDS, None)
    for worker in prefill.workers:
        worker.withdraw("withdrawn")
    where = [worker.about(decode.heads, ["read", "another"])["addresses"] for worker in prefill.workers]
    assert addresses(prefill, decode) == where
    for worker in decode.workers:
        worker.receive(where, "read", [0, 1], [2, 5], SECONDS, prefill.heads)
    assert all(is_whole for is_whole, *_ in decode.ended("read")["read"])
    found = prefill.ended("read", "withdrawn", "late")
    assert [all(told[0] for told in found[key]) for key in found] == [True, False, False]
    assert "no server has asked" in found["late"][0][-1]
    source = Server("tcp", "prefill", 4, 4)
    try:
        for got, wanted in zip(decode.caches, source.caches, strict=True):
            assert all(torch.equal(a[[2, 5]], b[[4, 1]]) for a, b in zip(got, wanted, strict=True))
    finally:
        source.close()


def test_memory_of_views_that_lie_among_each_other_is_named_once() -> None:
    """Libraries refuse, or count twice, what overlaps: K and V of some heads are in turns, block after block."""
    caches = [torch.zeros((5, 2, 3, 8)), torch.zeros((5, 3, 2, 4))]
    views = cut(caches, [1, 0], [(0, 1, 2), (1, 0, 1)])
    assert [tuple(view.shape) for view in views] == [(5, 2, 8), (5, 2, 8), (5, 1, 2, 4)]
    spans = _spans(Blocks(views).layers)
    first = caches[0].data_ptr() + caches[0][0, 0, 1:].storage_offset() * 4
    end = caches[0].data_ptr() + caches[0].nbytes
    second = caches[1].data_ptr(), (4 * 3 + 1) * 2 * 4 * 4
    assert sorted(spans) == sorted([(first, end - first), second])


def test_ports_differ_where_a_worker_has_several_transports(both: Both) -> None:
    prefill, decode = both("tcp", 4, 2, 4)
    addresses(prefill, decode)
    assert len(prefill.plugins.ports) == 6
    assert len(set(prefill.plugins.ports)) == 6, "of each of two workers: one, and one for each of two readers"


def test_an_offer_is_kept_until_its_last_reader_has_it(both: Both) -> None:
    prefill, decode = both("tcp", 4, 1, 2)
    where = addresses(prefill, decode)
    prefill.workers[0].offer("k", [1, 2], SECONDS, decode.heads)
    decode.workers[0].receive(where, "k", [0, 1], [1, 2], SECONDS, prefill.heads)
    limit = time.monotonic() + SECONDS
    while not decode.workers[0].poll():
        assert time.monotonic() < limit
        time.sleep(0.002)
    for _ in range(20):
        assert prefill.workers[0].poll() == []
        time.sleep(0.002)
    decode.workers[1].receive(where, "k", [0, 1], [1, 2], SECONDS, prefill.heads)
    assert prefill.ended("k")["k"][0][0]


def test_blocks_are_written_until_the_last_rank_there_has_failed(both: Both) -> None:
    """One of two ranks is gone, the other is silent: the reception ends, not whole, when both have ended."""
    prefill, decode = both("tcp", 4, 2, 1)
    [worker] = decode.workers
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        where = [[msgspec.msgpack.encode(place.getsockname()[:2])] for place in (gone, silent)]
        gone.close()
        started = time.monotonic()
        worker.receive(where, "k", [0], [1], 0.4, prefill.heads)
        [[is_whole, num_bytes, _, error]] = decode.ended("k")["k"]
        assert time.monotonic() - started >= 0.3, "the silent one may still write"
    assert (is_whole, num_bytes) == (False, 0)
    assert "nothing can be reached" in error
    assert all((cache == -1.0).all() for cache in decode.caches[0])


def test_an_order_that_no_rank_can_serve_fails_alone(both: Both) -> None:
    prefill, _ = both("tcp", 4, 1, 1)
    [worker] = prefill.workers
    other = [3, [2, 2, 2, 0]]
    assert "K/V heads differ" in worker.about(other)["error"]
    worker.offer("k", [1], SECONDS, other)
    [(key, is_whole, _, _, error)] = worker.poll()
    assert (key, is_whole) == ("k", False)
    assert "K/V heads differ" in error
    for num_ranks in (2, 4):
        assert "addresses" in worker.about([num_ranks, [4 // num_ranks] * 3 + [0]])
    found = [worker.about([num_ranks, [1, 1, 1, 0]]) for num_ranks in range(8, 64, 4)]
    assert "other numbers of ranks exchange K/V with this one already" in found[-1]["error"]
