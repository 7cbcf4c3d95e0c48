"""Keys that sequences of a step share, computed once for all of them by the Triton backend, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.interpreted import interpreted
from tests.helpers.machine_code import compiled, is_triton_before

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.plugins import discover, find
from fwk_attention.triton_paged import backend
from fwk_attention.triton_paged.backend import TritonBackend
from fwk_attention.triton_paged.plan import Launch, LayerKind, Sizes, cut, device_sizes
from fwk_attention.triton_paged.shared import share
from fwk_kit.testing.attention_cases import RELATIVE, TOLERANCE, Cached, Shape, reference
from fwk_kit.testing.batches import make_batch

pytestmark = interpreted

TRITON = find(discover(), "attention", "triton")
SPLIT = 32
Step = tuple[Sequence[tuple[int, int, int]], Any]
"""Of each sequence: the first with which it shares blocks (or itself), how many of them, and its tokens before."""


class Sharing(Cached):
    """The Triton backend with the option on, and parts of SPLIT keys; remembers its last plan."""

    def __init__(self, shape: Shape, num_blocks: int, **more: Any) -> None:
        super().__init__(TRITON, shape, num_blocks, **more)
        context = self.backend.context
        options = context.options.model_copy(
            update={"triton_attention_cascade": True, "triton_attention_split_tile_size": SPLIT}
        )
        self.backend.context = replace(context, options=options)
        self.launches: list[Launch] = []
        plan = self.backend.plan

        def remembered(*arguments: Any) -> Any:
            found = plan(*arguments)
            (self.launches,) = found.values()
            return found

        self.backend.plan = remembered  # type: ignore[method-assign]

    def fill(self, table: list[int], k: torch.Tensor, v: torch.Tensor) -> None:
        """Store a sequence's past."""
        assert isinstance(self.backend, TritonBackend)
        size, places = self.shape.block_size, torch.arange(len(k))
        slots = torch.tensor(table)[places // size] * size + places % size
        if len(k):
            self.backend._store(k, None if self.shape.value_head_size else v, self.backend._state(self.layer), slots)


def tables_of(sequences: Sequence[tuple[int, int, int]], new: Sequence[int], block_size: int) -> list[list[int]]:
    tables: list[list[int]] = []
    free = iter(np.random.default_rng(3).permutation(4000) + 1)
    for i, ((leader, shared, past), count) in enumerate(zip(sequences, new, strict=True)):
        needed = -(-(past + count) // block_size)
        mine = tables[leader][:shared] if leader != i else []
        assert len(mine) * block_size <= past, "what is shared is whole blocks of the past"
        tables.append([*mine, *(int(next(free)) for _ in range(needed - len(mine)))])
    return tables


def check(
    sequences: Sequence[tuple[int, int, int]],
    new: Sequence[int] | None = None,
    parents: Any = None,
    **more: Any,
) -> list[Launch]:
    """A step's output against attention written out; returns its launches."""
    shape = Shape(**more)
    new = [1] * len(sequences) if new is None else new
    tables = tables_of(sequences, new, shape.block_size)
    features = frozenset[str]() if parents is None else frozenset({"tree_mask"})
    cached = Sharing(shape, max(map(max, tables)) + 1, features=features)
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for i, ((leader, shared, past), count) in enumerate(zip(sequences, new, strict=True)):
        k, v = (cached.tokens(past + count, shape.num_kv_heads) for _ in range(2))
        if leader != i:
            end = shared * shape.block_size
            k[:end], v[:end] = keys[leader][:end], values[leader][:end]
        keys.append(k)
        values.append(v)
        cached.fill(tables[i], k[:past], v[:past])
    pasts = [past for _, _, past in sequences]
    k, v = (torch.cat([x[p:] for x, p in zip(numbers, pasts, strict=True)]) for numbers in (keys, values))
    q, out = cached.step(pasts, new, tables, k, v, parents)
    expected = [
        reference(query, key, value, past, shape, tree)
        for query, key, value, past, tree in zip(
            q.split(list(new)), keys, values, pasts, parents or [None] * len(pasts), strict=True
        )
    ]
    atol = 0.08 if shape.dtype == "bfloat16" and shape.kv_dtype != "auto" else TOLERANCE[shape.dtype]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=atol, rtol=RELATIVE[shape.dtype])
    return cached.launches


def num_shared(launches: list[Launch]) -> int:
    return sum(len(launch.shared) for launch in launches if launch.shared is not None)


def keys_read(launches: list[Launch]) -> int:
    """By the programs of one KV head that have different tokens; times heads and the bytes of K and V: the bytes."""
    tiles = sum(int((launch.tiles[:, 6] - launch.tiles[:, 5]).sum()) for launch in launches)
    return tiles + sum(int((x.shared[:, 2] - x.shared[:, 1]).sum()) for x in launches if x.shared is not None)


PAIR = [(0, 0, 96), (0, 6, 97)]
MANY = [(0, 0, 70), *((0, 4, 64 + i) for i in range(20))]
MIXED = [
    (0, 0, 130),
    (1, 0, 40),  # alone
    (0, 8, 160),
    (3, 0, 99),
    (0, 4, 75),  # of the first two only the beginning
    (3, 5, 80),
    (3, 6, 200),
    (7, 0, 5),
    (2, 10, 161),
]


@pytest.fixture(params=["interpreter", "half precision's", "float32's"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of the interpreter, and of devices: shared ones are of as many rows as others, or of more."""
    found = {"half precision's": Sizes(16, 16, 64, 16), "float32's": device_sizes(32, 32, 4)}
    if request.param in found:
        monkeypatch.setattr(backend, "INTERPRETED", found[request.param])


@pytest.mark.gate(1)
@pytest.mark.usefixtures("sizes")
@pytest.mark.parametrize(
    ("sequences", "ranges"), [(PAIR, 3), (MANY, 2), (MIXED, 8)], ids=["two, rests of 0 and 1", "many", "groups"]
)
def test_decode(sequences: Any, ranges: int) -> None:
    """The shared ranges: of PAIR three, of MANY two; of MIXED all that two or more have from the beginning on."""
    launches = check(sequences)
    shared = torch.cat([x.shared for x in launches if x.shared is not None])
    assert len({(first, int(key)) for first, key in shared[:, :2].tolist()}) >= ranges


@pytest.mark.sweep
@pytest.mark.parametrize(
    "more",
    [
        {"num_heads": 8, "num_kv_heads": 1},
        {"num_heads": 6, "num_kv_heads": 2, "head_size": 24},
        {"num_heads": 2, "dtype": "bfloat16"},
        {"kv_dtype": "fp8_e4m3"},
        {"kv_dtype": "int8", "dtype": "bfloat16"},
        {"soft_cap": 3.0},
        {"num_heads": 20, "num_kv_heads": 1, "head_size": 48, "value_head_size": 24},
        {"num_heads": 8, "num_kv_heads": 1, "head_size": 40, "value_head_size": 32, "kv_dtype": "fp8_e4m3"},
    ],
    ids=lambda more: " ".join(f"{name}={value}" for name, value in more.items()),
)
def test_shapes_of_layers(monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]) -> None:
    monkeypatch.setattr(backend, "INTERPRETED", Sizes(16, 16, 64, 16))
    assert num_shared(check(MIXED, **more)) > 0


@pytest.mark.gate(1)
@pytest.mark.parametrize("block_size", [1, 8, 24, 48])
def test_blocks_of_other_sizes(block_size: int) -> None:
    """Ranges that begin within a block, and blocks of several ranges."""
    shared = 96 // block_size
    assert num_shared(check([(0, 0, 100), (0, shared, 96), (0, shared, 130)], block_size=block_size)) == 3


@pytest.mark.sweep
def test_a_window_is_not_shared() -> None:
    """It begins elsewhere in each sequence: tiles are those of a run without the option."""
    assert num_shared(check(MIXED, sliding_window=70)) == 0


def test_drafts_trees_and_prompts_alongside() -> None:
    """Keys that are shared lie before all new tokens, whatever these see of one another; prompts share nothing."""
    sequences, new = [*MIXED, (0, 8, 140)], [4, 1, 1, 5, 2, 1, 16, 3, 1, 40]
    whole = check(sequences, new)
    assert num_shared(whole) > 0
    trees = [[-1, 0, 0, 1], [-1], [-1], [-1, 0, 0, 1, 2], [-1, 0], [-1], None, [-1, 0, 0], [-1], None]
    assert num_shared(check(sequences, new, trees)) == num_shared(whole)
    assert not any(x.shared is not None for x in whole if x.rows != whole[0].rows)


@pytest.mark.gate(1)
@pytest.mark.parametrize("past", [61, 63, 64, 90])
def test_lengths_that_come_late(past: int) -> None:
    """Rows of a chain of drafts share a table, which reaches past where the device finds that their sequence ends."""
    shape, fewer, count = Shape(), 3, 4
    table = list(range(1, 9))
    cached = Sharing(shape, 9)
    k, v = (cached.tokens(past + count, 2) for _ in range(2))
    cached.fill(table, k[:past], v[:past])
    batch = make_batch(range(past, past + count), [1] * count, [table] * count)
    batch.seq_lens_np = batch.seq_lens_np + np.int32(fewer)  # as planned
    batch.num_fewer = torch.full((count,), fewer)
    q = cached.tokens(count, 4)
    batch.plan = cached.backend.plan(batch, cached.layers)
    out = cached.backend.forward(q, k[past:], v[past:], cached.layer, batch)
    assert num_shared(cached.launches) == (past + fewer) // SPLIT
    torch.testing.assert_close(out.double(), reference(q, k, v, past, shape), atol=TOLERANCE["float32"], rtol=0.0)


@pytest.mark.sweep
def test_what_is_read() -> None:
    """Of 8 sequences with a common past of 320 and 20 of their own, 320 + 8 * 21 keys and not 8 * 341."""
    sequences = [(0, 20 if i else 0, 340) for i in range(8)]
    assert keys_read(check(sequences)) == 320 + 8 * 21
    apart = [(i, 0, 340) for i in range(8)]
    assert keys_read(check(apart)) == 8 * 341


@pytest.mark.gate(4)
@pytest.mark.parametrize("seed", range(12))
def test_each_key_of_each_token_is_in_one_tile(seed: int) -> None:
    """Whatever is shared, (token, key) pairs and the parts that they go to are those of ``cut``."""
    random = np.random.default_rng(seed)
    count, block_size, split = int(random.integers(2, 30)), int(random.choice([1, 4, 16, 24])), 16
    per_tile, slots = int(random.choice([1, 2, 4])), int(random.choice([2, 4, 16]))
    pasts, new = random.integers(0, 200, count), random.integers(1, 6, count)
    table = np.arange(count * 210).reshape(count, 210)
    for i in range(1, count):
        leader = int(random.integers(0, i))
        shared = int(random.integers(0, min(pasts[i], pasts[leader]) // block_size + 1))
        table[i, :shared] = table[leader, :shared]
    starts = np.cumsum(new) - new
    tiles, _ = cut(
        np.arange(count), starts, new, pasts, tokens_per_tile=per_tile, window=None, is_tree=False, split=split
    )

    def of_tiles(tiles: Any) -> set[tuple[int, int, int, int, int, int]]:
        return {
            (start + first + nth, key, last, part, nth, block)
            for sequence, start, n, _, first, key, last, part in tiles.tolist()
            for nth in range(min(per_tile, n - first))
            for block in table[sequence, key // block_size : -(-last // block_size)].tolist()
        }

    def of_shared(shared: Any) -> set[tuple[int, int, int, int, int, int]]:
        return {
            (token, key, last, part, nth, block)
            for sequence, key, last, *fields in shared.tolist()
            for token, part, nth in np.array(fields).reshape(slots, 3).tolist()
            if token >= 0
            for block in table[sequence, key // block_size : -(-last // block_size)].tolist()
        }

    for most in (None, 3):
        stay, shared = share(
            tiles, table, block_size=block_size, split=split, tokens_per_tile=per_tile, slots=slots, most=most
        )
        assert not of_tiles(stay) & of_shared(shared)
        assert of_tiles(stay) | of_shared(shared) == of_tiles(tiles)
        assert len(stay) + len(shared) <= len(tiles)
        assert most is None or len(shared) <= most


@pytest.mark.sweep
def test_blocks_of_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "cumprod", lambda x: np.zeros_like(x))
    check(MIXED)


@pytest.mark.sweep
def test_serves_a_model(tiny_llm: Callable[..., fwk.LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with a common beginning."""
    counts: list[int] = []
    real = TritonBackend.plan

    def watched(self: TritonBackend, *arguments: Any) -> dict[LayerKind, list[Launch]]:
        found = real(self, *arguments)
        counts.append(sum(map(num_shared, found.values())))
        return found

    monkeypatch.setattr(TritonBackend, "plan", watched)
    beginning = [(7 * i) % 50 + 3 for i in range(48)]
    prompts = [beginning, *(beginning + [5 + i] * (3 * i + 1) for i in range(3)), [9, 8, 7]]
    greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    found = []
    for more in ({}, {"triton_attention_cascade": True}):
        llm = tiny_llm(attention_backend="triton", triton_attention_split_tile_size=16, **more)
        counts.clear()
        found.append([done.token_ids for done in llm.generate(prompts, greedy)])
        assert (max(counts) > 0) == bool(more)
    assert found[0] == found[1]


def test_not_in_a_deterministic_run(tiny_llm: Callable[..., fwk.LLM]) -> None:
    with pytest.raises(ConfigError, match=r"--triton-attention-cascade .* leave it or --enable-deterministic"):
        tiny_llm(
            attention_backend="triton",
            triton_attention_cascade=True,
            enable_deterministic_inference=True,
            device="cpu",
        )


@pytest.mark.sweep
@pytest.mark.parametrize(
    "variant",
    [
        "90 bf16 plain full",
        "gfx942 bf16 fp8 full",
        *(
            pytest.param(f"{target} {dtype} {form} {kind}", marks=pytest.mark.sweep)
            for target in ("80", "90", "100", "gfx942")
            for dtype, form, kind in (("bf16", "plain", "full"), ("fp16", "fp8", "full"), ("bf16", "plain", "latent"))
            if f"{target} {dtype} {form}" != "90 bf16 plain" or kind == "latent"
        ),
    ],
)
def test_machine_code(variant: str) -> None:
    target = variant.split()[0]
    code = next(code for code in compiled(*variant.split(), "shared") if code["name"] == "attend_tiles")
    # Triton 3.6 keeps one number of a thread in local memory there.
    most = int(variant == "100 fp16 fp8 full" and is_triton_before("3.9"))
    assert max(code["local_loads"], code["local_stores"]) <= most, code
    assert code["matrix_products"] > 0
    assert code["shared"] <= {"80": 163, "90": 227, "100": 227, "gfx942": 64}[target] * 1024
