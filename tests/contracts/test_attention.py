"""What every attention backend must do, against attention written out in float64 one token at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from tests.helpers.batches import block_tables, make_batch, sees

from fwk.errors import PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, KVKind
from fwk.interfaces.declaration import Facts
from fwk.plugins import Registered, choose, discover, load_object

pytestmark = pytest.mark.usefixtures("one_thread")

PLUGINS = discover()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02}
RELATIVE = {"float32": 0.0, "bfloat16": 0.004}  # the outcome itself is rounded to 8 bits
KV_DTYPES = ("auto", "int8", "fp8_e4m3")


def backends() -> list[Registered]:
    return PLUGINS.family("attention")


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    block_size: int = 16
    sliding_window: int | None = None
    dtype: str = "float32"
    kv_dtype: str = "auto"
    soft_cap: float | None = None
    value_head_size: int = 0  # > 0: a latent layer

    @property
    def features(self) -> frozenset[str]:
        wanted = {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap, "latent": self.value_head_size}
        return frozenset(name for name, value in wanted.items() if value)

    def layer(self, index: int = 0) -> AttentionLayer:
        return AttentionLayer(
            index,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.head_size**-0.5,
            self.sliding_window,
            self.soft_cap,
            self.value_head_size,
            KVKind.LATENT if self.value_head_size else KVKind.FULL,
        )


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


def build(registered: Registered, shape: Shape, features: frozenset[str] = frozenset()) -> AttentionBackend:
    """The backend, or a skip with its own sentence when it does not serve this shape."""
    facts = Facts(
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        head_size=shape.head_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        features=shape.features | features,
    )
    try:
        choose(PLUGINS, "attention", registered.name, facts)
    except PluginError as error:
        pytest.skip(str(error))
    dtype = DTYPES[shape.dtype]
    return load_object(registered)(AttentionContext(torch.device("cpu"), dtype, shape.kv_dtype, shape.block_size))


class Cached:
    """Layers of a backend with their caches."""

    def __init__(
        self,
        registered: Registered,
        shape: Shape,
        num_blocks: int,
        *,
        is_dirty: bool = True,
        features: frozenset[str] = frozenset(),
        num_layers: int = 1,
    ) -> None:
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]
        self.backend = build(registered, shape, features)
        self.layers = [shape.layer(i) for i in range(num_layers)]
        self.layer = self.layers[0]
        form = self.backend.block_format(self.layer.kv_spec)
        for layer in self.layers:
            # The cache is full of NaN in whatever format: a backend may read no slot that nobody has written.
            size = (num_blocks, *form.block_shape[:-1], form.block_shape[-1] * form.dtype.itemsize)
            layer.kv_cache = torch.full(size, 255 if is_dirty else 0, dtype=torch.uint8).view(form.dtype)
        self.random = torch.Generator().manual_seed(7)

    def tokens(self, count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, self.shape.head_size, generator=self.random).mul_(1.5).to(self.dtype)

    def step(
        self,
        pasts: Sequence[int],
        num_new: Sequence[int],
        tables: list[list[int]],
        k: torch.Tensor,
        v: torch.Tensor,
        parents: Sequence[Sequence[int] | None] | None = None,
        layer: AttentionLayer | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step with given K and V of the new tokens and random queries: (queries, output)."""
        q = self.tokens(sum(num_new), self.shape.num_heads)
        batch = make_batch(pasts, num_new, tables, block_size=self.shape.block_size, parents=parents)
        layer = self.layer if layer is None else layer
        with torch.inference_mode():
            batch.plan = self.backend.plan(batch, self.layers)
            out = self.backend.forward(q, k, None if self.shape.value_head_size else v, layer, batch)
        assert out.shape == (*q.shape[:2], layer.value_head_size)
        assert out.dtype == q.dtype
        return q, out


def reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    past: int,
    shape: Shape,
    parents: Sequence[int] | None = None,
) -> torch.Tensor:
    """q: [n, heads, size], the tokens after past; k, v: [past + n, kv_heads, size]. Float64."""
    n, group = q.shape[0], shape.num_heads // shape.num_kv_heads
    tree = sees(range(-1, n - 1) if parents is None else parents)
    positions = np.concatenate([np.arange(past), past + tree.sum(1) - 1])
    k, v = as_stored(k, shape.kv_dtype), as_stored(v, shape.kv_dtype)
    if shape.value_head_size:
        v = k[..., : shape.value_head_size]
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=torch.float64)
    for i in range(n):
        seen = np.concatenate([np.ones(past, bool), tree[i]])
        if shape.sliding_window is not None:
            seen &= positions > positions[past + i] - shape.sliding_window
        keys = torch.from_numpy(np.flatnonzero(seen))
        for head in range(shape.num_heads):
            scores = k[keys, head // group] @ q[i, head].double() * shape.head_size**-0.5
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            out[i, head] = torch.softmax(scores, 0) @ v[keys, head // group]
    return out


def e4m3_numbers() -> np.ndarray:
    """All finite numbers of the format by its definition: 4 bits of exponent (bias 7), 3 of mantissa, no infinity."""
    small = [mantissa * 2.0**-9 for mantissa in range(8)]
    large = [(8 + mantissa) * 2.0 ** (exponent - 10) for exponent in range(1, 16) for mantissa in range(8)]
    positive = np.array((small + large)[:-1])  # the last is NaN
    return np.concatenate([-positive[:0:-1], positive])


E4M3 = e4m3_numbers()


def as_stored(x: torch.Tensor, kv_dtype: str) -> torch.Tensor:
    """[..., head_size] as the cache holds it, scaled. Float64."""
    if kv_dtype == "auto":
        return x.double()
    numbers = x.float().numpy()
    largest = {"int8": np.float32(127), "fp8_e4m3": np.float32(448)}[kv_dtype]
    scale = np.abs(numbers).max(-1, keepdims=True) / largest
    parts = numbers / np.where(scale > 0, scale, 1)
    if kv_dtype == "int8":
        parts = np.rint(parts)
    else:
        at = np.clip(np.searchsorted(E4M3, parts), 1, len(E4M3) - 1)
        below, above = E4M3[at - 1], E4M3[at]
        down, up = parts - below, above - parts
        is_even = (at - 1 - len(E4M3) // 2) % 2 == 0  # of a tie's two, the one with the last bit clear
        parts = np.where((down < up) | ((down == up) & is_even), below, above)
    return torch.from_numpy(parts.astype(np.float64) * scale)


def check(
    registered: Registered,
    shape: Shape,
    pasts: Sequence[int],
    num_new: Sequence[int],
    seed: int = 0,
    parents: Sequence[Sequence[int] | None] | None = None,
) -> None:
    """Fill the pasts in one step, then compare the next step with the reference."""
    lens = [p + n for p, n in zip(pasts, num_new, strict=True)]
    tables = block_tables(lens, shape.block_size, seed=seed)
    features = frozenset[str]() if parents is None else frozenset({"tree_mask"})
    cached = Cached(registered, shape, sum(map(len, tables)) + 1, features=features)
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
    q, out = cached.step(pasts, num_new, tables, k, v, parents)
    expected = [
        reference(query, key, value, past, shape, tree)
        for query, key, value, past, tree in zip(
            q.split(list(num_new)), keys, values, pasts, parents or [None] * len(lens), strict=True
        )
    ]
    is_rounded = shape.dtype == "bfloat16" and shape.kv_dtype != "auto"  # a backend may compute with rounded numbers
    atol = 0.08 if is_rounded else TOLERANCE[shape.dtype]
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=atol, rtol=RELATIVE[shape.dtype])


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


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, "float32") for name in STEPS] + [(name, "bfloat16") for name in list(STEPS)[1::2]]
)
def test_equals_the_reference(registered: Registered, name: str, dtype: str) -> None:
    check(registered, Shape(dtype=dtype), *STEPS[name])


WINDOWS = (1, 10, 16, 40)
HEADS = [(1, 1), (2, 2), (3, 1), (9, 3), (8, 1), (16, 4), (40, 2)]
SIZES = (16, 64, 80, 128)


