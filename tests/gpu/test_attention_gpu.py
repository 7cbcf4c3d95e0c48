"""The attention contract's core on a CUDA device, for every backend that runs there."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fwk.interfaces.attention import AttentionContext
from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import Registered, build, choose
from fwk_kit.testing.attention_cases import STEPS, TREES, Shape, reference
from fwk_kit.testing.base import installed
from fwk_kit.testing.batches import block_tables, make_batch

PLUGINS = installed()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SHAPES = {
    "half": Shape(8, 2, 64, dtype="bfloat16"),
    "window": Shape(8, 2, 128, sliding_window=10, dtype="bfloat16"),
    "cap": Shape(4, 4, 64, soft_cap=5.0, dtype="bfloat16"),
    "float32": Shape(6, 2, 80),
    "int8": Shape(8, 2, 64, dtype="bfloat16", kv_dtype="int8"),
    "fp8": Shape(8, 2, 64, dtype="bfloat16", kv_dtype="fp8_e4m3"),
    "latent": Shape(16, 1, 576, dtype="bfloat16", value_head_size=512),
}


def run(
    registered: Registered,
    shape: Shape,
    pasts: Sequence[int],
    num_new: Sequence[int],
    parents: Sequence[Sequence[int] | None] | None = None,
) -> None:
    features = shape.features | (frozenset() if parents is None else frozenset({"tree_mask"}))
    facts = Facts(
        host=Host("cuda", torch.cuda.get_device_capability()),
        dtype=shape.dtype,
        kv_dtype=shape.kv_dtype,
        head_size=shape.head_size,
        features=features,
    )
    refusal = registered.declaration.refusal(facts)
    if refusal is not None:
        pytest.skip(f"{registered.name} {refusal}")
    choose(PLUGINS, "attention", registered.name, facts)
    dtype = getattr(torch, shape.dtype)
    backend = build(registered, AttentionContext(torch.device("cuda"), dtype, shape.kv_dtype, shape.block_size))
    layer = shape.layer()
    lens = [p + n for p, n in zip(pasts, num_new, strict=True)]
    tables = block_tables(lens, shape.block_size)
    form = backend.block_format(layer.kv_spec)
    size = (sum(map(len, tables)) + 1, *form.block_shape[:-1], form.block_shape[-1] * form.dtype.itemsize)
    layer.kv_cache = torch.full(size, 255, dtype=torch.uint8, device="cuda").view(form.dtype)
    random = torch.Generator().manual_seed(0)

    def tokens(count: int, heads: int) -> torch.Tensor:
        return torch.randn(count, heads, shape.head_size, generator=random).to(dtype)

    keys, values = ([tokens(n, shape.num_kv_heads) for n in lens] for _ in "kv")

    def step(before: Sequence[int], count: Sequence[int], tree: Sequence[Sequence[int] | None] | None) -> list:
        chosen = [i for i, n in enumerate(count) if n]
        q = tokens(sum(count), shape.num_heads)
        batch = make_batch(
            [before[i] for i in chosen],
            [count[i] for i in chosen],
            [tables[i] for i in chosen],
            block_size=shape.block_size,
            parents=tree,
            device="cuda",
        )
        parts = [torch.cat([x[i][before[i] : before[i] + count[i]] for i in chosen]).cuda() for x in (keys, values)]
        with torch.inference_mode():
            batch.plan = backend.plan(batch, [layer])
            out = backend.forward(q.cuda(), parts[0], None if shape.value_head_size else parts[1], layer, batch)
        return [q, out.cpu()]

    if any(pasts):
        step([0] * len(pasts), pasts, None)
    q, out = step(pasts, num_new, parents)
    expected = [
        reference(query, key, value, past, shape, tree)
        for query, key, value, past, tree in zip(
            q.split(list(num_new)), keys, values, pasts, parents or [None] * len(lens), strict=True
        )
    ]
    tolerance = 2e-5 if shape.dtype == "float32" else 0.04
    torch.testing.assert_close(out.double(), torch.cat(expected), atol=tolerance, rtol=0.004)


@pytest.mark.parametrize("registered", PLUGINS.family("attention"), ids=lambda item: item.name)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("name", ["decode, lengths far apart", "everything", "long chunk"])
def test_steps(registered: Registered, shape: Shape, name: str) -> None:
    run(registered, shape, *STEPS[name])


@pytest.mark.parametrize("registered", PLUGINS.family("attention"), ids=lambda item: item.name)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_tree(registered: Registered, shape: Shape) -> None:
    pasts, parents = TREES["alongside decode and prompt"]
    run(registered, shape, pasts, [25 if tree is None else len(tree) for tree in parents], parents)
