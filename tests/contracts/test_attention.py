"""What every attention backend must do, against attention written out in float64 one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tests.helpers.batches import block_tables, make_batch

from fwk.errors import PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer
from fwk.interfaces.declaration import Facts
from fwk.plugins import Registered, choose, discover, load_object

pytestmark = pytest.mark.usefixtures("one_thread")

PLUGINS = discover()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02}


def backends() -> list[Registered]:
    return PLUGINS.family("attention")


@dataclass
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    sliding_window: int | None = None
    dtype: str = "float32"


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: one thread computes them fastest."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=backends(), ids=lambda item: item.name)
def registered(request: pytest.FixtureRequest) -> Registered:
    return request.param


def build(registered: Registered, shape: Shape) -> AttentionBackend:
    """The backend, or a skip with its own sentence when it does not serve this shape."""
    features = frozenset({"sliding_window"}) if shape.sliding_window else frozenset[str]()
    facts = Facts(
        dtype=shape.dtype,
        head_size=shape.head_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        features=features,
    )
    try:
        choose(PLUGINS, "attention", registered.name, facts)
    except PluginError as error:
        pytest.skip(str(error))
    dtype = DTYPES[shape.dtype]
    return load_object(registered)(AttentionContext(torch.device("cpu"), dtype, dtype, shape.block_size))


class Cached:
    """One layer of a backend with its cache, beside the K and V that each sequence ought to see."""

    def __init__(self, registered: Registered, shape: Shape, num_blocks: int, fill: float = float("nan")) -> None:
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]
        self.backend = build(registered, shape)
        self.layer = AttentionLayer(
            0, shape.num_heads, shape.num_kv_heads, shape.head_size, shape.head_size**-0.5, shape.sliding_window
        )
        form = self.backend.block_format(self.layer.kv_spec)
        # The cache is full of NaN: a backend may read no slot that nobody has written.
        self.layer.kv_cache = torch.full((num_blocks, *form.block_shape), fill, dtype=form.dtype)
        self.random = torch.Generator().manual_seed(7)

    def tokens(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self.shape.head_size, generator=self.random).mul_(1.5).to(self.dtype)

    def step(
        self, pasts: Sequence[int], num_new: Sequence[int], tables: list[list[int]], k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step with given K and V of the new tokens and random queries: (queries, output)."""
        q = self.tokens(sum(num_new), self.shape.num_heads)
        batch = make_batch(pasts, num_new, tables, block_size=self.shape.block_size)
        with torch.inference_mode():
            batch.plan = self.backend.plan(batch, [self.layer])
            out = self.backend.forward(q, k, v, self.layer, batch)
        assert out.shape == q.shape
        assert out.dtype == q.dtype
        return q, out


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: int, shape: Shape) -> torch.Tensor:
    """q: [n, heads, size] at positions past, past + 1, ...; k, v: [past + n, kv_heads, size]. Float64."""
    group = shape.num_heads // shape.num_kv_heads
    out = torch.zeros(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        first = 0 if shape.sliding_window is None else max(0, past + i + 1 - shape.sliding_window)
        for head in range(shape.num_heads):
            keys = k[first : past + i + 1, head // group].double()
            weights = torch.softmax(keys @ q[i, head].double() * shape.head_size**-0.5, 0)
            out[i, head] = weights @ v[first : past + i + 1, head // group].double()
    return out


def check(registered: Registered, shape: Shape, pasts: Sequence[int], num_new: Sequence[int], seed: int = 0) -> None:
    """Fill the pasts in one step, then compare the next step with the reference."""
    lens = [p + n for p, n in zip(pasts, num_new, strict=True)]
    tables = block_tables(lens, shape.block_size, seed=seed)
    cached = Cached(registered, shape, sum(map(len, tables)) + 1)
    keys = [cached.tokens(n, shape.num_kv_heads) for n in lens]
    values = [cached.tokens(n, shape.num_kv_heads) for n in lens]
    with_past = [i for i, past in enumerate(pasts) if past]
    if with_past:
        cached.step(
            [0] * len(with_past),
            [pasts[i] for i in with_past],
            [tables[i] for i in with_past],
            torch.cat([keys[i][: pasts[i]] for i in with_past]),
            torch.cat([values[i][: pasts[i]] for i in with_past]),
        )
    k = torch.cat([x[past:] for x, past in zip(keys, pasts, strict=True)])
    v = torch.cat([x[past:] for x, past in zip(values, pasts, strict=True)])
    q, out = cached.step(pasts, num_new, tables, k, v)
    expected = [
        reference(query, *kv, past, shape)
        for query, kv, past in zip(q.split(list(num_new)), zip(keys, values, strict=True), pasts, strict=True)
    ]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=TOLERANCE[shape.dtype], rtol=0)


STEPS = {
    "one token": ([0], [1]),
    "one decode": ([37], [1]),
    "decode batch": ([5, 40, 17, 0, 31, 32], [1] * 6),
    "decode, lengths far apart": ([3, 600, 9, 300, 21, 5, 2, 60, 70, 40, 11, 12], [1] * 12),
    "long context": ([1100], [1]),
    "short prompt": ([0], [7]),
    "prompt": ([0], [45]),
    "prompts": ([0, 0, 0], [45, 3, 64]),
    "chunk after a past": ([33], [40]),
    "chunk at a block boundary": ([32], [32]),
    "long chunk": ([530], [140]),
    "drafts": ([50, 18, 0, 33], [4, 8, 2, 5]),
    "drafts and decode": ([50, 18, 70], [4, 1, 8]),
    "everything": ([0, 33, 20, 15, 0, 48, 90], [30, 1, 25, 6, 1, 16, 17]),
    "last slot of a block": ([15, 31], [1, 1]),
    "first slot of a block": ([16, 32], [1, 17]),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_equals_the_reference(registered: Registered, step: tuple[list[int], list[int]], dtype: str) -> None:
    check(registered, Shape(dtype=dtype), *step)


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("window", [1, 10, 16, 40])
def test_sliding_window(registered: Registered, step: tuple[list[int], list[int]], window: int) -> None:
    check(registered, Shape(sliding_window=window), *step)


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (3, 1), (9, 3), (8, 1), (16, 4)], ids=str)
@pytest.mark.parametrize("size", [16, 64, 80, 128])
def test_head_counts_and_sizes(registered: Registered, heads: tuple[int, int], size: int) -> None:
    shape = Shape(num_heads=heads[0], num_kv_heads=heads[1], head_size=size)
    check(registered, shape, [20, 5, 0, 17], [1, 3, 18, 20])


@pytest.mark.parametrize("block_size", [1, 8, 32, 128])
def test_block_sizes(registered: Registered, block_size: int) -> None:
    check(registered, Shape(block_size=block_size), [20, 31, 0, 17], [1, 1, 18, 20])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_narrow_window_in_a_wide_block(registered: Registered, dtype: str) -> None:
    """Nearly all keys of the only block are hidden from every query."""
    check(registered, Shape(block_size=1024, sliding_window=3, dtype=dtype), [600, 40], [12, 1])


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(registered: Registered, seed: int) -> None:
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
    check(registered, shape, pasts, num_new, seed)


@pytest.mark.parametrize("own", [1, 5, 40])
def test_reads_blocks_filled_in_the_same_step(registered: Registered, own: int) -> None:
    """The second sequence continues after two blocks that the first, later in the batch or earlier, fills now."""
    shape = Shape()
    prefix, rest = 32, 20
    shared, tail, other = block_tables([prefix, rest, own], shape.block_size)
    for first_is_owner in (True, False):
        cached = Cached(registered, shape, 12)
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


def test_sequences_do_not_disturb_their_neighbours(registered: Registered) -> None:
    """A sequence gets the same numbers beside others as alone, even beside one that is broken."""
    shape = Shape()
    lens = [50, 700, 30]
    tables = block_tables(lens, shape.block_size)
    keys = [torch.randn(n, 2, 32, generator=torch.Generator().manual_seed(n)) for n in lens]
    keys[2].fill_(float("nan"))
    outputs: list[torch.Tensor] = []
    for chosen in ([0], [0, 1, 2]):
        cached = Cached(registered, shape, 60)
        pasts, mine = [lens[i] - 1 for i in chosen], [tables[i] for i in chosen]
        past = torch.cat([keys[i][:-1] for i in chosen])
        cached.step([0] * len(chosen), pasts, mine, past, past)
        last = torch.cat([keys[i][-1:] for i in chosen])
        cached.random.manual_seed(3)  # the same query first in both steps
        outputs.append(cached.step(pasts, [1] * len(chosen), mine, last, last)[1])
    torch.testing.assert_close(outputs[1][0], outputs[0][0], atol=1e-6, rtol=0)
    assert outputs[1][1].isfinite().all()


def test_writes_only_its_slots(registered: Registered) -> None:
    """Full blocks of others stay as they are, to the bit."""
    shape = Shape()
    tables = block_tables([64, 40], shape.block_size)
    cached = Cached(registered, shape, 20, fill=0.0)
    k = cached.tokens(64, 2)
    cached.step([0], [64], tables[:1], k, k)
    assert cached.layer.kv_cache is not None
    before = cached.layer.kv_cache[tables[0]].clone()
    k = cached.tokens(40, 2)
    cached.step([0], [40], tables[1:], k, k)
    assert torch.equal(cached.layer.kv_cache[tables[0]], before)


def test_decoding_keeps_what_the_block_held(registered: Registered) -> None:
    """Tokens one at a time over several blocks: each sees all before it."""
    shape = Shape(block_size=4)
    tables = block_tables([11], 4)
    cached = Cached(registered, shape, 8)
    k, v = cached.tokens(11, 2), cached.tokens(11, 2)
    for i in range(11):
        q, out = cached.step([i], [1], tables, k[i : i + 1], v[i : i + 1])
        torch.testing.assert_close(
            out.double(), reference(q, k[: i + 1], v[: i + 1], i, shape), atol=2e-5, rtol=0, msg=f"token {i}"
        )


def test_a_block_used_before_is_as_good_as_new(registered: Registered) -> None:
    """What an earlier owner left in a block, even NaN, changes nothing for the next."""
    shape = Shape()
    tables = block_tables([20], shape.block_size)
    cached = Cached(registered, shape, 4)
    bad = torch.full((20, 2, shape.head_size), float("nan"))
    cached.step([0], [20], tables, bad, bad)
    k, v = cached.tokens(18, 2), cached.tokens(18, 2)
    cached.step([0], [17], tables, k[:17], v[:17])
    q, out = cached.step([17], [1], tables, k[17:], v[17:])
    torch.testing.assert_close(out.double(), reference(q, k, v, 17, shape), atol=2e-5, rtol=0)


def test_large_scores_in_half_precision(registered: Registered) -> None:
    """Scores around 100, as attention sinks have: rounding them to 8 bits would move weights by a third."""
    shape = Shape(dtype="bfloat16", head_size=64)
    lens = [600, 590]
    tables = block_tables(lens, shape.block_size)
    cached = Cached(registered, shape, 100)
    direction = torch.ones(64) * 3.0
    keys = [(cached.tokens(n, 2) * 0.2 + direction).to(torch.bfloat16) for n in lens]
    values = [cached.tokens(n, 2) for n in lens]
    cached.step(
        [0, 0], [n - 1 for n in lens], tables, torch.cat([x[:-1] for x in keys]), torch.cat([x[:-1] for x in values])
    )
    q = (cached.tokens(2, 4) * 0.3 + direction).to(torch.bfloat16)
    cached.tokens = lambda count, heads: q  # type: ignore[method-assign]
    last_k, last_v = torch.cat([x[-1:] for x in keys]), torch.cat([x[-1:] for x in values])
    _, out = cached.step([n - 1 for n in lens], [1, 1], tables, last_k, last_v)
    for i, n in enumerate(lens):
        expected = reference(q[i : i + 1], keys[i], values[i], n - 1, shape)
        torch.testing.assert_close(out[i : i + 1].double(), expected, atol=0.01, rtol=0)


def test_two_backends_do_not_disturb_each_other(registered: Registered) -> None:
    shape = Shape()
    one, two = Cached(registered, shape, 8), Cached(registered, shape, 8)
    tables = block_tables([30], shape.block_size)
    k1, k2 = one.tokens(30, 2), two.tokens(30, 2) * 2
    one.step([0], [29], tables, k1[:29], k1[:29])
    two.step([0], [29], tables, k2[:29], k2[:29])
    for cached, k in ((one, k1), (two, k2)):
        q, out = cached.step([29], [1], tables, k[29:], k[29:])
        torch.testing.assert_close(out.double(), reference(q, k, k, 29, shape), atol=2e-5, rtol=0)


def test_layers_of_different_kinds_share_a_step(registered: Registered) -> None:
    """A layer with a window and one without, planned together."""
    cached = Cached(registered, Shape(sliding_window=5), 8)
    full = Shape()
    layer = AttentionLayer(1, 4, 2, 32, 32**-0.5)
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
