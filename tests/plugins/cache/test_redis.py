"""Checks 32 to 34 for a Redis server that is down, hangs, hangs up or lies: misses, little delay, the same tokens."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.redis_server import RedisServer, ScriptedServer

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTierContext
from fwk_cache._common import writer
from fwk_cache._common.sealed import HEADER_BYTES
from fwk_cache.redis import RedisOptions
from fwk_cache.redis.connection import Connection, read_address
from fwk_cache.redis.tier import RedisTier

SIZE = 4096
TIMEOUT = 0.3
CONTEXT = CacheTierContext(num_blocks=10, block_bytes=SIZE, identity=b"i" * 32)
Open = Callable[..., RedisTier]


def key(i: int) -> bytes:
    return i.to_bytes(4, "little") * 8


def data(i: int) -> memoryview:
    return memoryview(bytes([i]) * SIZE)


def buffer() -> memoryview:
    return memoryview(bytearray(SIZE))


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.close()


@pytest.fixture
def open_tier() -> Iterator[Open]:
    opened: list[RedisTier] = []

    def make(url: str, identity: bytes = b"i" * 32, **options: Any) -> RedisTier:
        given = RedisOptions(hicache_redis_url=url, hicache_redis_timeout=TIMEOUT, **options)
        opened.append(RedisTier(replace(CONTEXT, identity=identity, options=given)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def settle(one: RedisTier) -> None:
    end = time.monotonic() + 20
    while one._writer.waiting and time.monotonic() < end:
        time.sleep(0.002)
    assert not one._writer.waiting


def gets(one: RedisTier, i: int) -> bool:
    into = buffer()
    found = one.get(key(i), into)
    assert not found or into == data(i), "bytes that were not put there"
    return found


def fill(one: RedisTier, count: int) -> RedisTier:
    assert all(one.put(key(i), data(i)) for i in range(count))
    settle(one)
    return one


def tell(redis: RedisServer, *words: bytes) -> None:
    connection = Connection(read_address(redis.url), None, None, 5.0)
    connection.command(*words)
    connection.close()


def test_what_one_server_keeps_another_finds(redis: RedisServer, open_tier: Open) -> None:
    fill(open_tier(redis.url), 5)
    other = open_tier(redis.url)
    assert [other.contains(key(i)) for i in range(6)] == [True] * 5 + [False]
    assert [gets(other, i) for i in range(6)] == [True] * 5 + [False]
    assert not gets(open_tier(redis.url, identity=b"j" * 32), 0), "another model's"


@pytest.mark.parametrize("at", [0, 8, 40, 72, 80, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_byte_is_a_miss_and_is_replaced(redis: RedisServer, open_tier: Open, at: int) -> None:
    one = fill(open_tier(redis.url), 2)
    tell(redis, b"SETRANGE", one._name(key(0)), b"%d" % at, b"\xee")
    assert (gets(one, 0), gets(one, 1)) == (False, True)
    assert not one.contains(key(0))
    fill(one, 1)
    assert gets(one, 0)


@pytest.mark.parametrize("value", [b"", b"x", b"x" * (HEADER_BYTES + SIZE + 1), b"x" * 2**24])
def test_an_entry_of_another_size_is_a_miss(redis: RedisServer, open_tier: Open, value: bytes) -> None:
    one = fill(open_tier(redis.url), 2)
    tell(redis, b"SET", one._name(key(0)), value)
    assert (gets(one, 0), gets(one, 1)) == (False, True)
    assert not one.contains(key(0))


def test_swapped_entries_are_misses(redis: RedisServer, open_tier: Open) -> None:
    one = fill(open_tier(redis.url), 2)
    tell(redis, b"RENAME", one._name(key(0)), one._name(key(1)))
    assert (gets(one, 0), gets(one, 1)) == (False, False)


def test_what_is_no_text_is_a_miss(redis: RedisServer, open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PAUSE_SECONDS", 0.0)
    one = open_tier(redis.url)
    tell(redis, b"RPUSH", one._name(key(0)), b"a list")
    assert not gets(one, 0)
    fill(one, 2)
    assert gets(one, 1)


def test_a_server_that_hangs_costs_one_timeout(redis: RedisServer, open_tier: Open, caplog: Any) -> None:
    one = fill(open_tier(redis.url), 1)
    redis.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    assert not any(one.contains(key(i)) or one.put(key(50 + i), data(i)) for i in range(50))
    assert TIMEOUT * 0.9 < time.monotonic() - started < 3 * TIMEOUT + 2
    redis.process.send_signal(signal.SIGCONT)
    assert [record.getMessage().count("serving continues without") for record in caplog.records] == [1]


def test_it_comes_back(redis: RedisServer, open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PAUSE_SECONDS", 0.0)
    one = fill(open_tier(redis.url), 1)
    redis.stop()
    assert not gets(one, 0)
    one.put(key(1), data(1))
    settle(one)
    assert one.trouble is not None
    assert f"redis at {redis.path}" in one.trouble
    redis.start()
    assert not gets(one, 1), "what came meanwhile is lost"
    fill(one, 3)
    assert gets(one, 2)
    assert one.trouble is None


def test_a_server_that_is_down_at_the_start_may_come(open_tier: Open, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        one = open_tier("redis://127.0.0.1:1/0")
    assert "redis at 127.0.0.1:1" in caplog.text
    assert not one.put(key(0), data(0))
    assert not one.contains(key(0))


def test_a_connection_that_was_closed_is_opened_again(redis: RedisServer, open_tier: Open, caplog: Any) -> None:
    """Servers close connections that rest; nothing is lost by it, and nothing is logged."""
    one = fill(open_tier(redis.url), 1)
    tell(redis, b"CLIENT", b"KILL", b"TYPE", b"normal", b"SKIPME", b"yes")
    assert gets(one, 0)
    assert not caplog.records


LONG = b"$%d\r\n" % (HEADER_BYTES + SIZE)


@pytest.mark.parametrize(
    ("answer", "resets"),
    [
        (LONG + b"x" * 100, True),
        (LONG + b"x" * 100, False),
        (LONG + b"x" * (HEADER_BYTES + SIZE) + b"xx", False),
        (b"$999999999999999\r\n", False),
        (b"$x\r\n", False),
        (b"*2\r\n", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"x" * 5000, False),
        (b"-ERR no\r\n", False),
        (b"", True),
    ],
    ids=["reset", "half", "no end", "huge", "no number", "another type", "http", "no line", "an error", "nothing"],
)
def test_wrong_answers_are_misses(open_tier: Open, answer: bytes, resets: bool) -> None:
    server = ScriptedServer(answer, resets=resets)
    try:
        one = open_tier(server.url)
        started = time.monotonic()
        assert not any(gets(one, i) or one.contains(key(i)) for i in range(20))
        assert time.monotonic() - started < 4 * TIMEOUT + 2
    finally:
        server.close()


def test_a_drip_of_bytes_is_no_reason_to_wait(open_tier: Open) -> None:
    """The time is for the whole answer."""
    server = ScriptedServer(LONG + b"x" * 200, pause=TIMEOUT / 3)
    try:
        one = open_tier(server.url)
        started = time.monotonic()
        assert not gets(one, 0)
        assert time.monotonic() - started < TIMEOUT + 2
    finally:
        server.close()


def test_passwords(open_tier: Open) -> None:
    redis = RedisServer("--requirepass", "right")
    try:
        assert fill(open_tier(redis.url, hicache_redis_password="right"), 1).contains(key(0))
        for options in ({}, {"hicache_redis_password": "wrong"}):
            with pytest.raises(ConfigError, match="refuses") as told:
                open_tier(redis.url, **options)
            assert "right" not in str(told.value)
    finally:
        redis.close()


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
def test_options_that_cannot_be(open_tier: Open, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as told:
        open_tier(**options)
    assert "secret" not in str(told.value)


SMALL: dict[str, Any] = {"page_size": 4, "max_total_tokens": 200, "prefix_cache": "hierarchical", "hicache_ratio": 0}
PROMPTS = [[5, 6, 7, 8, *range(10 + 20 * i, 10 + 20 * i + 85)] for i in range(6)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def engine(folder: Path, url: str) -> fwk.LLM:
    return fwk.LLM(
        str(folder), load_format="dummy", check_blocks=True, hicache_storage_backend=["redis"], hicache_redis_url=url,
        hicache_redis_timeout=TIMEOUT, **SMALL,
    )  # fmt: skip


def outputs(llm: fwk.LLM) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def test_engines_share_it_and_say_the_same_whatever_becomes_of_it(
    tiny_llm: Callable[..., fwk.LLM], tiny_folder: Path, redis: RedisServer
) -> None:
    wanted = outputs(tiny_llm(prefix_cache="none", page_size=4))
    with engine(tiny_folder, redis.url) as llm:
        assert outputs(llm) == wanted
    with engine(tiny_folder, redis.url) as llm:
        assert llm.generate([PROMPTS[0]], GREEDY)[0].cached_tokens == 88
        assert outputs(llm) == wanted
        redis.process.send_signal(signal.SIGSTOP)
        assert outputs(llm) == wanted
        redis.process.send_signal(signal.SIGCONT)
        redis.stop()
        assert outputs(llm) == wanted
        assert llm.engine.stats().num_held_blocks == 0
