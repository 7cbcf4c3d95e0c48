"""Blocks of layers with a window: who holds them, what the cache keeps, and how layers are grouped."""

from __future__ import annotations

import pytest
import torch
from tests.helpers.engine_machine import assert_idle, prompts, request, run

from fwk.engine.window_blocks import WindowBlocks, WindowCache
from fwk.interfaces.attention import AttentionLayer, BlockFormat, KVSpec
from fwk.interfaces.device import DeviceContext
from fwk.types import EngineStats
from fwk.worker.kv.kv_cache import allocate, form_groups
from fwk_devices.cpu.device import Cpu
from fwk_kit.testing.fake_engine import make_engine, reference

GROUPS = {"block_size": 4, "num_window_groups": 2, "window": 7}


class Cache:
    """A prefix cache as far as ``WindowCache`` asks it: blocks 0, 1, 2, ... that it gives up in this order."""

    def __init__(self, count: int) -> None:
        self.blocks = list(range(count))

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    num_evictable_blocks = num_blocks

    def evict(self, count: int) -> list[int]:
        gone, self.blocks = self.blocks[:count], self.blocks[count:]
        return gone


def kept(count: int) -> tuple[WindowCache, list[WindowBlocks]]:
    """Blocks 100, 101 with block 0, 110, 111 with 1, ...; one sequence uses them."""
    windows = WindowCache(Cache(count), 2, 7, 4)  # type: ignore[arg-type]
    used = [WindowBlocks([100 + 10 * i, 101 + 10 * i]) for i in range(count)]
    for i, blocks in enumerate(used):
        windows.keep(i, blocks)
    return windows, used


def test_the_first_block_a_window_reaches_into() -> None:
    windows = WindowCache(Cache(0), 1, 7, 4)  # type: ignore[arg-type]
    # After n tokens the next one, at place n, sees places n - 6 to n.
    assert [windows.first_needed(n) for n in (0, 6, 9, 10, 13, 14)] == [0, 0, 0, 1, 1, 2]


def test_a_prefix_is_usable_where_a_whole_window_is_there() -> None:
    windows, used = kept(6)
    assert windows.num_usable(range(6)) == 6
    for blocks in used[:2]:
        windows.give_back(blocks, is_end=False)
    assert windows.evict(4) == [100, 101, 110, 111]
    assert windows.num_usable(range(6)) == 6
    assert windows.num_usable(range(3)) == 0  # after 12 tokens, block 1 is seen
    assert windows.num_usable(range(4)) == 4  # after 16, blocks 2 and 3 are
    assert [blocks is None for blocks in windows.take(range(4))] == [True, True, False, False]


def test_what_was_passed_goes_first_then_cached_blocks_with_theirs_then_ends() -> None:
    windows, used = kept(3)
    assert windows.num_evictable_blocks == 3  # all are in use
    windows.give_back(used[1], is_end=False)
    windows.give_back(used[2], is_end=True)
    windows.give_back(used[0], is_end=True)
    assert windows.num_evictable_blocks == 9
    assert windows.num_blocks == 9
    assert windows.evict(1) == [110, 111]
    assert windows.evict(1) == [0, 100, 101]
    assert windows.evict(4) == [1, 2, 120, 121]
    assert windows.num_blocks == 0


def test_where_a_prefix_ended_is_kept_longer() -> None:
    windows, used = kept(4)
    taken = windows.take(range(2))
    for blocks in [*used, *(x for x in taken if x)]:
        windows.give_back(blocks, is_end=False)
    assert windows.evict(4) == [120, 121, 130, 131]
    assert windows.num_usable(range(4)) == 2


def test_own_blocks_are_free_and_shared_ones_stay() -> None:
    windows, used = kept(1)
    (taken,) = windows.take([0])
    assert taken is used[0]
    assert windows.give_back(used[0], is_end=True) == []
    assert windows.num_evictable_blocks == 1
    assert windows.give_back(WindowBlocks([7, 8]), is_end=True) == [7, 8]
    windows.keep(0, own := WindowBlocks([9, 10]))
    assert own.key is None, "others stand there already"


def test_a_running_sequence_holds_a_window() -> None:
    engine = make_engine(num_blocks=100, cache="none", max_len=200, **GROUPS)
    engine.add(request("a", [1] * 30, max_tokens=120))
    held: list[EngineStats] = []
    while engine.has_work:
        engine.step()
        held.append(engine.stats())
    # 38 blocks of what it has seen at the end, and of each window group at most 3.
    assert max(stats.num_held_blocks for stats in held[2:]) <= 38 + 2 * 3
    assert_idle(engine)


