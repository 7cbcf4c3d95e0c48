"""The ``cpu`` backend: every instruction set this machine runs, threads, odd shapes, and machines without a compiler.

What every backend must do is in kit/fwk_kit/testing/attention.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.isas import isa_params

import fwk_native as native
from fwk.errors import PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, KVKind, KVSpec
from fwk.interfaces.declaration import Facts
from fwk.plugins import choose, load_object
from fwk_attention.cpu.backend import source_of
from fwk_kit.testing.base import installed
from fwk_kit.testing.batches import block_tables, make_batch
from fwk_native.thread_pool import ThreadPool

PLUGINS = installed()

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")


def build(name: str, dtype: torch.dtype, block_size: int = 16, kv_dtype: str = "auto") -> AttentionBackend:
    item = PLUGINS.by_family["attention"][name]
    return load_object(item)(AttentionContext(torch.device("cpu"), dtype, kv_dtype, block_size, threads=ThreadPool()))


@dataclasses.dataclass
class Case:
    """One step after filled pasts; layers are numbered so that plans are shared as in a model."""

    pasts: list[int]
    num_new: list[int]
    heads: tuple[int, int] = (6, 2)
    size: int = 32
    block_size: int = 16
    window: int | None = None
    cap: float | None = None
    parents: list[list[int] | None] | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: str = "auto"
    shared: int = 0  # tokens whose blocks all sequences have in common

    def run(self, name: str, *, is_apart: bool = False, is_dirty: bool = False) -> torch.Tensor:
        """Outcome of the step.

        is_apart: what is shared is stored for each sequence by itself. is_dirty: blocks held what is no number.
        """
        backend = build(name, self.dtype, self.block_size, self.kv_dtype)
        layer = AttentionLayer(0, *self.heads, self.size, self.size**-0.5, self.window, self.cap)
        form = backend.block_format(layer.kv_spec)
        lens = [p + n for p, n in zip(self.pasts, self.num_new, strict=True)]
        tables = block_tables(lens, self.block_size)
        common = 0 if is_apart else self.shared // self.block_size
        tables = [tables[0][:common] + table[common:] for table in tables]
        size = (max(map(max, tables)) + 1, *form.block_shape[:-1], form.block_shape[-1] * form.dtype.itemsize)
        layer.kv_cache = torch.full(size, 255 if is_dirty else 0, dtype=torch.uint8).view(form.dtype)
        random = torch.Generator().manual_seed(5)
        filled = [i for i, past in enumerate(self.pasts) if past]
        past = [
            self.tokens([self.pasts[i] for i in filled], heads, random)
            for heads in (self.heads[0], *[self.heads[1]] * 2)
        ]
        for start in np.cumsum([self.pasts[i] for i in filled])[:-1] if self.shared else ():
            for x in past:
                x[start : start + self.shared] = x[: self.shared]
        new = [self.tokens(self.num_new, heads, random) for heads in (self.heads[0], *[self.heads[1]] * 2)]
        for pasts, counts, at, (q, k, v), parents in (
            ([0] * len(filled), [self.pasts[i] for i in filled], filled, past, None),
            (self.pasts, self.num_new, range(len(lens)), new, self.parents),
        ):
            batch = make_batch(pasts, counts, [tables[i] for i in at], block_size=self.block_size, parents=parents)
            batch.plan = backend.plan(batch, [layer])
            out = backend.forward(q, k, v, layer, batch)
        return out.float()

    def tokens(self, counts: list[int], heads: int, random: torch.Generator) -> torch.Tensor:
        return torch.randn(sum(counts), heads, self.size, generator=random).to(self.dtype)


CASES = {
    "mixed": Case([0, 33, 700, 15, 1100], [70, 1, 3, 65, 1]),
    "odd head size": Case([20, 90, 0], [1, 5, 33], size=13),
    "large heads": Case([200, 0], [1, 40], (4, 1), 160),
    "block of 7, window, cap": Case([300, 5, 640], [40, 1, 1], block_size=7, window=75, cap=20.0),
    "tree": Case([60, 600, 3], [4, 3, 1], parents=[[-1, -1, 0, 1], [-1, 0, 0], None], window=50),
    "window that begins with a tile": Case([311], [20], window=200),
    "shared prefix": Case([530, 700, 513, 900], [1, 3, 1, 2], shared=512),
    "shared prefix, tree": Case([600, 530], [4, 3], parents=[[-1, 0, 0, 1], [-1, 0, 0]], shared=512),
    "int8": Case([0, 34, 700, 2], [20, 1, 3, 1], kv_dtype="int8"),
    "fp8": Case([0, 34, 700, 2], [20, 1, 3, 1], kv_dtype="fp8_e4m3"),
    "int8 in rows": Case([0, 300], [20, 1], size=13, block_size=7, kv_dtype="int8"),
}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


@pytest.mark.gate(24)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("isa", isa_params(native.EMULATED_AMX))
def test_instruction_sets_agree_with_torch(
    isa: str, case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    exact = dataclasses.replace(CASES[case], dtype=dtype)
    tolerance = 0.05 if exact.kv_dtype != "auto" and dtype == torch.bfloat16 else TOLERANCE[dtype]
    torch.testing.assert_close(exact.run("cpu"), exact.run("torch"), atol=tolerance, rtol=0.008)


def test_threads_change_no_bit() -> None:
    """A sequence's outcome is the same with any number of threads, in whatever order they take tasks."""
    case = Case([1500, 40, 0, 2100], [1, 1, 90, 2], dtype=torch.bfloat16)
    alone = case.run("cpu")
    torch.set_num_threads(4)
    try:
        for _ in range(5):
            assert torch.equal(case.run("cpu"), alone)
    finally:
        torch.set_num_threads(1)


