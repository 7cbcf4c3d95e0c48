"""An LMCache server that is there, down, slow, or not what it should be: misses, little delay, the same tokens."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.lmcache_server import LMCacheImitation

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.interfaces.prefix_cache import CacheTierContext
from fwk_cache._common import writer
from fwk_cache._common.sealed import HEADER_BYTES
from fwk_cache.lmcache import LMCacheOptions
from fwk_cache.lmcache.tier import LMCacheTier

SIZE = 4096
TIMEOUT = 0.3
CONTEXT = CacheTierContext(num_blocks=10, block_bytes=SIZE, identity=b"i" * 32)
Open = Callable[..., LMCacheTier]


def key(i: int) -> bytes:
    return i.to_bytes(4, "little") * 8


def data(i: int) -> memoryview:
    return memoryview(bytes([i]) * SIZE)


@pytest.fixture
def server() -> Iterator[LMCacheImitation]:
    one = LMCacheImitation()
    yield one
    one.close()


@pytest.fixture
def open_tier() -> Iterator[Open]:
    opened: list[LMCacheTier] = []

    def make(url: str, **context: Any) -> LMCacheTier:
        given = LMCacheOptions(hicache_lmcache_url=url, hicache_lmcache_timeout=TIMEOUT)
        opened.append(LMCacheTier(replace(CONTEXT, options=given, **context)))
        return opened[-1]

    yield make
    for one in opened:
        one.close()


def gets(one: LMCacheTier, i: int) -> bool:
    into = memoryview(bytearray(SIZE))
    found = one.get(key(i), into)
    assert not found or into == data(i), "bytes that were not put there"
    return found


def fill(one: LMCacheTier, count: int) -> LMCacheTier:
    """Put entries; a server that is there has them on return: it answers the writer's connection in order."""
    assert all(one.put(key(i), data(i)) for i in range(count))
    end = time.monotonic() + 20
    while one._writer.waiting and time.monotonic() < end:
        time.sleep(0.002)
    assert not one._writer.waiting
    if one._writes is not None:
        one._writes.has(b"fwk@1@0@0@uint8")
    return one


def test_what_one_server_keeps_another_finds(server: LMCacheImitation, open_tier: Open) -> None:
    fill(open_tier(server.url), 5)
    other = open_tier(server.url)
    assert [other.contains(key(i)) for i in range(6)] == [True] * 5 + [False]
    assert [gets(other, i) for i in range(6)] == [True] * 5 + [False]
    assert not gets(open_tier(server.url, identity=b"j" * 32), 0), "another model's"


@pytest.mark.parametrize("at", [0, 8, 40, 72, 80, HEADER_BYTES, HEADER_BYTES + SIZE - 1])
def test_a_flipped_byte_is_a_miss_and_is_replaced(server: LMCacheImitation, open_tier: Open, at: int) -> None:
    one = fill(open_tier(server.url), 2)
    entry = bytearray(server.entries[one._name(key(0))])
    entry[at] ^= 0xEE
    server.entries[one._name(key(0))] = bytes(entry)
    assert (gets(one, 0), gets(one, 1)) == (False, True)
    assert not one.contains(key(0)), "the server cannot delete it, so it is to be written again"
    fill(one, 1)
    assert one.contains(key(0))
    assert gets(one, 0)


@pytest.mark.parametrize("value", [b"", b"x", b"x" * (HEADER_BYTES + SIZE + 1), b"x" * 2**22])
def test_an_entry_of_another_size_is_a_miss(server: LMCacheImitation, open_tier: Open, value: bytes) -> None:
    one = fill(open_tier(server.url), 2)
    server.entries[one._name(key(0))] = value
    assert (gets(one, 0), gets(one, 1)) == (False, True)
    assert not one.contains(key(0))


def test_a_server_that_hangs_costs_one_timeout(server: LMCacheImitation, open_tier: Open, caplog: Any) -> None:
    one = fill(open_tier(server.url), 1)
    server.stalls = True
    started = time.monotonic()
    assert not any(gets(one, 0) or one.put(key(50 + i), data(i)) for i in range(50))
    assert TIMEOUT * 0.9 < time.monotonic() - started < TIMEOUT + 2
    assert [record.getMessage().count("serving continues without") for record in caplog.records] == [1]


