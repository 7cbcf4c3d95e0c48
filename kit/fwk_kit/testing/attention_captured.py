"""Decode steps as a graph replays them: kernels that were launched once, on buffers filled anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fwk.interfaces.attention import CaptureSizes
from fwk.plugins import Registered
from fwk.types import ForwardBatch
from fwk.types.batch import KVGroup
from fwk_kit.testing.attention_cases import RELATIVE, TOLERANCE, Cached, Shape, block_tables, reference

STEPS: tuple[tuple[int, ...], ...] = ((20, 5, 0, 600), (16, 40), (1,), (300, 300, 15, 7), (1100, 31, 33))
"""Tokens before each sequence's next; steps of fewer than ``NUM_SEQS`` sequences are padded."""

CHAINS: tuple[tuple[int, ...], ...] = ((20, 3), (0, 1), (597, 4), (15, 2))
"""Tokens before a sequence's next, and how many rows the step has of it: a token, and drafts in a chain."""

NUM_SEQS = 4
MAX_LEN = 1280


class Replayed:
    """One captured size: what was launched while it was captured is launched again, with the plan of that time."""

    def __init__(self, item: Registered, shape: Shape, num_blocks: int, rows_per_seq: int = 1) -> None:
        self.cached = Cached(item, shape, num_blocks + 1, features=frozenset({"graph_capture"}))
        self._null = num_blocks
        self._width = -(-MAX_LEN // shape.block_size)
        sizes = CaptureSizes(NUM_SEQS, MAX_LEN, num_blocks + 1, num_blocks, rows_per_seq)
        self.cached.backend.init_capture(self.cached.layers, CaptureSizes(NUM_SEQS, MAX_LEN, 2 * num_blocks, 0))
        self.cached.backend.init_capture(self.cached.layers, sizes)  # which is all that counts
        self._tensors = {
            "slot_mapping": torch.zeros(NUM_SEQS, dtype=torch.int64),
            "block_table": torch.zeros(NUM_SEQS, self._width, dtype=torch.int32),
            "positions": torch.zeros(NUM_SEQS, dtype=torch.int64),
            "seq_lens": torch.zeros(NUM_SEQS, dtype=torch.int32),
        }
        self.captured = self._batch((), ())
        self.captured.plan = self.cached.backend.plan_static(self.captured, self.cached.layers)
        assert self.captured.plan is not None, "the buffers are too small for rows of padding alone"

    def step(
        self, pasts: Sequence[int], tables: Sequence[Sequence[int]], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        """Run a step of as many sequences or fewer: q, k, v of all rows, of which the last are padding."""
        batch = self._batch(pasts, tables)
        backend, layer = self.cached.backend, self.cached.layer
        plan = backend.plan_static(batch, self.cached.layers)
        assert plan is not None, "the buffers are too small"
        return backend.forward(q, k, None if self.cached.shape.value_head_size else v, layer, self.captured)

    def _batch(self, pasts: Sequence[int], tables: Sequence[Sequence[int]]) -> ForwardBatch:
        """The inputs, where they always are."""
        padding, size = NUM_SEQS - len(pasts), self.cached.shape.block_size
        lens = np.array([*(past + 1 for past in pasts), *[1] * padding], np.int32)
        table = np.full((NUM_SEQS, self._width), self._null, np.int32)
        for row, ids in zip(table, tables, strict=False):
            row[: len(ids)] = ids
        positions = lens.astype(np.int64) - 1
        slots = table[np.arange(NUM_SEQS), positions // size].astype(np.int64) * size + positions % size
        values = {"slot_mapping": slots, "block_table": table, "positions": positions, "seq_lens": lens}
        for name, array in values.items():
            self._tensors[name].copy_(torch.from_numpy(array))
        starts, each = np.arange(NUM_SEQS + 1, dtype=np.int32), torch.arange(NUM_SEQS)
        group = KVGroup(self._tensors["slot_mapping"], self._tensors["block_table"], slots, table)
        return ForwardBatch(
            token_ids=torch.zeros(NUM_SEQS, dtype=torch.int64),
            positions=self._tensors["positions"],
            query_start=torch.from_numpy(starts),
            seq_lens=self._tensors["seq_lens"],
            logits_indices=each,
            kv_groups=[group],
            query_start_np=starts,
            seq_lens_np=lens,
            is_decode=True,
            padding=padding,
            is_static=True,
        )


@torch.inference_mode()
def check_replays(item: Registered, shape: Shape) -> None:
    """Every step of ``STEPS`` gets the reference's numbers, and those of ``plan`` to the bit."""
    lens = [[past + 1 for past in pasts] for pasts in STEPS]
    num_blocks = max(sum(-(-n // shape.block_size) for n in step) for step in lens) + 1
    replayed = Replayed(item, shape, num_blocks)
    cached = replayed.cached
    for pasts, ends in zip(STEPS, lens, strict=True):
        tables = block_tables(ends, shape.block_size)
        k, v = ([cached.tokens(n, shape.num_kv_heads) for n in ends] for _ in "kv")
        longer = [i for i, past in enumerate(pasts) if past]
        cached.step(
            [0] * len(longer),
            [pasts[i] for i in longer],
            [tables[i] for i in longer],
            torch.cat([k[i][:-1] for i in longer]),
            torch.cat([v[i][:-1] for i in longer]),
        )
        new_k, new_v = (torch.cat([x[-1:] for x in each]) for each in (k, v))
        q, eager = cached.step(pasts, [1] * len(pasts), tables, new_k, new_v)
        rest = NUM_SEQS - len(pasts)
        padded = [torch.cat((x, torch.full((rest, *x.shape[1:]), 3.0, dtype=x.dtype))) for x in (q, new_k, new_v)]
        out = replayed.step(pasts, tables, padded[0], padded[1], padded[2])[: len(pasts)]
        for i, past in enumerate(pasts):
            expected = reference(q[i : i + 1], k[i], v[i], past, shape)
            torch.testing.assert_close(
                out[i : i + 1].double(), expected, atol=TOLERANCE[shape.dtype], rtol=RELATIVE[shape.dtype]
            )
        assert torch.equal(out, eager), "a replay gives other numbers than the step computed operator by operator"


@torch.inference_mode()
def check_replayed_chains(item: Registered, shape: Shape) -> None:
    """Rows that are one sequence's next token and drafts: each reads what those before it store in the same step."""
    ends = [past + count for past, count in CHAINS]
    num_blocks = -(-max(ends) // shape.block_size) + 2
    replayed = Replayed(item, shape, num_blocks, NUM_SEQS)
    cached = replayed.cached
    for (past, count), end in zip(CHAINS, ends, strict=True):
        (table,) = block_tables([end], shape.block_size)
        k, v = (cached.tokens(end, shape.num_kv_heads) for _ in "kv")
        if past:
            cached.step([0], [past], [table], k[:past], v[:past])
        q = cached.tokens(NUM_SEQS, shape.num_heads)
        rest = NUM_SEQS - count
        new_k, new_v = (torch.cat((x[past:], torch.full((rest, *x.shape[1:]), 3.0, dtype=x.dtype))) for x in (k, v))
        out = replayed.step(range(past, end), [table] * count, q, new_k, new_v)[:count]
        expected = reference(q[:count], k, v, past, shape)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[shape.dtype], rtol=RELATIVE[shape.dtype])
