"""What ``AttentionSuite`` is made of: shapes, steps, a cache around a backend, and attention written out in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, KVKind
from fwk.interfaces.declaration import Facts
from fwk.plugins import Registered, load_object
from fwk.plugins.selection import plugin_options
from fwk_kit.testing.batches import block_tables, make_batch, sees
from fwk_native.thread_pool import ThreadPool

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02}
RELATIVE = {"float32": 0.0, "bfloat16": 0.004}  # the outcome itself is rounded to 8 bits
KV_DTYPES = ("auto", "int8", "fp8_e4m3")
FEATURES = frozenset(
    {
        "sliding_window",
        "soft_cap",
        "graph_capture",
        "tree_mask",
        "latent",
        "sinks",
        "alibi_slopes",
        "chunk_size",
        "distance_bias",
        "cross_attention",
        "kv_groups",
        "a word nobody knows",
    }
)


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
    has_sinks: bool = False
    has_slopes: bool = False
    chunk_size: int | None = None
    has_biases: bool = False  # by distance
    is_cross: bool = False

    @property
    def features(self) -> frozenset[str]:
        wanted = {"sliding_window": self.sliding_window, "soft_cap": self.soft_cap, "latent": self.value_head_size}
        wanted |= {name: True for name in self.extras()} | {"cross_attention": self.is_cross}
        return frozenset(name for name, value in wanted.items() if value)

    def extras(self) -> dict[str, torch.Tensor]:
        """Constants of the layer by name, the same for every shape alike."""
        found: dict[str, torch.Tensor] = {}
        if self.has_sinks:
            found["sinks"] = torch.linspace(-1.0, 3.0, self.num_heads)
        if self.has_slopes:
            found["alibi_slopes"] = 2.0 ** -torch.arange(1.0, self.num_heads + 1)
        if self.chunk_size is not None:
            found["chunk_size"] = torch.tensor(self.chunk_size)
        if self.has_biases:
            found["distance_bias"] = torch.linspace(-2.0, 1.0, self.num_heads * 17).view(self.num_heads, 17)
        return found

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
            extras=self.extras(),
            needs=frozenset({"cross_attention"} if self.is_cross else ()),
        )


EXTRAS = {
    "sinks": Shape(has_sinks=True),
    "sinks, window": Shape(has_sinks=True, sliding_window=10),
    "slopes": Shape(has_slopes=True),
    "slopes, every head its own K/V": Shape(num_heads=3, num_kv_heads=3, has_slopes=True),
    "chunks": Shape(chunk_size=24),
    "chunks smaller than a block": Shape(chunk_size=5),
    "biases by distance": Shape(has_biases=True),
    "biases by distance, every head its own K/V": Shape(num_heads=3, num_kv_heads=3, has_biases=True),
    "all of them": Shape(6, 2, 16, 8, sliding_window=14, soft_cap=4.0, has_sinks=True, has_slopes=True, chunk_size=20),
}


def build(
    registered: Registered, shape: Shape, features: frozenset[str] = frozenset(), *, is_deterministic: bool = False
) -> AttentionBackend:
    """The backend, or a skip with its own sentence when it does not serve this shape."""
    facts = Facts(
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        head_size=shape.head_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        block_size=shape.block_size,
        features=shape.features | features,
        is_deterministic=is_deterministic,
    )
    refusal = registered.declaration.refusal(facts)
    if refusal is not None:
        pytest.skip(f"{registered.name} {refusal}")
    dtype = DTYPES[shape.dtype]
    options = plugin_options(registered, {})
    context = AttentionContext(
        torch.device("cpu"),
        dtype,
        shape.kv_dtype,
        shape.block_size,
        options,
        ThreadPool(),
        is_deterministic=is_deterministic,
    )
    return load_object(registered)(context)


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
        is_deterministic: bool = False,
    ) -> None:
        self.shape = shape
        self.dtype = DTYPES[shape.dtype]
        self.backend = build(registered, shape, features, is_deterministic=is_deterministic)
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
    extras = shape.extras()
    out = torch.zeros((*q.shape[:2], v.shape[-1]), dtype=torch.float64)
    for i in range(n):
        seen = np.concatenate([np.ones(past, bool), tree[i]])
        if shape.sliding_window is not None:
            seen &= positions > positions[past + i] - shape.sliding_window
        if shape.chunk_size is not None:
            seen &= positions // shape.chunk_size == positions[past + i] // shape.chunk_size
        keys = torch.from_numpy(np.flatnonzero(seen))
        for head in range(shape.num_heads):
            scores = k[keys, head // group] @ q[i, head].double() * shape.head_size**-0.5
            if shape.soft_cap is not None:
                scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
            if shape.has_slopes:
                scores += float(extras["alibi_slopes"][head]) * torch.from_numpy(positions - positions[past + i])[keys]
            if shape.has_biases:
                behind = torch.from_numpy(positions[past + i] - positions)[keys].clamp(max=16)
                scores += extras["distance_bias"][head][behind]
            weights = scores.exp()
            total = weights.sum() + (float(extras["sinks"][head].double().exp()) if shape.has_sinks else 0.0)
            out[i, head] = (weights / total) @ v[keys, head // group]
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


TREES: dict[str, tuple[list[int], list[list[int] | None]]] = {
    "siblings": ([20], [[-1, 0, 0, 0]]),
    "nothing before": ([0], [[-1, 0, 0, 1, 2]]),
    "two levels": ([33], [[-1, 0, 0, 1, 1, 2, 2]]),
    "a chain": ([15], [[-1, 0, 1, 2, 3]]),
    "several": ([50, 18, 70, 31], [[-1, 0, 0, 2, 1], [-1], [-1, 0, 0, 1, 1, 2, 2, 3], [-1, 0, 1]]),
    "alongside decode and prompt": ([40, 9, 0, 30], [[-1, 0, 0, 1], [-1], None, None]),
    "large": ([37], [[-1, *[i // 3 for i in range(29)]]]),
}