def test_it_comes_back(server: LMCacheImitation, open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PAUSE_SECONDS", 0.0)
    one = fill(open_tier(server.url), 1)
    server.stop()
    assert not gets(one, 0)
    assert one.trouble is not None
    assert f"lmcache at 127.0.0.1:{server.port}" in one.trouble
    server.start()
    assert not gets(one, 0), "it has forgotten"
    assert one.trouble is None
    assert one._writes is not None
    one._writes.close()  # PUT has no answer: what is sent to a server that has gone is lost, unseen
    one._writes = None
    fill(one, 3)
    assert gets(one, 2)


def test_a_server_that_is_down_at_the_start_may_come(open_tier: Open, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING):
        one = open_tier("lm://127.0.0.1:1")
    assert "lmcache at 127.0.0.1:1" in caplog.text
    assert not one.put(key(0), data(0))
    assert not one.contains(key(0))


def test_a_connection_that_was_closed_is_opened_again(server: LMCacheImitation, open_tier: Open, caplog: Any) -> None:
    one = fill(open_tier(server.url), 1)
    assert gets(one, 0)
    server.hang_up()
    assert gets(one, 0)
    assert not caplog.records


def answer(code: int, length: int) -> bytes:
    return struct.pack("=9i", code, length, 4, 6, length, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("bytes_sent", "resets"),
    [
        (answer(200, HEADER_BYTES + SIZE) + b"x" * 100, True),
        (answer(200, HEADER_BYTES + SIZE) + b"x" * 100, False),
        (answer(200, HEADER_BYTES + SIZE) + b"x" * (HEADER_BYTES + SIZE), False),
        (answer(200, -1), False),
        (answer(7, 0), False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n" * 2, False),
        (b"", True),
    ],
    ids=["reset", "half", "another entry", "a negative size", "no code", "http", "nothing"],
)
def test_wrong_answers_are_misses(open_tier: Open, bytes_sent: bytes, resets: bool) -> None:
    server = LMCacheImitation(bytes_sent, resets=resets)
    try:
        one = open_tier(server.url)
        started = time.monotonic()
        assert not any(gets(one, i) for i in range(20))
        assert time.monotonic() - started < 4 * TIMEOUT + 2
    finally:
        server.close()


@pytest.mark.parametrize("url", ["http://x:1", "lm://x", "lm://:1", "lm://x:99999", "lm://x:1/0", "lm://me@x:1"])
def test_addresses_that_cannot_be(open_tier: Open, url: str) -> None:
    with pytest.raises(ConfigError, match="must be lm://HOST:PORT"):
        open_tier(url)


def test_a_block_that_no_message_can_tell(open_tier: Open, server: LMCacheImitation) -> None:
    with pytest.raises(ConfigError, match="at most 2 GiB"):
        open_tier(server.url, block_bytes=2**31)


SMALL: dict[str, Any] = {"page_size": 4, "max_total_tokens": 200, "hicache_ratio": 0, "load_format": "dummy"}
PROMPTS = [[5, 6, 7, 8, *range(10 + 20 * i, 10 + 20 * i + 85)] for i in range(6)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def outputs(llm: fwk.LLM) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]


def test_engines_share_it_and_say_the_same_whatever_becomes_of_it(
    tiny_llm: Callable[..., fwk.LLM], tiny_folder: Path, server: LMCacheImitation
) -> None:
    """``enable_lmcache`` is all that is said."""
    wanted = outputs(tiny_llm(prefix_cache="none", page_size=4))
    given = {**SMALL, "check_blocks": True, "enable_lmcache": True, "hicache_lmcache_url": server.url}
    with fwk.LLM(str(tiny_folder), hicache_lmcache_timeout=TIMEOUT, **given) as llm:
        assert outputs(llm) == wanted
    with fwk.LLM(str(tiny_folder), hicache_lmcache_timeout=TIMEOUT, **given) as llm:
        assert llm.generate([PROMPTS[0]], GREEDY)[0].cached_tokens == 88
        assert outputs(llm) == wanted
        server.stalls = True
        assert outputs(llm) == wanted
        server.stop()
        assert outputs(llm) == wanted
        assert llm.engine.stats().num_held_blocks == 0
