"""One layer's attention, backends in turns, for shapes of steps that serving meets.

    python -m benchmarks.cpu_kernels [--backends torch,cpu] [--repeat 15] [--heads 9,3,64] [--layers 8]
                                     [--kv-cache-dtype int8] [--clock cpu]

Minima of all calls. Every layer has a cache of its own, so that K and V come from memory as in a model. Rates are the
last backend's: multiply-adds of what is seen, counted as two operations, and the bytes of K and V of the sequences'
tokens. ``--clock cpu`` counts this thread's processor time, for machines that others use too; it needs
OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
import torch

from fwk.interfaces.attention import AttentionContext, AttentionLayer
from fwk.interfaces.device import DeviceContext
from fwk.plugins import discover, find, load_object
from fwk.types import ForwardBatch
from fwk.types.batch import KVGroup
from fwk.worker.kv.kv_cache import allocate
from fwk_devices.cpu.device import Cpu
from fwk_native.thread_pool import ThreadPool

BLOCK = 16
STEPS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "decode, 1 x 128": ([128], [1]),
    "decode, 1 x 1024": ([1024], [1]),
    "decode, 1 x 4096": ([4096], [1]),
    "decode, 1 x 7900": ([7900], [1]),
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
SHARED = 1024
SHARING = {"decode, 8 x 1056, 1024 of them shared": ([1056] * 8, [1] * 8)}


def make_batch(pasts: Sequence[int], num_new: Sequence[int], shared: int = 0) -> ForwardBatch:
    """Sequences whose blocks lie in no order; the first ``shared`` tokens are in the same blocks."""
    lens = np.array(pasts, np.int32) + np.array(num_new, np.int32)
    counts = -(-lens // BLOCK)
    ids = np.random.default_rng(0).permutation(int(counts.sum())).astype(np.int32)
    table = np.zeros((len(lens), int(counts.max())), np.int32)
    for row, part in zip(table, np.split(ids, np.cumsum(counts)[:-1]), strict=True):
        row[: len(part)] = part
    table[:, : shared // BLOCK] = table[0, : shared // BLOCK]
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
        logits_indices=torch.from_numpy(starts[1:].astype(np.int64) - 1),
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
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--heads", default="9,3,64")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    arguments = parser.parse_args()
    names, dtype = arguments.backends.split(","), getattr(torch, arguments.dtype)
    heads, kv_heads, size = map(int, arguments.heads.split(","))
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    plugins = discover()
    context = AttentionContext(torch.device("cpu"), dtype, arguments.kv_cache_dtype, BLOCK, threads=ThreadPool())
    backends = {name: load_object(find(plugins, "attention", name))(context) for name in names}
    print(f"{torch.get_num_threads()} threads, {arguments.dtype}, K/V {arguments.kv_cache_dtype}; ms (minima)\n")
    print("| step |" + "".join(f" {name} | plan |" for name in names) + f" {names[0]} / {names[-1]} | GFLOP/s | GB/s |")
    print("| --- |" + " --- | --- |" * len(names) + " --- | --- | --- |")
    for label, (pasts, num_new) in (STEPS | SHARING).items():
        batch = make_batch(pasts, num_new, SHARED if label in SHARING else 0)
        qkv = torch.randn(sum(num_new), heads + 2 * kv_heads, size).to(dtype)
        q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
        q, k = q.contiguous(), k.contiguous()  # as rotated ones are
        runs = {}
        for name, backend in backends.items():
            layers = [AttentionLayer(i, heads, kv_heads, size, size**-0.5) for i in range(arguments.layers)]
            num_blocks = int(batch.kv_groups[0].block_table_np.max()) + 1
            allocate(backend, [layers], num_blocks, Cpu(DeviceContext()), context.device)
            runs[name] = (backend, layers)
        best = {name: [float("inf")] * 2 for name in names}
        with torch.inference_mode():
            for _ in range(arguments.repeat):
                for name, (backend, layers) in runs.items():
                    started = clock()
                    batch.plan = backend.plan(batch, layers)
                    planned = clock()
                    for layer in layers:
                        backend.forward(q, k, v, layer, batch)
                    best[name][0] = min(best[name][0], (clock() - planned) / len(layers))
                    best[name][1] = min(best[name][1], planned - started)
        cells = "".join(f" {1e3 * forward:.3f} | {1e3 * plan:.3f} |" for forward, plan in best.values())
        seconds = best[names[-1]][0]
        seen = sum(past * new + new * (new + 1) / 2 for past, new in zip(pasts, num_new, strict=True))
        tokens = sum(pasts) + sum(num_new) - (SHARED * (len(pasts) - 1) if label in SHARING else 0)
        bytes_each = runs[names[-1]][1][0].kv_cache[0].nbytes / BLOCK
        rates = f" {4e-9 * heads * size * seen / seconds:.0f} | {1e-9 * bytes_each * tokens / seconds:.1f} |"
        print(f"| {label} |{cells} {best[names[0]][0] / seconds:.2f} |{rates}", flush=True)


if __name__ == "__main__":
    main()
