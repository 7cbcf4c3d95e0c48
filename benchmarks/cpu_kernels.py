"""Attention backends side by side: one layer's forward pass, in turns, minima of many.

    python -m benchmarks.cpu_kernels [--backends torch,cpu] [--repeat 15] [--dtype bfloat16]

The shapes are SmolLM2-135M's: 9 query heads, 3 KV heads, 64 numbers each. Times include storing K and V, not the plan,
which a step makes once for all layers and which is shown by itself.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from fwk.interfaces.attention import AttentionContext, AttentionLayer
from fwk.plugins import discover, find, load_object
from fwk.types import ForwardBatch
from fwk.types.batch import KVGroup

BLOCK = 16
STEPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "decode, 1 x 128": ([128], [1]),
    "decode, 1 x 1024": ([1024], [1]),
    "decode, 1 x 4096": ([4096], [1]),
    "decode, 8 x 1024": ([1024] * 8, [1] * 8),
    "decode, 32 x 128": ([128] * 32, [1] * 32),
    "decode, 32 x 16 to 512": (list(range(16, 528, 16)), [1] * 32),
    "decode, 128 x 256": ([256] * 128, [1] * 128),
    "prompt of 128": ([0], [128]),
    "prompts, 8 x 128": ([0] * 8, [128] * 8),
    "prompt of 2048": ([0], [2048]),
    "chunk of 512 after 3000": ([3000], [512]),
    "mixed: 1 x 256 new, 16 x 256": ([0, *[256] * 16], [256, *[1] * 16]),
    "drafts, 8 x 5 after 300": ([300] * 8, [5] * 8),
}


def make_batch(pasts: Sequence[int], num_new: Sequence[int]) -> ForwardBatch:
    """Sequences whose blocks lie in no order."""
    lens = np.array(pasts, np.int32) + np.array(num_new, np.int32)
    counts = -(-lens // BLOCK)
    ids = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
    table = np.zeros((len(lens), int(counts.max())), np.int32)
    for row, part in zip(table, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    starts = np.concatenate([[0], np.cumsum(num_new)]).astype(np.int32)
    places = np.concatenate([np.arange(p, p + n) for p, n in zip(pasts, num_new, strict=True)]).astype(np.int64)
    owner = np.repeat(np.arange(len(lens)), num_new)
    slots = table[owner, places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
    group = KVGroup(torch.from_numpy(slots), torch.from_numpy(table), slots, table)
    return ForwardBatch(
        token_ids=torch.zeros(len(places), dtype=torch.int64),
        positions=torch.from_numpy(places),
        query_start=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(lens),
        logits_at=torch.from_numpy(starts[1:].astype(np.int64) - 1),
        kv_groups=[group],
        query_start_np=starts,
        seq_lens_np=lens,
        is_decode=max(num_new) == 1,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default="torch,cpu")
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--heads", default="9,3,64")
    arguments = parser.parse_args()
    names, dtype = arguments.backends.split(","), getattr(torch, arguments.dtype)
    heads, kv_heads, size = map(int, arguments.heads.split(","))
    plugins = discover()
    context = AttentionContext(torch.device("cpu"), dtype, "auto", BLOCK)
    backends = {name: load_object(find(plugins, "attention", name))(context) for name in names}
    print(f"{torch.get_num_threads()} threads, {arguments.dtype}; ms for one layer, and for the plan (minima)\n")
    print("| step |" + "".join(f" {name} | plan |" for name in names) + f" {names[0]} / {names[-1]} |")
    print("| --- |" + " --- | --- |" * len(names) + " --- |")
    for label, (pasts, num_new) in STEPS.items():
        batch = make_batch(pasts, num_new)
        tokens = sum(num_new)
        qkv = torch.randn(tokens, heads + 2 * kv_heads, size).to(dtype)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        q, k = q.contiguous(), k.contiguous()  # as rotated ones are
        runs = {}
        for name, backend in backends.items():
            layer = AttentionLayer(0, heads, kv_heads, size, size**-0.5)
            form = backend.block_format(layer.kv_spec)
            num_blocks = int(batch.kv_groups[0].block_table_np.max()) + 1
            layer.kv_cache = torch.randn(num_blocks, *form.block_shape).to(form.dtype)
            runs[name] = (backend, layer)
        best = {name: [float("inf")] * 2 for name in names}
        with torch.inference_mode():
            for _ in range(arguments.repeat):
                for name, (backend, layer) in runs.items():
                    started = time.perf_counter()
                    batch.plan = backend.plan(batch, [layer])
                    planned = time.perf_counter()
                    for _ in range(3):
                        at = time.perf_counter()
                        backend.forward(q, k, v, layer, batch)
                        best[name][0] = min(best[name][0], time.perf_counter() - at)
                    best[name][1] = min(best[name][1], planned - started)
        cells = "".join(f" {1e3 * forward:.3f} | {1e3 * plan:.3f} |" for forward, plan in best.values())
        print(f"| {label} |{cells} {best[names[0]][0] / best[names[-1]][0]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
