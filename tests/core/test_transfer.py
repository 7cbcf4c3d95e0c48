"""Blocks of the KV cache to bytes and back."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.helpers.dict_tier import DictTier

from fwk.interfaces.prefix_cache import CacheTierContext
from fwk_cache.tiers import store as transfer
from fwk_cache.tiers.store import BlockStore

SHAPES = [(2, 3, 4, 5), (7,), (2, 1, 4, 8)]
DTYPES = [torch.float32, torch.bfloat16, torch.int8]
BLOCKS = 12


def caches(fill: bool = True) -> list[torch.Tensor]:
    """Three layers of different shape and type; their bytes are noise, NaNs included."""
    made = [torch.zeros((BLOCKS, *shape), dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)]
    if fill:
        for cache in made:
            raw = cache.view(BLOCKS, -1).view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    return made


def tier() -> DictTier:
    return DictTier(CacheTierContext(BLOCKS, 0, bytes(32)))


def raw(layers: list[torch.Tensor], block: int) -> bytes:
    return b"".join(bytes(layer[block].contiguous().view(-1).view(torch.uint8).numpy()) for layer in layers)


@pytest.mark.parametrize("staging", [1, 2000, 2**20])
def test_every_layers_bytes_come_back_to_other_blocks(staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", staging)
    layers, kept = caches(), tier()
    store = BlockStore(layers, [("dict", kept)])
    before = [raw(layers, block) for block in range(BLOCKS)]
    keys = [bytes([block]) for block in range(6)]
    store.save(list(zip(keys, range(6), strict=True)))
    assert [kept.entries[key] for key in keys] == before[:6]
    assert store.load(keys, [11, 10, 9, 8, 7, 6]) == 6
    assert [raw(layers, block) for block in range(BLOCKS)] == [*before[:6], *reversed(before[:6])]
    fresh = caches(fill=False)
    assert BlockStore(fresh, [("dict", kept)]).load([keys[3]], [2]) == 1
    assert raw(fresh, 2) == before[3]
    assert raw(fresh, 1) == bytes(len(before[3]))


@pytest.mark.parametrize("staging", [1, 2**20])
def test_loading_ends_at_the_first_miss(staging: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "STAGING_BYTES", staging)
    layers, kept = caches(), tier()
    store = BlockStore(layers, [("dict", kept)])
    keys = [bytes([block]) for block in range(5)]
    store.save(list(zip(keys, range(5), strict=True)))
    kept.lost.add(keys[2])
    assert store.find(keys) == 5
    before = raw(layers, 8)
    assert store.load(keys, [6, 7, 8, 9, 10]) == 2
    assert raw(layers, 8) == before
    assert store.find([b"?", *keys]) == 0


def test_what_a_slow_tier_gives_is_kept_in_the_fast_one() -> None:
    layers, fast, slow = caches(), tier(), tier()
    BlockStore(layers, [("slow", slow)]).save([(b"k", 1)])
    store = BlockStore(layers, [("fast", fast), ("slow", slow)])
    assert store.find([b"k"]) == 1
    assert store.load([b"k"], [2]) == 1
    assert fast.entries == slow.entries == {b"k": raw(layers, 1)}
    store.save([(b"k", 1), (b"l", 3)])
    assert (fast.puts, slow.puts) == ([b"k", b"l"], [b"k", b"l"])


def test_a_tier_that_raises_is_missed_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(DictTier):
        def contains(self, key: bytes) -> bool:
            raise RuntimeError("broken")

        def get(self, key: bytes, into: memoryview) -> bool:
            raise RuntimeError("broken")

        def put(self, key: bytes, data: memoryview) -> bool:
            raise RuntimeError("broken")

        def close(self) -> None:
            raise RuntimeError("broken")

        @property
        def trouble(self) -> str:
            return "the disk is full"

    layers, good = caches(), tier()
    broken = Broken(CacheTierContext(BLOCKS, 0, bytes(32)))
    store = BlockStore(layers, [("bad", broken), ("good", good)])
    with caplog.at_level(logging.WARNING):
        store.save([(b"k", 1)])
        assert store.find([b"k"]) == 1
        assert store.load([b"k"], [2]) == 1
        assert store.troubled_tiers() == ["cache tier bad: the disk is full"]
        store.close()
    assert [record.getMessage().count("bad failed") for record in caplog.records] == [1]
    assert raw(layers, 2) == raw(layers, 1)