def test_more_sequences_fit_into_the_same_pool() -> None:
    def most(num_blocks: int, **groups: int) -> int:
        engine = make_engine(num_blocks=num_blocks, cache="none", step_tokens=16, chunk_tokens=16, **groups)
        for i in range(8):
            engine.add(request(f"r{i}", [i] * 60, max_tokens=60))
        running = 0
        while engine.has_work:
            engine.step()
            running = max(running, engine.stats().num_running)
        return running

    assert most(40, block_size=4) < most(120, **GROUPS)  # a block for all layers is as large as three


@pytest.mark.parametrize("depth", [1, 2])
def test_prefixes_are_found_again_and_preemptions_change_nothing(depth: int) -> None:
    engine = make_engine(num_blocks=44, cache="radix", depth=depth, **GROUPS)
    shared = prompts(9, seed=3, shared=21, longest=20)
    for turn in range(2):
        for i, prompt in enumerate(shared):
            engine.add(request(f"{turn}.{i}", prompt, max_tokens=20))
        outputs = run(engine)
        assert all(outputs[f"{turn}.{i}", 0] == reference(prompt, 20) for i, prompt in enumerate(shared))
    assert engine.stats().cached_prompt_tokens > 9 * 20
    assert engine.stats().preemptions > 0
    assert_idle(engine)


def test_the_next_turn_of_a_chat_is_found() -> None:
    engine = make_engine(num_blocks=100, cache="radix", **GROUPS)
    prompt = [3] * 40
    engine.add(request("a", prompt, max_tokens=10))
    said = run(engine)["a", 0]
    engine.add(request("b", [*prompt, *said, 5, 6], max_tokens=3))
    run(engine)
    assert engine.stats().cached_prompt_tokens == 48  # whole blocks of 40 + 9: the last token was not computed


def test_what_could_never_fit_alone_is_refused() -> None:
    engine = make_engine(num_blocks=30, cache="none", step_tokens=8, chunk_tokens=8, **GROUPS)
    most = engine.scheduler.max_sequence_tokens
    assert 30 // 3 * 4 < most < 30 * 4
    (refusal,) = engine.add(request("a", [1] * most, max_tokens=1))
    assert refusal.error is not None
    assert f"room for {most}" in refusal.error
    assert engine.add(request("b", [1] * (most - 1), max_tokens=1)) == []
    run(engine)
    assert engine.stats().preemptions == 0


class Backend:
    def block_format(self, spec: KVSpec) -> BlockFormat:
        return BlockFormat((2, spec.num_kv_heads, 4, spec.head_size), torch.float32)


def layers(kinds: str, sizes: str = "") -> list[AttentionLayer]:
    return [
        AttentionLayer(i, 1, 1, int(size), 1.0, 512 if kind == "w" else None)
        for i, (kind, size) in enumerate(zip(kinds, sizes or "8" * len(kinds), strict=True))
    ]


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("wwfwwf", "110220"),
        ("wfwfw", "10102"),
        ("ffw", "000"),  # next to nothing to save
        ("www", "012"),  # all have a window: the first group keeps whole sequences all the same
        ("wwwwwwwww", "001122334"),
        ("w", "0"),
        ("fff", "000"),
    ],
)
def test_groups_have_as_many_layers_as_see_everything(kinds: str, groups: str) -> None:
    given = layers(kinds)
    formed = form_groups(Backend(), given)  # type: ignore[arg-type]
    assert "".join(str(layer.kv_group) for layer in given) == groups
    assert sorted(layer.index for group in formed for layer in group) == list(range(len(kinds)))
    allocate(Backend(), formed, 3, Cpu(DeviceContext()), torch.device("cpu"))  # type: ignore[arg-type]
    for group in formed[1:]:
        for layer, first in zip(group, formed[0], strict=False):
            assert layer.kv_cache is first.kv_cache


def test_layers_that_draft_join_the_first_group() -> None:
    given, drafting = layers("wfwf"), layers("wff")
    groups = form_groups(Backend(), given, drafting)  # type: ignore[arg-type]
    assert groups == [[given[1], given[3], *drafting], [given[0], given[2]]]
    assert [layer.kv_group for layer in drafting] == [0, 0, 0]
    assert form_groups(Backend(), given[1:2], drafting) == [[given[1], *drafting]]  # type: ignore[arg-type]


def test_layers_that_store_something_else_stay_in_one_group() -> None:
    given = layers("wfw", "848")
    assert form_groups(Backend(), given) == [given]  # type: ignore[arg-type]
