"""What every attention backend must do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fwk.interfaces.attention import AttentionBackend, AttentionBackendSpec, AttentionLayer, Turn
from fwk.interfaces.declaration import DETERMINISTIC, Facts
from fwk.plugins import Registered
from fwk_kit.testing.attention_captured import check_replayed_chains, check_replays
from fwk_kit.testing.attention_cases import (
    EXTRAS,
    FEATURES,
    KV_DTYPES,
    RELATIVE,
    STEPS,
    TOLERANCE,
    TREES,
    Cached,
    Shape,
    build,
    check,
    reference,
)
from fwk_kit.testing.batches import block_tables, make_batch
from fwk_kit.testing.served import ServedSuite

WINDOWS = (1, 10, 16, 40)
HEADS = [(1, 1), (2, 2), (3, 1), (9, 3), (8, 1), (16, 4), (40, 2)]
SIZES = (16, 64, 80, 128)
LATENT = Shape(3, 1, 48, value_head_size=32)
QUANTISED = ("one decode", "drafts", "everything")


def turned(qkv: torch.Tensor, turn: Turn, num_heads: int) -> torch.Tensor:
    """What a backend is to make of q and k, in float64, rounded where operators round; v as it is."""
    num_turned = (qkv.shape[1] + num_heads) // 2
    x, dtype = qkv[:, :num_turned].double(), qkv.dtype
    if turn.weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + turn.eps).sqrt()
        x = x if turn.rounds_last else x.to(dtype).double()
        x = (x * turn.weight.double()).to(dtype).double()
    swapped = torch.cat(x.chunk(2, -1)[::-1], -1)
    x = (x * turn.cos.double()).to(dtype).double() + swapped * turn.sin.double()
    return torch.cat((x.to(dtype), qkv[:, num_turned:]), 1)


class AttentionSuite(ServedSuite):
    """Numbers against float64, over every shape the declaration offers; shapes it does not offer are skipped."""

    family = "attention"
    interface = AttentionBackend

    def exercise(self, item: Registered) -> None:
        check(item, Shape(), *STEPS["one decode"])

    def test_what_is_not_declared_is_refused(self, item: Registered) -> None:
        """A run that needs an ability, a format or a size the declaration lacks gets a sentence, not wrong numbers."""
        spec = item.declaration
        assert isinstance(spec, AttentionBackendSpec)
        sizes, blocks = spec.head_sizes or (32,), spec.block_sizes or (16,)
        fits = Facts(dtype=spec.dtypes[0], head_size=sizes[0], block_size=blocks[0])
        for feature in FEATURES - spec.features:
            assert spec.refusal(replace(fits, features=frozenset({feature}))), f"{feature}: not declared, not refused"
        for kv_dtype in {*KV_DTYPES, "fp4"} - set(spec.kv_dtypes):
            assert spec.refusal(replace(fits, kv_dtype=kv_dtype)), f"K/V as {kv_dtype} is neither declared nor refused"
        for dtype in {"float32", "bfloat16", "float16"} - set(spec.dtypes):
            assert spec.refusal(replace(fits, dtype=dtype)), f"{dtype} is neither declared nor refused"
        if spec.head_sizes is not None:
            assert spec.refusal(replace(fits, head_size=max(spec.head_sizes) + 1))
        if spec.block_sizes is not None:
            assert spec.refusal(replace(fits, block_size=max(spec.block_sizes) + 1))

    @pytest.mark.parametrize(
        ("name", "dtype"), [(name, "float32") for name in STEPS] + [(name, "bfloat16") for name in list(STEPS)[1::2]]
    )
    def test_equals_the_reference(self, item: Registered, name: str, dtype: str) -> None:
        check(item, Shape(dtype=dtype), *STEPS[name])

    @pytest.mark.parametrize(
        ("name", "window"), [(name, WINDOWS[(i + i // 4 + j) % 4]) for i, name in enumerate(STEPS) for j in (0, 2)]
    )
    def test_sliding_window(self, item: Registered, name: str, window: int) -> None:
        check(item, Shape(sliding_window=window), *STEPS[name])

    @pytest.mark.parametrize(
        ("heads", "size"), [(heads, SIZES[(i + j) % 4]) for i, heads in enumerate(HEADS) for j in (0, 1)], ids=str
    )
    def test_head_counts_and_sizes(self, item: Registered, heads: tuple[int, int], size: int) -> None:
        shape = Shape(num_heads=heads[0], num_kv_heads=heads[1], head_size=size)
        check(item, shape, [20, 5, 0, 17], [1, 3, 18, 20])

    @pytest.mark.parametrize("block_size", [1, 8, 32, 128])
    def test_block_sizes(self, item: Registered, block_size: int) -> None:
        check(item, Shape(block_size=block_size), [20, 31, 0, 17], [1, 1, 18, 20])

    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_narrow_window_in_a_wide_block(self, item: Registered, dtype: str) -> None:
        """Nearly all keys of the only block are hidden from every query."""
        check(item, Shape(block_size=1024, sliding_window=3, dtype=dtype), [600, 40], [12, 1])

    @pytest.mark.parametrize("seed", range(8))
    def test_random_steps(self, item: Registered, seed: int) -> None:
        random = np.random.default_rng(seed)
        count = int(random.integers(1, 9))
        pasts = (random.integers(0, 120, count) * random.integers(0, 2, count)).tolist()
        num_new = np.where(random.random(count) < 0.5, 1, random.integers(1, 60, count)).tolist()
        kv_heads = int(random.integers(1, 4))
        shape = Shape(
            num_heads=kv_heads * int(random.integers(1, 9)),
            num_kv_heads=kv_heads,
            head_size=int(random.choice([16, 32, 64])),
            block_size=int(random.choice([4, 16, 32])),
            sliding_window=int(random.integers(1, 80)) if seed % 3 == 0 else None,
            dtype="bfloat16" if seed % 4 == 3 else "float32",
        )
        check(item, shape, pasts, num_new, seed)

    @pytest.mark.parametrize("own", [1, 5, 40])
    def test_reads_blocks_filled_in_the_same_step(self, item: Registered, own: int) -> None:
        """The second sequence continues after two blocks that the first, later in the batch or earlier, fills now."""
        shape = Shape()
        prefix, rest = 32, 20
        shared, tail, other = block_tables([prefix, rest, own], shape.block_size)
        for first_is_owner in (True, False):
            cached = Cached(item, shape, 12)
            k, v = cached.tokens(prefix + rest + own, 2), cached.tokens(prefix + rest + own, 2)
            pasts, num_new, tables = [0, prefix], [prefix + rest, own], [shared + tail, shared + other]
            order = [0, 1] if first_is_owner else [1, 0]
            new_k, new_v = k.split(num_new), v.split(num_new)
            q, out = cached.step(
                [pasts[i] for i in order],
                [num_new[i] for i in order],
                [tables[i] for i in order],
                torch.cat([new_k[i] for i in order]),
                torch.cat([new_v[i] for i in order]),
            )
            at = order.index(1)
            mine = slice(0, own) if at == 0 else slice(prefix + rest, None)
            expected = reference(
                q[mine], torch.cat((k[:prefix], new_k[1])), torch.cat((v[:prefix], new_v[1])), prefix, shape
            )
            torch.testing.assert_close(out[mine].double(), expected, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    @pytest.mark.parametrize("num_new", [[1] * 6, [1, 4, 2, 1, 1, 3]], ids=["decode", "drafts"])
    def test_a_prefix_that_sequences_share(self, item: Registered, num_new: list[int], kv_dtype: str) -> None:
        """Sequences with the same leading blocks, some of them for longer than others, alongside two without."""
        shape, prefix = Shape(kv_dtype=kv_dtype, block_size=32, head_size=16), 544
        shared, pasts = [544, 544, 544, 288, 0, 0], [544, 575, 700, 300, 300, 15]
        lens = [past + n for past, n in zip(pasts, num_new, strict=True)]
        tables = block_tables(lens, shape.block_size)
        tables = [tables[0][: n // 32] + table[n // 32 :] for n, table in zip(shared, tables, strict=True)]
        cached = Cached(item, shape, sum(map(len, tables)) + 1)
        keys, values = ([cached.tokens(n, 2) for n in lens] for _ in "kv")
        for kept in (keys, values):
            for x, n in zip(kept, shared, strict=True):
                x[:n] = kept[0][:n]
        cached.step([0], [prefix], tables[:1], keys[0][:prefix], values[0][:prefix])
        rest = [i for i, past in enumerate(pasts) if past > shared[i]]
        own = [torch.cat([kept[i][shared[i] : pasts[i]] for i in rest]) for kept in (keys, values)]
        cached.step(
            [shared[i] for i in rest], [pasts[i] - shared[i] for i in rest], [tables[i] for i in rest], own[0], own[1]
        )
        new = [torch.cat([x[past:] for x, past in zip(kept, pasts, strict=True)]) for kept in (keys, values)]
        q, out = cached.step(pasts, num_new, tables, new[0], new[1])
        parts = zip(q.split(num_new), keys, values, pasts, strict=True)
        expected = torch.cat([reference(query, key, value, past, shape) for query, key, value, past in parts])
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)

    def test_sequences_do_not_disturb_their_neighbours(self, item: Registered) -> None:
        """A sequence gets the same numbers alongside others as alone, even alongside one that is broken."""
        shape = Shape()
        lens = [50, 700, 30]
        tables = block_tables(lens, shape.block_size)
        keys = [torch.randn(n, 2, 32, generator=torch.Generator().manual_seed(n)) for n in lens]
        keys[2].fill_(float("nan"))
        outputs: list[torch.Tensor] = []
        for chosen in ([0], [0, 1, 2]):
            cached = Cached(item, shape, 60)
            pasts, mine = [lens[i] - 1 for i in chosen], [tables[i] for i in chosen]
            past = torch.cat([keys[i][:-1] for i in chosen])
            cached.step([0] * len(chosen), pasts, mine, past, past)
            last = torch.cat([keys[i][-1:] for i in chosen])
            cached.random.manual_seed(3)  # the same query first in both steps
            outputs.append(cached.step(pasts, [1] * len(chosen), mine, last, last)[1])
        torch.testing.assert_close(outputs[1][0], outputs[0][0], atol=1e-6, rtol=0)
        assert outputs[1][1].isfinite().all()

    def test_writes_only_its_slots(self, item: Registered) -> None:
        """Full blocks of others stay as they are, to the bit."""
        shape = Shape()
        tables = block_tables([64, 40], shape.block_size)
        cached = Cached(item, shape, 20, is_dirty=False)
        k = cached.tokens(64, 2)
        cached.step([0], [64], tables[:1], k, k)
        assert cached.layer.kv_cache is not None
        before = cached.layer.kv_cache[tables[0]].clone()
        k = cached.tokens(40, 2)
        cached.step([0], [40], tables[1:], k, k)
        assert torch.equal(cached.layer.kv_cache[tables[0]], before)

    def test_decoding_keeps_what_the_block_held(self, item: Registered) -> None:
        """Tokens one at a time over several blocks: each sees all before it."""
        shape = Shape(block_size=4)
        tables = block_tables([11], 4)
        cached = Cached(item, shape, 8)
        k, v = cached.tokens(11, 2), cached.tokens(11, 2)
        for i in range(11):
            q, out = cached.step([i], [1], tables, k[i : i + 1], v[i : i + 1])
            torch.testing.assert_close(
                out.double(), reference(q, k[: i + 1], v[: i + 1], i, shape), atol=2e-5, rtol=0, msg=f"token {i}"
            )

    def test_a_block_used_before_is_as_good_as_new(self, item: Registered) -> None:
        """What an earlier owner left in a block, even NaN, changes nothing for the next."""
        shape = Shape()
        tables = block_tables([20], shape.block_size)
        cached = Cached(item, shape, 4)
        bad = torch.full((20, 2, shape.head_size), float("nan"))
        cached.step([0], [20], tables, bad, bad)
        k, v = cached.tokens(18, 2), cached.tokens(18, 2)
        cached.step([0], [17], tables, k[:17], v[:17])
        q, out = cached.step([17], [1], tables, k[17:], v[17:])
        torch.testing.assert_close(out.double(), reference(q, k, v, 17, shape), atol=2e-5, rtol=0)

    def test_large_scores_in_half_precision(self, item: Registered) -> None:
        """Scores around 100, as attention sinks have: rounding them to 8 bits would move weights by a third."""
        shape = Shape(dtype="bfloat16", head_size=64)
        lens = [600, 590]
        tables = block_tables(lens, shape.block_size)
        cached = Cached(item, shape, 100)
        direction = torch.ones(64) * 3.0
        keys = [(cached.tokens(n, 2) * 0.2 + direction).to(torch.bfloat16) for n in lens]
        values = [cached.tokens(n, 2) for n in lens]
        cached.step(
            [0, 0],
            [n - 1 for n in lens],
            tables,
            torch.cat([x[:-1] for x in keys]),
            torch.cat([x[:-1] for x in values]),
        )
        q = (cached.tokens(2, 4) * 0.3 + direction).to(torch.bfloat16)
        cached.tokens = lambda count, heads: q  # type: ignore[method-assign]
        last_k, last_v = torch.cat([x[-1:] for x in keys]), torch.cat([x[-1:] for x in values])
        _, out = cached.step([n - 1 for n in lens], [1, 1], tables, last_k, last_v)
        for i, n in enumerate(lens):
            expected = reference(q[i : i + 1], keys[i], values[i], n - 1, shape)
            torch.testing.assert_close(out[i : i + 1].double(), expected, atol=0.01, rtol=0)

    def test_two_backends_do_not_disturb_each_other(self, item: Registered) -> None:
        shape = Shape()
        one, two = Cached(item, shape, 8), Cached(item, shape, 8)
        tables = block_tables([30], shape.block_size)
        k1, k2 = one.tokens(30, 2), two.tokens(30, 2) * 2
        one.step([0], [29], tables, k1[:29], k1[:29])
        two.step([0], [29], tables, k2[:29], k2[:29])
        for cached, k in ((one, k1), (two, k2)):
            q, out = cached.step([29], [1], tables, k[29:], k[29:])
            torch.testing.assert_close(out.double(), reference(q, k, k, 29, shape), atol=2e-5, rtol=0)

    def test_a_narrowed_layer_stores_all_and_has_what_is_wanted(self, item: Registered) -> None:
        """Prompts and a chunk, of which few tokens' outcomes are read: to the bit those of a layer that has all."""
        cached = Cached(item, Shape(), 40, is_dirty=False, num_layers=2)
        whole, narrowed = cached.layers
        narrowed.is_pruned = True
        lens = [70, 3, 40]
        batch = make_batch([0, 70, 0], lens, block_tables([70, 73, 40], 16))
        k, v, q = cached.tokens(113, 2), cached.tokens(113, 2), cached.tokens(113, 4)
        for wanted in ([69, 70, 72], [0], list(range(113))):
            batch.hidden_indices = torch.tensor(wanted)
            with torch.inference_mode():
                batch.plan = cached.backend.plan(batch, cached.layers)
                outs = [cached.backend.forward(q, k, v, layer, batch) for layer in (whole, narrowed)]
            assert torch.equal(*(out[batch.hidden_indices] for out in outs))
            assert whole.kv_cache is not None
            assert narrowed.kv_cache is not None
            assert torch.equal(whole.kv_cache, narrowed.kv_cache)

    def test_layers_of_different_kinds_share_a_step(self, item: Registered) -> None:
        """A layer with a window and one without, planned together."""
        cached = Cached(item, Shape(sliding_window=5), 8)
        full = Shape()
        layer = AttentionLayer(1, 4, 2, 32, 32**-0.5)
        assert cached.layer.kv_cache is not None
        layer.kv_cache = torch.zeros_like(cached.layer.kv_cache)
        tables = block_tables([24], 16)
        k, v, q = cached.tokens(24, 2), cached.tokens(24, 2), cached.tokens(24, 4)
        batch = make_batch([0], [24], tables)
        with torch.inference_mode():
            batch.plan = cached.backend.plan(batch, [cached.layer, layer])
            windowed = cached.backend.forward(q, k, v, cached.layer, batch)
            whole = cached.backend.forward(q, k, v, layer, batch)
        torch.testing.assert_close(windowed.double(), reference(q, k, v, 0, cached.shape), atol=2e-5, rtol=0)
        torch.testing.assert_close(whole.double(), reference(q, k, v, 0, full), atol=2e-5, rtol=0)

    def test_layers_with_block_tables_of_their_own(self, item: Registered) -> None:
        """Two layers share a tensor, in different blocks; behind the window a table may name another sequence's."""
        shape = Shape(sliding_window=5)
        cached = Cached(item, shape, 9, features=frozenset({"kv_groups"}))
        full, windowed = AttentionLayer(0, 4, 2, 32, 32**-0.5), cached.layer
        full.kv_cache, windowed.kv_group, windowed.index = windowed.kv_cache, 1, 1
        tables, others = [[1, 5, 3], [2]], [[4, 6, 8], [7]]
        keys, values = ([[cached.tokens(n, 2) for n in (44, 8)] for _ in range(2)] for _ in range(2))
        for pasts, num_new in (([0, 0], [38, 6]), ([38, 6], [5, 1]), ([43, 7], [1, 1])):
            batch = make_batch(pasts, num_new, tables)
            batch.kv_groups += make_batch(pasts, num_new, others).kv_groups
            q, outs = cached.tokens(sum(num_new), 4), list[torch.Tensor]()
            ends = [past + n for past, n in zip(pasts, num_new, strict=True)]
            with torch.inference_mode():
                batch.plan = cached.backend.plan(batch, [full, windowed])
                for layer, k, v in zip((full, windowed), keys, values, strict=True):
                    new = [torch.cat([y[p:e] for y, p, e in zip(x, pasts, ends, strict=True)]) for x in (k, v)]
                    outs.append(cached.backend.forward(q, new[0], new[1], layer, batch))
            for layer, out, k, v in zip((Shape(), shape), outs, keys, values, strict=True):
                parts = zip(q.split(num_new), k, v, pasts, ends, strict=True)
                expected = torch.cat([reference(x, y[:e], z[:e], past, layer) for x, y, z, past, e in parts])
                torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)
            others[0][0] = 0  # nothing sees it any more, and what is there are no numbers

    @pytest.mark.parametrize("cap", [0.5, 5.0])
    @pytest.mark.parametrize("dtype", TOLERANCE)
    def test_soft_cap(self, item: Registered, cap: float, dtype: str) -> None:
        check(item, Shape(soft_cap=cap, dtype=dtype), *STEPS["everything"])
        check(item, Shape(soft_cap=cap, dtype=dtype, sliding_window=10), *STEPS["drafts and decode"])

    @pytest.mark.parametrize("dtype", TOLERANCE)
    @pytest.mark.parametrize("shape", EXTRAS.values(), ids=EXTRAS.keys())
    def test_layers_with_extras(self, item: Registered, shape: Shape, dtype: str) -> None:
        """Sinks, slopes and chunks, alone, together and with windows, drafts and trees."""
        shape = replace(shape, dtype=dtype)
        check(item, shape, *STEPS["everything"])
        check(item, shape, *STEPS["drafts and decode"])
        check(item, shape, *STEPS["prompts"])
        check(item, shape, [20], [4], parents=[[-1, 0, 0, 2]])

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    @pytest.mark.parametrize("num_queries", [(1, 1, 1), (1, 40, 3)])
    def test_cross_attention(self, item: Registered, num_queries: tuple[int, ...], kv_dtype: str) -> None:
        """Queries see all keys, which are others' and were stored in this step or the one before."""
        shape = Shape(is_cross=True, kv_dtype=kv_dtype)
        layer, encoded = shape.layer(), [40, 7, 16]
        backend = build(item, shape)
        form = backend.block_format(layer.kv_spec)
        layer.kv_cache = torch.zeros((16, *form.block_shape), dtype=form.dtype)
        tables = block_tables(encoded)
        draw = torch.Generator().manual_seed(0)
        k, v = (torch.randn(sum(encoded), shape.num_kv_heads, shape.head_size, generator=draw) for _ in range(2))
        stored = make_batch([0] * 3, encoded, tables).kv_groups[0].slot_mapping_np
        for first in (0, 40):  # the first sequence's keys are stored by the first step alone
            batch = make_batch([0] * 3, num_queries, [[*table, 0, 0, 0] for table in tables])
            lens = np.array(encoded if first else [40, 1, 1], np.int32)
            slots = stored[40:] if first else stored[:40]
            batch.seq_lens_np, batch.seq_lens = lens, torch.from_numpy(lens)
            group = batch.kv_groups[0]
            group.slot_mapping_np, group.slot_mapping = slots, torch.from_numpy(slots)
            batch.plan = backend.plan(batch, [layer])
            q = torch.randn(sum(num_queries), shape.num_heads, shape.head_size, generator=draw)
            kept = slice(40, None) if first else slice(0, 40)
            out = backend.forward(q, k[kept], v[kept], layer, batch)
        for queries, found, keys, values in zip(
            q.split(num_queries), out.split(num_queries), k.split(encoded), v.split(encoded), strict=True
        ):
            for query, one in zip(queries, found, strict=True):
                wanted = reference(query.unsqueeze(0), keys, values, len(keys) - 1, shape)
                torch.testing.assert_close(one.double(), wanted[0], atol=2e-5, rtol=0)

    @pytest.mark.parametrize("window", [None, 2, 6, 30])
    @pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
    def test_tree(self, item: Registered, tree: tuple[list[int], list[list[int] | None]], window: int | None) -> None:
        """A window counts depths: with one of 2, a grandchild sees itself and its parent, wherever that is stored."""
        pasts, parents = tree
        num_new = [25 if tree is None else len(tree) for tree in parents]
        check(item, Shape(sliding_window=window), pasts, num_new, parents=parents)

    @pytest.mark.parametrize("seed", range(6))
    def test_random_trees(self, item: Registered, seed: int) -> None:
        random = np.random.default_rng(seed)
        sizes = random.integers(1, 24, 3).tolist()
        parents = [[-1, *(int(random.integers(0, i)) for i in range(1, n))] for n in sizes]
        shape = Shape(
            num_heads=6,
            num_kv_heads=int(random.choice([1, 2, 3])),
            head_size=16,
            block_size=4,
            sliding_window=int(random.integers(1, 40)) if seed % 2 else None,
            kv_dtype=KV_DTYPES[seed % 3],
            dtype="bfloat16" if seed == 5 else "float32",
            soft_cap=3.0 if seed == 4 else None,
        )
        check(item, shape, random.integers(0, 40, 3).tolist(), sizes, seed, parents)

    @pytest.mark.parametrize("name", QUANTISED)
    @pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
    def test_quantised_kv(self, item: Registered, name: str, kv_dtype: str) -> None:
        check(item, Shape(kv_dtype=kv_dtype), *STEPS[name])
        check(item, Shape(kv_dtype=kv_dtype, sliding_window=10, dtype="bfloat16"), *STEPS[name])

    @pytest.mark.parametrize("size", [18, 80])
    @pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
    def test_quantised_kv_of_odd_sizes(self, item: Registered, size: int, kv_dtype: str) -> None:
        check(item, Shape(kv_dtype=kv_dtype, head_size=size, block_size=5), [20, 5, 0, 17], [1, 3, 18, 20])

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    @pytest.mark.parametrize("name", ["decode batch", "drafts", "everything", "long chunk"])
    def test_latent(self, item: Registered, name: str, kv_dtype: str) -> None:
        """One row per token serves as key (whole) and as value (its first part)."""
        check(item, Shape(4, 1, 40, value_head_size=32, kv_dtype=kv_dtype), *STEPS[name])

    @pytest.mark.parametrize("sizes", [(24, 16), (36, 36), (80, 64)], ids=str)
    def test_latent_sizes(self, item: Registered, sizes: tuple[int, int]) -> None:
        shape = Shape(3, 1, sizes[0], value_head_size=sizes[1], sliding_window=12, soft_cap=4.0)
        check(item, shape, [20, 5, 0, 17], [1, 3, 18, 20])
        check(item, replace(shape, dtype="bfloat16", soft_cap=None), [20, 5], [4, 1], parents=[[-1, 0, 0, 2], [-1]])

    @pytest.mark.parametrize(("heads", "size"), [((4, 2), 32), ((3, 1), 80)], ids=str)
    @pytest.mark.parametrize("rounds_last", [None, False, True], ids=["no norm", "norm", "norm that rounds last"])
    @pytest.mark.parametrize("form", [("float32", x) for x in KV_DTYPES] + [("bfloat16", "auto")], ids=str)
    def test_turned(
        self, item: Registered, form: tuple[str, str], rounds_last: bool | None, heads: tuple[int, int], size: int
    ) -> None:
        """Queries and keys that the backend normalises and rotates: as if they came so; prompts and next tokens."""
        shape = Shape(*heads, size, dtype=form[0], kv_dtype=form[1])
        tables = block_tables([21, 6], shape.block_size)
        mine, given = (Cached(item, shape, sum(map(len, tables)) + 1, is_dirty=False) for _ in range(2))
        if not mine.backend.turns:
            pytest.skip(f"{item.name} turns nothing: its turns is False")
        for pasts, num_new in (([0, 0], [20, 5]), ([20, 5], [1, 1])):
            count = sum(num_new)
            qkv, angles = mine.tokens(count, heads[0] + 2 * heads[1]), mine.tokens(count, 1)[..., : size // 2]
            cos, sin = angles.cos(), angles.sin()
            turn = Turn(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
            if rounds_last is not None:
                weight = mine.tokens(1, heads[0] + heads[1])[0].to(torch.float32 if rounds_last else mine.dtype)
                turn = replace(turn, weight=weight, eps=1e-5, rounds_last=rounds_last)
            q, k, v = turned(qkv, turn, heads[0]).split((heads[0], heads[1], heads[1]), 1)
            batch = make_batch(pasts, num_new, tables, block_size=shape.block_size)
            with torch.inference_mode():
                batch.plan = given.backend.plan(batch, given.layers)
                wanted = given.backend.forward(q, k, v, given.layer, batch)
                batch.plan = mine.backend.plan(batch, mine.layers)
                found = mine.backend.forward_turned(qkv, mine.layer, batch, turn)
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            atol = TOLERANCE[shape.dtype] if shape.kv_dtype == "auto" else 0.02  # a last bit may round to another code
            torch.testing.assert_close(found, wanted, atol=atol, rtol=RELATIVE[shape.dtype])
            if form == ("float32", "auto"):
                torch.testing.assert_close(mine.layer.kv_cache, given.layer.kv_cache, atol=1e-5, rtol=1e-5)

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_chunks_make_no_difference(self, item: Registered, kv_dtype: str) -> None:
        """The same tokens whole, in chunks and one by one: the same bytes in the cache and the same output."""
        shape = Shape(kv_dtype=kv_dtype)
        (table,) = block_tables([40], shape.block_size)
        source = Cached(item, shape, 8, is_dirty=False)
        k, v, q = source.tokens(40, 2), source.tokens(40, 2), source.tokens(40, 4)
        outputs, caches = [], []
        for chunks in ([40], [20, 20], [3, 30, 7], [25] + [1] * 15):
            cached = Cached(item, shape, 8, is_dirty=False)
            parts, past = [], 0
            for n in chunks:
                now = slice(past, past + n)
                cached.tokens = lambda count, heads, now=now: q[now]  # type: ignore[method-assign]
                parts.append(cached.step([past], [n], [table], k[now], v[now])[1])
                past += n
            outputs.append(torch.cat(parts))
            caches.append(cached.layer.kv_cache)
        for out, cache in zip(outputs[1:], caches[1:], strict=True):
            torch.testing.assert_close(out, outputs[0], atol=1e-5, rtol=0)
            assert torch.equal(cache, caches[0])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_bits_do_not_depend_on_chunks(self, item: Registered, kv_dtype: str, dtype: str) -> None:
        """Where ``deterministic`` is offered: a long sequence whole, in chunks, by one token and alongside another."""
        if DETERMINISTIC not in item.declaration.offers:
            pytest.skip(f"{item.name} does not have {DETERMINISTIC} among its offers")
        shape, length = Shape(8, 2, dtype=dtype, kv_dtype=kv_dtype), 600
        tables = block_tables([length, 40], shape.block_size)
        source = Cached(item, shape, 1, is_deterministic=True)
        k, v, q = source.tokens(length, 2), source.tokens(length, 2), source.tokens(length, 8)
        outputs: list[torch.Tensor] = []
        for chunks in ([length], [length - 7, 3, 1, 1, 1, 1], [256, 5, 200, 16, 1, length - 478], [17] * 35 + [5]):
            cached, parts, past = Cached(item, shape, 48, is_deterministic=True), [], 0
            for n in chunks:
                now, beside = slice(past, past + n), past in (256, 477)
                more = 40 if beside else 0
                both = [torch.cat([x[now], x[:more]]) for x in (q, k, v)]
                cached.tokens = lambda count, heads, given=both[0]: given  # type: ignore[method-assign]
                new, pasts = ([n, more], [past, 0]) if beside else ([n], [past])
                parts.append(cached.step(pasts, new, tables[: len(new)], both[1], both[2])[1][:n])
                past += n
            outputs.append(torch.cat(parts))
        for out in outputs[1:]:
            assert torch.equal(out, outputs[0])

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.filterwarnings("ignore:(invalid|overflow).*encountered:RuntimeWarning")  # kernels run by numpy
    def test_a_broken_number_is_not_lost(self, item: Registered, kv_dtype: str, bad: float) -> None:
        """One bad number in one value: whoever sees it notices, and nobody else."""
        shape = Shape(kv_dtype=kv_dtype)
        tables = block_tables([20, 20], shape.block_size)
        cached = Cached(item, shape, 6)
        k, v = cached.tokens(40, 2), cached.tokens(40, 2)
        v[5, 0, 3] = bad
        q, out = cached.step([0, 0], [20, 20], tables, k, v)
        expected = reference(q[20:], k[20:], v[20:], 0, shape)
        torch.testing.assert_close(out[20:].double(), expected, atol=2e-5, rtol=0)
        _, out = cached.step([20, 20], [1, 1], [[*t, 5] for t in tables], k[:2], v[:2])
        assert not out[0].isfinite().all()
        assert out[1].isfinite().all()

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_rows_of_zeros(self, item: Registered, kv_dtype: str) -> None:
        cached = Cached(item, Shape(kv_dtype=kv_dtype), 4)
        zeros = torch.zeros(10, 2, 32)
        _, out = cached.step([0], [10], block_tables([10]), zeros, zeros)
        assert torch.equal(out, torch.zeros_like(out))

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    @pytest.mark.parametrize("latent", [0, 24])
    def test_move_after_a_tree(self, item: Registered, kv_dtype: str, latent: int) -> None:
        """The accepted path becomes consecutive, in every layer; the next step sees it and nothing else."""
        shape = Shape(4, 1 if latent else 2, 32, 4, kv_dtype=kv_dtype, value_head_size=latent)
        past, parents = 13, [-1, 0, 0, 2, 2, 4, 3]
        path = [0, 2, 4, 5]
        cached = Cached(item, shape, 9, features=frozenset({"tree_mask"}), num_layers=2)
        tables = block_tables([past + len(parents)], 4)
        steps = [(cached.tokens(past + len(parents), shape.num_kv_heads) for _ in "kv") for _ in cached.layers]
        kept = []
        for layer, (k, v) in zip(cached.layers, steps, strict=True):
            cached.step([0], [past], tables, k[:past], v[:past], layer=layer)
            cached.step([past], [len(parents)], tables, k[past:], v[past:], [parents], layer=layer)
            chosen = [*range(past), *(past + i for i in path)]
            kept.append((k[chosen], v[chosen]))
        places = np.array([past + i for i in range(len(parents))])
        slots = torch.from_numpy(np.array(tables[0])[places // 4] * 4 + places % 4)
        cached.backend.move(cached.layers, slots[path], slots[: len(path)])
        for layer, (k, v) in zip(cached.layers, kept, strict=True):
            new_k, new_v = cached.tokens(2, shape.num_kv_heads), cached.tokens(2, shape.num_kv_heads)
            q, out = cached.step([past + len(path)], [2], tables, new_k, new_v, layer=layer)
            expected = reference(q, torch.cat((k, new_k)), torch.cat((v, new_v)), past + len(path), shape)
            torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)

    @pytest.mark.parametrize("shift", [1, -1])
    def test_move_is_all_at_once(self, item: Registered, shift: int) -> None:
        """Slots that are both source and target, in either direction."""
        shape = Shape(block_size=4)
        (table,) = block_tables([12], 4)
        cached = Cached(item, shape, 5, features=frozenset({"tree_mask"}))
        k, v = cached.tokens(12, 2), cached.tokens(12, 2)
        cached.step([0], [12], [table], k, v)
        slots = torch.tensor([table[i // 4] * 4 + i % 4 for i in range(12)])
        source = torch.arange(1, 10)
        target = source + shift
        cached.backend.move(cached.layers, slots[source], slots[target])
        k[target], v[target] = k[source], v[source]
        new_k, new_v = cached.tokens(1, 2), cached.tokens(1, 2)
        q, out = cached.step([11], [1], [table], new_k, new_v)
        expected = reference(q, torch.cat((k[:11], new_k)), torch.cat((v[:11], new_v)), 11, shape)
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)

    @pytest.mark.parametrize(
        "shape",
        [Shape(), Shape(sliding_window=10, soft_cap=5.0), Shape(dtype="bfloat16", kv_dtype="fp8_e4m3"), LATENT],
        ids=["plain", "window", "fp8 K/V", "latent"],
    )
    def test_captured_decode_steps(self, item: Registered, shape: Shape) -> None:
        """What was launched once serves steps of other lengths, blocks and padding (``graph_capture``)."""
        check_replays(item, shape)

    @pytest.mark.parametrize("shape", [Shape(), Shape(sliding_window=10), LATENT], ids=["plain", "window", "latent"])
    def test_captured_chains_of_drafts(self, item: Registered, shape: Shape) -> None:
        """Rows of a captured step that are one sequence's token and drafts (``graph_capture``)."""
        check_replayed_chains(item, shape)

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_a_block_is_all_there_is(self, item: Registered, kv_dtype: str) -> None:
        """Blocks copied byte by byte to other places serve a sequence there: scales travel with them."""
        shape = Shape(kv_dtype=kv_dtype)
        cached = Cached(item, shape, 12)
        k, v = cached.tokens(33, 2), cached.tokens(33, 2)
        cached.step([0], [32], [[1, 2]], k[:32], v[:32])
        cache = cached.layer.kv_cache
        assert cache is not None
        cache[[7, 5]] = cache[[1, 2]].clone()
        cache[[1, 2]] = torch.full_like(cache.view(torch.uint8)[[1, 2]], 255).view(cache.dtype)
        q, out = cached.step([32], [1], [[7, 5, 3]], k[32:], v[32:])
        torch.testing.assert_close(out.double(), reference(q, k, v, 32, shape), atol=2e-5, rtol=0)

    @pytest.mark.parametrize("kv_dtype", KV_DTYPES)
    def test_a_head_has_the_same_bytes_without_others(self, item: Registered, kv_dtype: str) -> None:
        """Where ``BlockFormat.head_dim`` says which dimension counts K/V heads: other ranks read parts of it."""
        both = Cached(item, Shape(kv_dtype=kv_dtype), 4, is_dirty=False)
        head_dim = both.backend.block_format(both.layer.kv_spec).head_dim
        if head_dim is None:
            pytest.skip(f"{item.name} does not tell K/V heads apart")
        k, v = both.tokens(32, 2), both.tokens(32, 2)
        both.step([0], [32], [[1, 2]], k, v)
        for head in range(2):
            one = Cached(item, Shape(num_heads=2, num_kv_heads=1, kv_dtype=kv_dtype), 4, is_dirty=False)
            one.step([0], [32], [[1, 2]], k[:, head : head + 1], v[:, head : head + 1])
            found, wanted = both.layer.kv_cache, one.layer.kv_cache
            assert found is not None
            assert wanted is not None
            mine = found.narrow(head_dim + 1, head, 1).contiguous()
            assert torch.equal(mine.view(torch.uint8), wanted.view(torch.uint8))