@pytest.mark.parametrize(
    ("name", "window"), [(name, WINDOWS[(i + i // 4 + j) % 4]) for i, name in enumerate(STEPS) for j in (0, 2)]
)
def test_sliding_window(registered: Registered, name: str, window: int) -> None:
    check(registered, Shape(sliding_window=window), *STEPS[name])


@pytest.mark.parametrize(
    ("heads", "size"), [(heads, SIZES[(i + j) % 4]) for i, heads in enumerate(HEADS) for j in (0, 1)], ids=str
)
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


@pytest.mark.parametrize("seed", range(8))
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


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("num_new", [[1] * 6, [1, 4, 2, 1, 1, 3]], ids=["decode", "drafts"])
def test_a_prefix_that_sequences_share(registered: Registered, num_new: list[int], kv_dtype: str) -> None:
    """Sequences with the same leading blocks, some of them for longer than others, beside two without."""
    shape, prefix = Shape(kv_dtype=kv_dtype, block_size=32, head_size=16), 544
    shared, pasts = [544, 544, 544, 288, 0, 0], [544, 575, 700, 300, 300, 15]
    lens = [past + n for past, n in zip(pasts, num_new, strict=True)]
    tables = block_tables(lens, shape.block_size)
    tables = [tables[0][: n // 32] + table[n // 32 :] for n, table in zip(shared, tables, strict=True)]
    cached = Cached(registered, shape, sum(map(len, tables)) + 1)
    keys, values = ([cached.tokens(n, 2) for n in lens] for _ in "kv")
    for kept in (keys, values):
        for x, n in zip(kept, shared, strict=True):
            x[:n] = kept[0][:n]
    cached.step([0], [prefix], tables[:1], keys[0][:prefix], values[0][:prefix])
    rest = [i for i, past in enumerate(pasts) if past > shared[i]]
    own = [torch.cat([kept[i][shared[i] : pasts[i]] for i in rest]) for kept in (keys, values)]
    cached.step([shared[i] for i in rest], [pasts[i] - shared[i] for i in rest], [tables[i] for i in rest], *own)
    new = [torch.cat([x[past:] for x, past in zip(kept, pasts, strict=True)]) for kept in (keys, values)]
    q, out = cached.step(pasts, num_new, tables, *new)
    parts = zip(q.split(num_new), keys, values, pasts, strict=True)
    expected = torch.cat([reference(query, key, value, past, shape) for query, key, value, past in parts])
    torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=0)


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
    cached = Cached(registered, shape, 20, is_dirty=False)
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


@pytest.mark.parametrize("cap", [0.5, 5.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_soft_cap(registered: Registered, cap: float, dtype: str) -> None:
    check(registered, Shape(soft_cap=cap, dtype=dtype), *STEPS["everything"])
    check(registered, Shape(soft_cap=cap, dtype=dtype, sliding_window=10), *STEPS["drafts and decode"])


TREES: dict[str, tuple[list[int], list[list[int] | None]]] = {
    "siblings": ([20], [[-1, 0, 0, 0]]),
    "nothing before": ([0], [[-1, 0, 0, 1, 2]]),
    "two levels": ([33], [[-1, 0, 0, 1, 1, 2, 2]]),
    "a chain": ([15], [[-1, 0, 1, 2, 3]]),
    "several": ([50, 18, 70, 31], [[-1, 0, 0, 2, 1], [-1], [-1, 0, 0, 1, 1, 2, 2, 3], [-1, 0, 1]]),
    "beside decode and prompt": ([40, 9, 0, 30], [[-1, 0, 0, 1], [-1], None, None]),
    "large": ([37], [[-1, *[i // 3 for i in range(29)]]]),
}


@pytest.mark.parametrize("window", [None, 2, 6, 30])
@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_tree(registered: Registered, tree: tuple[list[int], list[list[int] | None]], window: int | None) -> None:
    """A window counts depths: with one of 2, a grandchild sees itself and its parent, wherever that is stored."""
    pasts, parents = tree
    num_new = [25 if tree is None else len(tree) for tree in parents]
    check(registered, Shape(sliding_window=window), pasts, num_new, parents=parents)


@pytest.mark.parametrize("seed", range(6))
def test_random_trees(registered: Registered, seed: int) -> None:
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
    check(registered, shape, random.integers(0, 40, 3).tolist(), sizes, seed, parents)


QUANTISED = ("one decode", "drafts", "everything")


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_quantised_kv(registered: Registered, name: str, kv_dtype: str) -> None:
    check(registered, Shape(kv_dtype=kv_dtype), *STEPS[name])
    check(registered, Shape(kv_dtype=kv_dtype, sliding_window=10, dtype="bfloat16"), *STEPS[name])


@pytest.mark.parametrize("size", [18, 80])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES[1:])
def test_quantised_kv_of_odd_sizes(registered: Registered, size: int, kv_dtype: str) -> None:
    check(registered, Shape(kv_dtype=kv_dtype, head_size=size, block_size=5), [20, 5, 0, 17], [1, 3, 18, 20])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ["decode batch", "drafts", "everything", "long chunk"])
def test_latent(registered: Registered, name: str, kv_dtype: str) -> None:
    """One row per token serves as key (whole) and as value (its first part)."""
    check(registered, Shape(4, 1, 40, value_head_size=32, kv_dtype=kv_dtype), *STEPS[name])


@pytest.mark.parametrize("sizes", [(24, 16), (36, 36), (80, 64)], ids=str)
def test_latent_sizes(registered: Registered, sizes: tuple[int, int]) -> None:
    shape = Shape(3, 1, sizes[0], value_head_size=sizes[1], sliding_window=12, soft_cap=4.0)
    check(registered, shape, [20, 5, 0, 17], [1, 3, 18, 20])
    check(registered, replace(shape, dtype="bfloat16", soft_cap=None), [20, 5], [4, 1], parents=[[-1, 0, 0, 2], [-1]])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_chunks_make_no_difference(registered: Registered, kv_dtype: str) -> None:
    """The same tokens whole, in chunks and one by one: the same bytes in the cache and the same output."""
    shape = Shape(kv_dtype=kv_dtype)
    (table,) = block_tables([40], shape.block_size)
    source = Cached(registered, shape, 8, is_dirty=False)
    k, v, q = source.tokens(40, 2), source.tokens(40, 2), source.tokens(40, 4)
    outputs, caches = [], []
    for chunks in ([40], [20, 20], [3, 30, 7], [25] + [1] * 15):
        cached = Cached(registered, shape, 8, is_dirty=False)
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


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.filterwarnings("ignore:(invalid|overflow).*encountered:RuntimeWarning")  # kernels run by numpy
def test_a_broken_number_is_not_lost(registered: Registered, kv_dtype: str, bad: float) -> None:
    """One bad number in one value: whoever sees it notices, and nobody else."""
    shape = Shape(kv_dtype=kv_dtype)
    tables = block_tables([20, 20], shape.block_size)
    cached = Cached(registered, shape, 6)
    k, v = cached.tokens(40, 2), cached.tokens(40, 2)
    v[5, 0, 3] = bad
    q, out = cached.step([0, 0], [20, 20], tables, k, v)
    expected = reference(q[20:], k[20:], v[20:], 0, shape)
    torch.testing.assert_close(out[20:].double(), expected, atol=2e-5, rtol=0)
    _, out = cached.step([20, 20], [1, 1], [[*t, 5] for t in tables], k[:2], v[:2])
    assert not out[0].isfinite().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_of_zeros(registered: Registered, kv_dtype: str) -> None:
    cached = Cached(registered, Shape(kv_dtype=kv_dtype), 4)
    zeros = torch.zeros(10, 2, 32)
    _, out = cached.step([0], [10], block_tables([10]), zeros, zeros)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("latent", [0, 24])
def test_move_after_a_tree(registered: Registered, kv_dtype: str, latent: int) -> None:
    """The accepted path becomes consecutive, in every layer; the next step sees it and nothing else."""
    shape = Shape(4, 1 if latent else 2, 32, 4, kv_dtype=kv_dtype, value_head_size=latent)
    past, parents = 13, [-1, 0, 0, 2, 2, 4, 3]
    path = [0, 2, 4, 5]
    cached = Cached(registered, shape, 9, features=frozenset({"tree_mask"}), num_layers=2)
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
def test_move_is_all_at_once(registered: Registered, shift: int) -> None:
    """Slots that are both source and target, in either direction."""
    shape = Shape(block_size=4)
    (table,) = block_tables([12], 4)
    cached = Cached(registered, shape, 5, features=frozenset({"tree_mask"}))
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


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_a_block_is_all_there_is(registered: Registered, kv_dtype: str) -> None:
    """Blocks copied byte by byte to other places serve a sequence there: scales travel with them."""
    shape = Shape(kv_dtype=kv_dtype)
    cached = Cached(registered, shape, 12)
    k, v = cached.tokens(33, 2), cached.tokens(33, 2)
    cached.step([0], [32], [[1, 2]], k[:32], v[:32])
    cache = cached.layer.kv_cache
    assert cache is not None
    cache[[7, 5]] = cache[[1, 2]].clone()
    cache[[1, 2]] = torch.full_like(cache.view(torch.uint8)[[1, 2]], 255).view(cache.dtype)
    q, out = cached.step([32], [1], [[7, 5, 3]], k[32:], v[32:])
    torch.testing.assert_close(out.double(), reference(q, k, v, 32, shape), atol=2e-5, rtol=0)


def test_layers_refuse_what_no_cache_holds() -> None:
    with pytest.raises(ValueError, match="one KV head"):
        AttentionLayer(0, 4, 2, 32, 1.0, value_head_size=16, kind=KVKind.LATENT)
    with pytest.raises(ValueError, match="differ in size only in a latent layer"):
        AttentionLayer(0, 4, 2, 32, 1.0, value_head_size=16)
