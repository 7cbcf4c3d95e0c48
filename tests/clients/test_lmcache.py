"""``cache_tiers.lmcache`` with LMCache's own server."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from fwk.interfaces.prefix_cache import CacheTierContext
from fwk_cache._common import writer
from fwk_cache.lmcache import LMCacheOptions
from fwk_cache.lmcache.connection import ANSWER, ASK, EXIST, GET, HEALTH, PUT, Connection, read_address
from fwk_cache.lmcache.tier import LMCacheTier
from tests.helpers.lmcache_server import LMCacheImitation, LMCacheServer, make_environment

pytestmark = [pytest.mark.clients, pytest.mark.timeout(900)]
SIZE = 4096
CONTEXT = CacheTierContext(num_blocks=10, block_bytes=SIZE, identity=b"i" * 32)
PROMPTS = [[5, 6, 7, 8, *range(10 + 20 * i, 10 + 20 * i + 85)] for i in range(6)]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def python(cache: Path) -> Path:
    return make_environment(cache / "lmcache")


@pytest.fixture
def server(python: Path, tmp_path: Path) -> Iterator[LMCacheServer]:
    one = LMCacheServer(python, tmp_path / "log")
    yield one
    one.close()


def said(url: str, command: int, key: bytes, data: bytes = b"") -> bytes:
    """The bytes that the server answers, after those of HEALTH at the beginning."""
    connection = Connection(read_address(url), 5.0)
    try:
        connection._ask(command, key, data)
        if command == PUT:
            connection._ask(HEALTH, key)
        answer = bytearray(ANSWER.size)
        connection._socket.fill(memoryview(answer))
        rest = bytearray(ANSWER.unpack(answer)[1])
        connection._socket.fill(memoryview(rest))
        return bytes(answer + rest)
    finally:
        connection.close()


def test_the_imitation_answers_as_it_does(server: LMCacheServer) -> None:
    """Byte for byte, so that what the gate shows with the imitation holds."""
    imitation = LMCacheImitation()
    try:
        key = b"fwk@1@0@00ff@uint8"
        for command, data in ((HEALTH, b""), (GET, b""), (EXIST, b""), (PUT, b"abc" * 1000), (GET, b""), (EXIST, b"")):
            assert said(server.url, command, key, data) == said(imitation.url, command, key, data), command
    finally:
        imitation.close()
    assert ASK.size == 186


def test_a_server_that_ends_and_comes_back(server: LMCacheServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "PAUSE_SECONDS", 0.0)
    options = LMCacheOptions(hicache_lmcache_url=server.url, hicache_lmcache_timeout=5)
    tier = LMCacheTier(replace(CONTEXT, options=options))
    into = memoryview(bytearray(SIZE))

    def keeps(number: int) -> bool:
        data = bytes([number]) * SIZE
        for _ in range(100):
            tier.put(b"k" * 31 + bytes([number]), memoryview(data))
            if tier.get(b"k" * 31 + bytes([number]), into) and number not in tier._writer.waiting:
                return into == data
        return False

    try:
        assert keeps(1)
        server.stop()
        while tier._writer.waiting:
            pass
        assert not tier.contains(b"k" * 31 + b"\1")
        assert tier.trouble is not None
        server.start()
        assert keeps(2)
    finally:
        tier.close()


def test_two_engines_share_it(server: LMCacheServer, tiny_folder: Path) -> None:
    small: dict[str, Any] = {"page_size": 4, "max_total_tokens": 200, "load_format": "dummy"}
    with fwk.LLM(str(tiny_folder), prefix_cache="none", **small) as llm:
        wanted = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    given = {**small, "enable_lmcache": True, "hicache_lmcache_url": server.url, "hicache_ratio": 0}
    for cached in (0, 88):
        with fwk.LLM(str(tiny_folder), check_blocks=True, hicache_lmcache_timeout=5, **given) as llm:
            assert llm.generate([PROMPTS[0]], GREEDY)[0].cached_tokens == cached
            assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == wanted
