"""Checks 32 to 34 for servers of K/V that are down, hang, hang up or lie: misses, little delay, the same tokens.

Redis is a real server; LMCache's is imitated, and the imitation compared with it in ``tests/clients/test_lmcache.py``.
"""

from __future__ import annotations

import logging
import signal
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lmcache_server import LMCacheImitation
from tests.helpers.redis_server import RedisServer, ScriptedServer
from tests.helpers.tiers import CONTEXT, SIZE, data, key, settled

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk_cache._common import writer
from fwk_cache._common.remote_tier import RemoteTier
from fwk_cache._common.sealed import HEADER_BYTES
from fwk_cache.lmcache import LMCacheOptions
from fwk_cache.lmcache.tier import LMCacheTier
from fwk_cache.redis import RedisOptions
from fwk_cache.redis.connection import Connection, read_address
from fwk_cache.redis.tier import RedisTier

TIMEOUT = 0.3
WHOLE = HEADER_BYTES + SIZE
"""Bytes of an entry."""
Tier = RemoteTier[Any]


class Site:
    """A server, and what may happen to it and to its entries.

    Of each kind: place, how messages name the server; nowhere, a URL at which nothing listens; make, a tier; options,
    those of an engine that keeps its blocks there; spoil, which changes a byte of an entry; set, which replaces one;
    hang; and hang_up, on all who are connected.
    """

    def __init__(self) -> None:
        self._opened: list[Tier] = []

    def close(self: Any) -> None:
        for one in self._opened:
            one.close()
        if "server" in vars(self):
            self.server.close()

    def open(self: Any, url: str | None = None, **more: Any) -> Tier:
        self._opened.append(self.make(url or self.server.url, **more))
        return self._opened[-1]

    def fill(self, one: Tier, count: int) -> Tier:
        """Put entries, which are there on return."""
        assert all(one.put(key(i), data(i)) for i in range(count))
        return settled(one)

    def comes_back(self: Any, one: Tier) -> None:
        self.server.start()


