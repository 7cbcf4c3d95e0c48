"""K/V events of the prefix cache: a subscriber that follows them knows what is cached."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from pydantic import ValidationError

from fwk.errors import ConfigError
from fwk.interfaces.multimodal import Media
from fwk.interfaces.prefix_cache import CacheContext
from fwk_cache._common.options import EvictionOptions
from fwk_cache._common.radix import RadixPrefixCache
from fwk_multimodal.media.engine import cache_ids

SIZE = 2


class Router:
    """What a subscriber knows: of each cached block's hash its tokens, and the block before."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[Any] = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, 5000)
        self.socket.connect(endpoint)
        self.socket.subscribe(b"kv@")
        self.known: dict[int, tuple[int | None, list[int]]] = {}
        self.numbers: list[int] = []

    def follow(self, num_messages: int) -> None:
        for _ in range(num_messages):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv@engine"
            self.numbers.append(int.from_bytes(number, "big"))
            _, [event] = msgspec.msgpack.decode(payload)
            kind, hashes, *rest = self.read(event)
            if kind == "BlockRemoved":
                for block in hashes:
                    del self.known[block]
                continue
            assert kind == "BlockStored"
            parent, tokens, size, lora_id = rest
            assert (size, lora_id, len(tokens)) == (SIZE, None, SIZE * len(hashes))
            assert parent is None or parent in self.known
            for i, block in enumerate(hashes):
                assert block not in self.known
                self.known[block] = (parent, tokens[i * SIZE : (i + 1) * SIZE])
                parent = block

    def read(self, event: Any) -> list[Any]:
        """The fields of an array."""
        return event

    def paths(self) -> set[tuple[int, ...]]:
        def tokens(block: int | None) -> tuple[int, ...]:
            if block is None:
                return ()
            parent, own = self.known[block]
            return (*tokens(parent), *own)

        return {tokens(block) for block in self.known}


class MapRouter(Router):
    """As vLLM's router reads events: by name, of which these must be there."""

    def read(self, event: dict[str, Any]) -> list[Any]:
        fields = {"BlockStored": ["parent_block_hash", "token_ids", "block_size", "lora_id"], "BlockRemoved": []}
        assert event["medium"] is None
        return [event[name] for name in ("type", "block_hashes", *fields[event["type"]])]


def config(folder: Path, **fields: Any) -> str:
    return json.dumps({"endpoint": f"ipc://{folder}/events", "topic": "kv@engine", **fields})


def make(folder: Path, **fields: Any) -> RadixPrefixCache:
    return RadixPrefixCache(CacheContext(SIZE, EvictionOptions(kv_events_config=config(folder, **fields))))


def add(cache: RadixPrefixCache, tokens: list[int], first_block: int, namespace: str = "") -> None:
    match = cache.match(namespace, tokens, len(tokens))
    cache.lock(match.node)
    rest = tokens[match.num_tokens :]
    node, _ = cache.insert(match.node, rest, list(range(first_block, first_block + len(rest) // SIZE)))
    cache.unlock(node)


@pytest.fixture(params=["array", "map"])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Router]:
    router = {"array": Router, "map": MapRouter}[request.param](f"ipc://{tmp_path}/events")
    yield router
    router.socket.close(0)
    router.context.term()


def joined(cache: RadixPrefixCache, router: Router) -> None:
    """Wait until the subscription has arrived: what is published before is nobody's."""
    router.socket.setsockopt(zmq.RCVTIMEO, 50)
    for attempt in range(100):
        add(cache, [900 + attempt] * SIZE, 900 + attempt)
        cache.drop()
        try:
            router.follow(2) if not router.numbers else None
        except zmq.Again:
            continue
        break
    router.socket.setsockopt(zmq.RCVTIMEO, 5000)
    assert router.known == {}


def test_a_router_knows_what_is_cached(tmp_path: Path, router: Router) -> None:
    cache = make(tmp_path, **({"format": "map"} if isinstance(router, MapRouter) else {}))
    joined(cache, router)
    add(cache, [1, 2, 3, 4], 0)
    add(cache, [1, 2, 5, 6, 7, 8], 10)
    add(cache, [1, 2, 5, 6], 20)  # there already: nothing to tell
    add(cache, [1, 2], 30, "adapter")  # of a namespace: not told
    add(cache, [9, 9], 40)
    router.follow(3)
    assert router.paths() == {(1, 2), (1, 2, 3, 4), (1, 2, 5, 6), (1, 2, 5, 6, 7, 8), (9, 9)}
    cache.evict(1)
    router.follow(1)
    assert router.paths() == {(1, 2), (1, 2, 5, 6), (1, 2, 5, 6, 7, 8), (9, 9)}
    add(cache, [1, 2, 3, 4], 50)
    router.follow(1)
    assert (1, 2, 3, 4) in router.paths()
    cache.drop()
    router.follow(1)
    assert router.known == {}
    assert router.numbers == list(range(router.numbers[0], router.numbers[0] + len(router.numbers)))


def test_an_endpoint_is_one_engines(tmp_path: Path) -> None:
    first = RadixPrefixCache(CacheContext(SIZE, EvictionOptions(kv_events_config='{"endpoint": "tcp://127.0.0.1:0"}')))
    del first
    cache = make(tmp_path)
    with pytest.raises(ConfigError, match="--kv-events-config: cannot publish at"):
        RadixPrefixCache(CacheContext(SIZE, EvictionOptions(kv_events_config='{"endpoint": "tcp://no.such.host:1"}')))
    del cache
    gc.collect()


@pytest.mark.parametrize(
    "wrong",
    [
        "zmq",
        '{"endpoint": "http://x"}',
        '{"replay_endpoint": "tcp://*:1"}',
        '{"publisher": "null"}',
        '{"hwm": 0}',
        '{"format": "json"}',
    ],
)
def test_what_is_not_published_is_refused(wrong: str) -> None:
    with pytest.raises(ValidationError):
        EvictionOptions(kv_events_config=wrong)


def test_events_can_be_off(tmp_path: Path) -> None:
    options = EvictionOptions(kv_events_config=config(tmp_path, enable_kv_cache_events=False))
    add(RadixPrefixCache(CacheContext(SIZE, options)), [1, 2], 0)
    assert not (tmp_path / "events").exists()


@pytest.mark.parametrize("router", ["array"], indirect=True)
def test_places_of_media_are_unsigned(tmp_path: Path, router: Router) -> None:
    """As readers want them, which take numbers of 32 bits without a sign; and apart from all tokens."""
    cache = make(tmp_path)
    joined(cache, router)
    ids = cache_ids([5, 5, 5, 5, 7, 7], [Media(bytes(range(1, 33)), "image", 1, 3, "", 0)])
    assert min(ids) < 0
    add(cache, ids, 0)
    router.follow(1)
    told = [tokens for _, tokens in router.known.values()]
    assert [token for tokens in told for token in tokens] == [token % 2**32 for token in ids]
    assert all(2**31 <= token < 2**32 for token in (told[0][1], *told[1]))