def planned(
    pasts: list[int], num_new: list[int], tables: list[list[int]], window: int | None = None
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """All pairs of a member and its task."""
    from fwk_attention.cpu.plan import LayerKind

    backend = build("cpu", torch.float32)
    batch = make_batch(pasts, num_new, tables)
    plan = backend._planner.make(LayerKind(0, 9, 3, 64, window), batch)
    answer = plan.answer
    found = []
    for task in plan.tasks[: answer.num_tasks]:
        first = int(task["first_member"])
        for member in plan.members[first : first + int(task["num_members"])]:
            found.append(tuple({name: int(x[name]) for name in x.dtype.names} for x in (member, task)))
    parts = sorted(member["part"] for member, _ in found if member["part"] >= 0)
    assert parts == list(range(answer.num_parts))
    assert answer.part_rows == max((m["count"] for m, _ in found if m["part"] >= 0), default=0) * 3
    return found


@pytest.mark.parametrize("window", [None, 100, 600])
def test_ranges_of_keys_cover_each_once(window: int | None) -> None:
    pasts, num_new = [0, 255, 256, 1300, 90], [1, 1, 1, 3, 700]
    found = planned(pasts, num_new, block_tables([p + n for p, n in zip(pasts, num_new, strict=True)]), window)
    for i in range(len(pasts)):
        mine = [(member, task) for member, task in found if member["seq"] == i]
        for start in {member["first"] for member, _ in mine}:
            of = [(member, task) for member, task in mine if member["first"] == start]
            place, count = of[0][0]["place"], of[0][0]["count"]
            first = 0 if window is None else max(0, place - window + 1) // 16 * 16
            keys = np.concatenate([np.arange(task["first_key"], task["last_key"]) for _, task in of])
            assert sorted(keys) == list(range(first, place + count))
            assert all(member["num_parts"] == len(of) for member, _ in of)


def test_blocks_that_sequences_share_are_read_together() -> None:
    lens = [600, 700, 530, 900, 300, 800]
    tables = block_tables(lens)
    for i in (1, 2, 3):
        tables[i][:32] = tables[0][:32]
    tables[3][16] = 999  # of its first 512 tokens it shares half
    found = planned([n - 1 for n in lens], [1] * 6, tables)
    by_keys: dict[int, list[list[int]]] = {0: [], 256: []}
    for key in by_keys:
        tasks = {task["first_member"] for _, task in found if task["first_key"] == key}
        by_keys[key] = sorted([m["seq"] for m, t in found if t["first_member"] == first] for first in tasks)
    assert by_keys == {0: [[0, 1, 2, 3], [4], [5]], 256: [[0, 1, 2], [3], [4], [5]]}


def test_a_narrowed_layer_attends_for_few_tokens() -> None:
    from fwk_attention.cpu.plan import LayerKind

    kind, batch = LayerKind(0, 9, 3, 64, None, is_pruned=True), make_batch([0, 50], [320, 2], block_tables([320, 52]))
    planner = build("cpu", torch.float32)._planner
    scores: list[int] = []
    for wanted in (None, torch.arange(322), torch.tensor([319, 321])):
        plan = planner.make(kind, dataclasses.replace(batch, hidden_indices=wanted))
        scores.append(plan.answer.num_scores)
        firsts = {int(plan.members[int(task["first_member"])]["first"]) for task in plan.tasks[: plan.answer.num_tasks]}
    assert scores[0] == scores[1] > 10 * scores[2]
    assert firsts == {304, 320}


def test_a_batch_that_comes_again_is_cut_as_one_that_is_new() -> None:
    """Each step all sequences are a token longer: ranges of keys come to be, more members than there was room for."""
    from fwk_attention.cpu.plan import LayerKind

    kind, lens = LayerKind(0, 9, 3, 64, None), [3, 250, 511, 700]
    batch = make_batch(lens, [1] * 4, block_tables([n + 900 for n in lens]))
    planner, other = (build("cpu", torch.float32)._planner for _ in "ab")
    struct = planner.make(kind, batch).struct
    for step in range(1, 800):
        batch.seq_lens_np += 1
        plan = planner.make(kind, batch)
        assert plan.struct is struct
        assert min(len(plan.members), len(plan.tasks)) >= 4 + batch.seq_lens_np.sum() // 256 + 2 * 4
        if step % 40:
            continue
        new = other.make(kind, dataclasses.replace(batch))
        count = sum(int(task["num_members"]) for task in new.tasks[: new.answer.num_tasks])
        assert [plan.members[:count].tolist(), plan.tasks[: plan.struct.num_tasks].tolist()] == [
            new.members[:count].tolist(),
            new.tasks[: new.struct.num_tasks].tolist(),
        ]
        assert plan.answer.part_rows == plan.struct.part_rows == new.struct.part_rows
        assert len(plan.outcomes[1]) == plan.answer.num_parts * 3 == new.answer.num_parts * 3
    assert planner.make(kind, make_batch([5], [1], [[0]])).answer.num_tasks == 1


BITWISE = [
    (native.isas()[-1], torch.float32),
    (native.isas()[-1], torch.bfloat16),
    (native.EMULATED_AMX, torch.bfloat16),
]


@pytest.mark.gate(1)
@pytest.mark.parametrize(("isa", "dtype"), BITWISE, ids=str)
def test_sharing_changes_no_bit(isa: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a sequence gets from blocks that others read with it is what it gets alone."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    case = Case([700, 520, 1030, 600], [1, 2, 1, 1], shared=512, dtype=dtype)
    assert torch.equal(case.run("cpu"), case.run("cpu", is_apart=True))


@pytest.mark.parametrize("size", [32, 13])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize(("isa", "dtype"), BITWISE, ids=str)
def test_what_a_block_held_before_changes_no_bit(
    isa: str, dtype: torch.dtype, kv_dtype: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    case = Case([20, 3, 0], [3, 1, 40], size=size, dtype=dtype, kv_dtype=kv_dtype)
    assert torch.equal(case.run("cpu"), case.run("cpu", is_dirty=True))


def in_chunks(
    name: str,
    dtype: torch.dtype,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cuts: list[int],
    kv_dtype: str = "auto",
) -> torch.Tensor:
    """What the tokens of one sequence get when they come in chunks of so many."""
    backend = build(name, dtype, kv_dtype=kv_dtype)
    layer = AttentionLayer(0, q.shape[1], k.shape[1], q.shape[2], q.shape[2] ** -0.5)
    form = backend.block_format(layer.kv_spec)
    blocks = list(range(len(q) // 16 + 1))
    layer.kv_cache = torch.zeros(len(blocks), *form.block_shape, dtype=form.dtype)
    parts: list[torch.Tensor] = []
    for past, end in itertools.pairwise(itertools.accumulate(cuts, initial=0)):
        batch = make_batch([past], [end - past], [blocks])
        batch.plan = backend.plan(batch, [layer])
        parts.append(backend.forward(*(x[past:end].to(dtype) for x in (q, k, v)), layer, batch))
    return torch.cat(parts)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("isa", isa_params(native.EMULATED_AMX))
def test_a_token_is_the_same_alone_and_in_a_chunk(isa: str, kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, whatever the number of rows that are multiplied together, in several tiles of keys."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(200, heads, 32, generator=random).bfloat16() for heads in (6, 2, 2))
    outcomes = [
        in_chunks("cpu", torch.bfloat16, q, k, v, cuts, kv_dtype) for cuts in ([200], [7, 1, 192], [132, 67, 1])
    ]
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


GROWTHS = {
    "even": torch.ones(600),
    "growing": torch.linspace(1, 40, 600),
    "sudden": torch.cat([torch.full((300,), 0.1), torch.full((300,), 60.0)]),
}
"""K of each token as a multiple: later tiles have scores far above the earlier, up to hundreds of binary orders."""


@pytest.mark.parametrize("distance", [100, 150, 300, 1000])
@pytest.mark.parametrize("isa", isa_params())
def test_a_key_may_be_far_above_all_others(isa: str, distance: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By so many binary orders, in a tile that is not the first, for all rows: no other weight shows that it is."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    random = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(600, heads, 32, generator=random) for heads in (6, 2, 2))
    q, k = 1 + 0.01 * q, 0.1 * k
    k[400] = distance * math.log(2) / 32**0.5
    outcomes = [in_chunks(name, torch.float32, q, k, v, [600]) for name in ("torch", "cpu")]
    torch.testing.assert_close(*outcomes, atol=TOLERANCE[torch.float32], rtol=0)


@pytest.mark.parametrize("growth", GROWTHS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("isa", isa_params())
def test_a_chunks_start_changes_no_bit(
    isa: str, dtype: torch.dtype, growth: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which tokens share a task decides whether all of it see a tile, and how its weights are made."""
    monkeypatch.setenv(native.ISA_VARIABLE, isa)
    random = torch.Generator().manual_seed(4)
    q, k, v = (torch.randn(600, heads, 32, generator=random) for heads in (6, 2, 2))
    q, k, v = (x.to(dtype) for x in (q, k * GROWTHS[growth][:, None, None], v))
    expected = in_chunks("torch", torch.float32, q, k, v, [600])
    outcomes = [in_chunks("cpu", dtype, q, k, v, cuts) for cuts in ([600], [380, 220], [390, 210])]
    torch.testing.assert_close(outcomes[0].float(), expected, atol=TOLERANCE[dtype], rtol=0.008)
    assert torch.equal(outcomes[0], outcomes[1])
    assert torch.equal(outcomes[0], outcomes[2])


def test_tiles_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.ISA_VARIABLE, native.EMULATED_AMX)
    Case([20], [3], dtype=torch.bfloat16).run("cpu")
    assert native.load(source_of("bfloat16", "auto"), native.EMULATED_AMX).emulated_tiles_in_use() == 0


@pytest.mark.parametrize("size", [16, 13])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_moved_tokens_lie_as_if_stored_there(dtype: torch.dtype, kv_dtype: str, size: int) -> None:
    random = torch.Generator().manual_seed(2)
    k, v = (torch.randn(20, 2, size, generator=random).to(dtype) for _ in "kv")
    source, target = torch.tensor([19, 4, 7, 8]), torch.tensor([2, 3, 4, 17])
    caches = []
    for order in (torch.arange(20), torch.arange(20).index_copy(0, target, source)):
        backend = build("cpu", dtype, 16, kv_dtype)
        layer = AttentionLayer(0, 2, 2, size, 1.0)
        form = backend.block_format(layer.kv_spec)
        layer.kv_cache = torch.zeros(2, *form.block_shape, dtype=form.dtype)
        batch = make_batch([0], [20], [[0, 1]])
        batch.plan = backend.plan(batch, [layer])
        backend.forward(k[order], k[order], v[order], layer, batch)
        caches.append(layer.kv_cache)
        if len(caches) == 1:
            backend.move([layer], source, target)
    assert torch.equal(caches[0], caches[1])


def test_layouts_have_shapes_of_their_own() -> None:
    """Cache tiers outlive a run and serve machines of other instruction sets: they tell layouts apart by shapes."""
    from fwk_attention.cpu.layout import Layout

    spec = KVSpec(KVKind.FULL, 2, 64, 64)
    for dtype in (torch.bfloat16, torch.uint8):
        tiles = [Layout(16, words, dtype).block_format(spec).block_shape for words in (1, 2)]
        rows = [(2, 2, 16, 64), (2, 2, 16, 68)]  # of other backends
        assert len({*tiles, *rows}) == 4
        assert tiles[0][-2] == 2 * tiles[1][-2]


def test_wrong_dtype_is_refused() -> None:
    case = Case([3], [1])
    backend = build("cpu", torch.bfloat16)
    layer = AttentionLayer(0, 6, 2, 32, 1.0)
    layer.kv_cache = torch.zeros(4, *backend.block_format(layer.kv_spec).block_shape, dtype=torch.bfloat16)
    batch = make_batch(case.pasts, case.num_new, block_tables([4]))
    batch.plan = backend.plan(batch, [layer])
    q, k = torch.zeros(1, 6, 32), torch.zeros(1, 2, 32)
    with pytest.raises(TypeError, match=r"bfloat16 was given torch\.float32"):
        backend.forward(q, k, k, layer, batch)


def test_auto_takes_it_on_a_cpu_and_torch_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(dtype="bfloat16", head_size=64, num_heads=9, num_kv_heads=3)
    selection = choose(PLUGINS, "attention", "auto", facts)
    assert selection.chosen is not None
    assert selection.chosen.name == "cpu"
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    selection = choose(PLUGINS, "attention", "auto", facts)
    assert selection.chosen is not None
    assert selection.chosen.name == "torch"
    (reason,) = [r for r in selection.reasons() if "'cpu'" in r]
    assert "finds no C++ compiler" in reason
    with pytest.raises(PluginError, match=r"'cpu' .*cannot be used: it is built on first use and finds no C\+\+"):
        choose(PLUGINS, "attention", "cpu", facts)