class RedisSite(Site):
    nowhere = "redis://127.0.0.1:1/0"

    @cached_property
    def server(self) -> RedisServer:
        return RedisServer()

    @property
    def place(self) -> str:
        return f"redis at {self.server.path}"

    def make(self, url: str, identity: bytes = CONTEXT.identity, **options: Any) -> Tier:
        given = RedisOptions(hicache_redis_url=url, hicache_redis_timeout=TIMEOUT, **options)
        return RedisTier(replace(CONTEXT, identity=identity, options=given))

    def options(self) -> dict[str, Any]:
        given = {"prefix_cache": "hierarchical", "hicache_storage_backend": ["redis"]}
        return {**given, "hicache_redis_url": self.server.url, "hicache_redis_timeout": TIMEOUT}

    def tell(self, *words: bytes) -> None:
        connection = Connection(read_address(self.server.url), None, None, 5.0)
        connection.command(*words)
        connection.close()

    def spoil(self, name: bytes, at: int) -> None:
        self.tell(b"SETRANGE", name, b"%d" % at, b"\xee")

    def set(self, name: bytes, value: bytes) -> None:
        self.tell(b"SET", name, value)

    def hang(self) -> None:
        self.server.process.send_signal(signal.SIGSTOP)

    def hang_up(self) -> None:
        self.tell(b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")


class LMCacheSite(Site):
    nowhere = "lm://127.0.0.1:1"

    @cached_property
    def server(self) -> LMCacheImitation:
        return LMCacheImitation()

    @property
    def place(self) -> str:
        return f"lmcache at 127.0.0.1:{self.server.port}"

    def make(self, url: str, **context: Any) -> Tier:
        given = LMCacheOptions(hicache_lmcache_url=url, hicache_lmcache_timeout=TIMEOUT)
        return LMCacheTier(replace(CONTEXT, options=given, **context))

    def options(self) -> dict[str, Any]:
        """``enable_lmcache`` is all that is said of the tier."""
        given = {"enable_lmcache": True, "hicache_lmcache_url": self.server.url}
        return {**given, "hicache_lmcache_timeout": TIMEOUT}

    def fill(self, one: Tier, count: int) -> Tier:
        """A server that is there has them on return: it answers the writer's connection in order."""
        super().fill(one, count)
        if one._writes is not None:
            one._writes.has(b"fwk@1@0@0@uint8")
        return one

    def spoil(self, name: bytes, at: int) -> None:
        entry = bytearray(self.server.entries[name])
        entry[at] ^= 0xEE
        self.server.entries[name] = bytes(entry)

    def set(self, name: bytes, value: bytes) -> None:
        self.server.entries[name] = value

    def hang(self) -> None:
        self.server.stalls = True

    def hang_up(self) -> None:
        self.server.hang_up()

    def comes_back(self, one: Tier) -> None:
        super().comes_back(one)
        if one._writes is not None:
            one._writes.close()  # PUT has no answer: what is sent to a server that has gone is lost, unseen
            one._writes = None


SITES: dict[str, type[Any]] = {"redis": RedisSite, "lmcache": LMCacheSite}


@pytest.fixture(params=SITES)
def site(request: pytest.FixtureRequest) -> Iterator[Any]:
    one = SITES[request.param]()
    yield one
    one.close()


of_redis = pytest.mark.parametrize("site", ["redis"], indirect=True)
of_lmcache = pytest.mark.parametrize("site", ["lmcache"], indirect=True)


def gets(one: Tier, i: int) -> bool:
    into = memoryview(bytearray(SIZE))
    found = one.get(key(i), into)
    assert not found or into == data(i), "bytes that were not put there"
    return found


def test_what_one_server_keeps_another_finds(site: Any) -> None:
    site.fill(site.open(), 5)
    other = site.open()
    assert [other.contains(key(i)) for i in range(6)] == [True] * 5 + [False]
    assert [gets(other, i) for i in range(6)] == [True] * 5 + [False]
    assert not gets(site.open(identity=b"j" * 32), 0), "another model's"


@pytest.mark.parametrize("at", [0, 8, 40, 72, 80, HEADER_BYTES, WHOLE - 1])
def test_a_flipped_byte_is_a_miss_and_is_replaced(site: Any, at: int) -> None:
    one = site.fill(site.open(), 2)
    site.spoil(one._name(key(0)), at)
    assert (gets(one, 0), gets(one, 1)) == (False, True)
    assert not one.contains(key(0)), "where the server cannot delete it, too, so that it is written again"
    site.fill(one, 1)
    assert one.contains(key(0))
    assert gets(one, 0)


@pytest.mark.parametrize("value", [b"", b"x", b"x" * (WHOLE + 1), b"x" * 2**22, b"x" * 2**24])
def test_an_entry_of_another_size_is_a_miss(site: Any, value: bytes) -> None:
    one = site.fill(site.open(), 2)
    site.set(one._name(key(0)), value)
    assert (gets(one, 0), gets(one, 1)) == (False, True)
    assert not one.contains(key(0))


def test_a_server_that_hangs_costs_one_timeout(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    one = site.fill(site.open(), 1)
    site.hang()
    started = time.monotonic()
    assert not any(gets(one, 0) or one.put(key(50 + i), data(i)) for i in range(50))
    assert TIMEOUT * 0.9 < time.monotonic() - started < 3 * TIMEOUT + 2
    assert [record.getMessage().count("serving continues without") for record in caplog.records] == [1]


def test_it_comes_back(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PAUSE_SECONDS", 0.0)
    one = site.fill(site.open(), 1)
    site.server.stop()
    assert not gets(one, 0)
    one.put(key(1), data(1))
    settled(one)
    assert one.trouble is not None
    assert site.place in one.trouble
    site.comes_back(one)
    assert not gets(one, 0), "it has forgotten"
    assert not gets(one, 1), "what came meanwhile is lost"
    site.fill(one, 3)
    assert gets(one, 2)
    assert one.trouble is None


def test_a_server_that_is_down_at_the_start_may_come(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        one = site.open(site.nowhere)
    assert f"{site.place.partition(' ')[0]} at 127.0.0.1:1" in caplog.text
    assert not one.put(key(0), data(0))
    assert not one.contains(key(0))


def test_a_connection_that_was_closed_is_opened_again(site: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Servers close connections that rest; nothing is lost by it, and nothing is logged."""
    one = site.fill(site.open(), 1)
    assert gets(one, 0)
    site.hang_up()
    assert gets(one, 0)
    assert not caplog.records


LONG = b"$%d\r\n" % WHOLE


def answer(code: int, length: int) -> bytes:
    return struct.pack("=9i", code, length, 4, 6, length, 0, 0, 0, 0)


ANSWERS: dict[str, dict[str, tuple[bytes, bool]]] = {
    "redis": {
        "reset": (LONG + b"x" * 100, True),
        "half": (LONG + b"x" * 100, False),
        "no end": (LONG + b"x" * WHOLE + b"xx", False),
        "huge": (b"$999999999999999\r\n", False),
        "no number": (b"$x\r\n", False),
        "another type": (b"*2\r\n", False),
        "http": (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        "no line": (b"x" * 5000, False),
        "an error": (b"-ERR no\r\n", False),
        "nothing": (b"", True),
    },
    "lmcache": {
        "reset": (answer(200, WHOLE) + b"x" * 100, True),
        "half": (answer(200, WHOLE) + b"x" * 100, False),
        "another entry": (answer(200, WHOLE) + b"x" * WHOLE, False),
        "a negative size": (answer(200, -1), False),
        "no code": (answer(7, 0), False),
        "http": (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 2, False),
        "nothing": (b"", True),
    },
}
"""What a server sends, and whether it hangs up by a reset."""


@pytest.mark.parametrize(
    ("site", "given"),
    [
        pytest.param(name, given, id=f"{name}-{label}")
        for name, those in ANSWERS.items()
        for label, given in those.items()
    ],
    indirect=["site"],
)
def test_wrong_answers_are_misses(site: Any, given: tuple[bytes, bool]) -> None:
    is_redis = isinstance(site, RedisSite)
    server = (ScriptedServer if is_redis else LMCacheImitation)(given[0], resets=given[1])
    try:
        one = site.open(server.url)
        started = time.monotonic()
        assert not any(gets(one, i) or (is_redis and one.contains(key(i))) for i in range(20))
        assert time.monotonic() - started < 4 * TIMEOUT + 2
    finally:
        server.close()


@of_redis
def test_swapped_entries_are_misses(site: Any) -> None:
    one = site.fill(site.open(), 2)
    site.tell(b"RENAME", one._name(key(0)), one._name(key(1)))
    assert (gets(one, 0), gets(one, 1)) == (False, False)


@of_redis
def test_what_is_no_text_is_a_miss(site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PAUSE_SECONDS", 0.0)
    one = site.open()
    site.tell(b"RPUSH", one._name(key(0)), b"a list")
    assert not gets(one, 0)
    site.fill(one, 2)
    assert gets(one, 1)


@of_redis
def test_a_drip_of_bytes_is_no_reason_to_wait(site: Any) -> None:
    """The time is for the whole answer."""
    server = ScriptedServer(LONG + b"x" * 200, pause=TIMEOUT / 3)
    try:
        one = site.open(server.url)
        started = time.monotonic()
        assert not gets(one, 0)
        assert time.monotonic() - started < TIMEOUT + 2
    finally:
        server.close()


@of_redis
def test_passwords(site: Any) -> None:
    server = RedisServer("--requirepass", "right")
    try:
        assert site.fill(site.open(server.url, hicache_redis_password="right"), 1).contains(key(0))
        for options in ({}, {"hicache_redis_password": "wrong"}):
            with pytest.raises(ConfigError, match="refuses") as told:
                site.open(server.url, **options)
            assert "right" not in str(told.value)
    finally:
        server.close()


@of_redis
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://x"}, "must be redis"),
        ({"url": "redis://"}, "must be redis"),
        ({"url": "redis://x:99999/0"}, "must be redis"),
        ({"url": "redis://x/one"}, "must be redis"),
        ({"url": "redis://:secret@x"}, "holds a password"),
        ({"url": "unix://"}, "must be redis"),
        ({"url": "redis://127.0.0.1:1", "hicache_redis_user": "me"}, "needs --hicache-redis-password"),
    ],
)
def test_options_of_redis_that_cannot_be(site: Any, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        site.open(**options)
    assert "secret" not in str(told.value)


@of_lmcache
@pytest.mark.parametrize("url", ["http://x:1", "lm://x", "lm://:1", "lm://x:99999", "lm://x:1/0", "lm://me@x:1"])
def test_addresses_of_lmcache_that_cannot_be(site: Any, url: str) -> None:
    with pytest.raises(ConfigError, match="must be lm://HOST:PORT"):
        site.open(url)


@of_lmcache
def test_a_block_that_no_message_of_lmcache_can_tell(site: Any) -> None:
    with pytest.raises(ConfigError, match="at most 2 GiB"):
        site.open(block_bytes=2**31)


class SlowToKeep(LMCacheImitation):
    def _answer_to(self, client: Any, command: int, key: bytes, data: bytes) -> None:
        time.sleep(0.1 if command == 1 else 0)
        super()._answer_to(client, command, key, data)


def test_what_lmcache_was_sent_is_there_for_another_connection() -> None:
    """PUT is not answered, and the server reads each connection by itself."""
    server = SlowToKeep()
    one = LMCacheTier(replace(CONTEXT, options=LMCacheOptions(hicache_lmcache_url=server.url)))
    assert one.put(key(1), data(1))
    assert settled(one).get(key(1), memoryview(bytearray(SIZE)))
    one.close()
    server.close()


SMALL: dict[str, Any] = {"page_size": 4, "max_total_tokens": 200, "hicache_ratio": 0, "load_format": "dummy"}
PROMPTS = [[5, 6, 7, 8, *range(10 + 20 * i, 10 + 20 * i + 85)] for i in range(6)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def outputs(llm: fwk.LLM) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def test_engines_share_it_and_say_the_same_whatever_becomes_of_it(
    tiny_llm: Callable[..., fwk.LLM], tiny_folder: Path, site: Any
) -> None:
    wanted = outputs(tiny_llm(prefix_cache="none", page_size=4))
    given = {**SMALL, "check_blocks": True, **site.options()}
    with fwk.LLM(str(tiny_folder), **given) as llm:
        assert outputs(llm) == wanted
    with fwk.LLM(str(tiny_folder), **given) as llm:
        assert llm.generate([PROMPTS[0]], GREEDY)[0].cached_tokens == 88
        assert outputs(llm) == wanted
        site.hang()
        assert outputs(llm) == wanted
        site.server.stop()
        assert outputs(llm) == wanted
        assert llm.engine.stats().num_held_blocks == 0
