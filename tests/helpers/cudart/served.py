"""The FlashInfer adapter for one layer of a shape, over the runtime without a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fwk.interfaces.attention import AttentionContext
from fwk_attention.flashinfer import FlashInferOptions
from fwk_kit.testing.attention_cases import Shape, block_tables
from fwk_kit.testing.batches import make_batch
from tests.helpers import cudart

if TYPE_CHECKING:
    from fwk_attention.flashinfer.backend import FlashInferBackend

BLOCK = 16


class Served:
    """A backend, and its steps. prompt_kernel: of FlashInfer, as on a device that has it."""

    def __init__(self, runtime: cudart.Runtime, shape: Shape, num_blocks: int, prompt_kernel: str = "fa2") -> None:
        from fwk_attention.flashinfer.backend import FlashInferBackend
        from fwk_attention.flashinfer.wrappers import Wrappers

        self.runtime, self.shape, self.layer = runtime, shape, shape.layer()
        cpu = torch.device("cpu")
        self.backend: FlashInferBackend = FlashInferBackend(
            AttentionContext(cpu, torch.bfloat16, shape.kv_dtype, BLOCK, FlashInferOptions())
        )
        self.backend._wrappers = Wrappers(cpu, self.backend._kv_dtype, cudart.Event, prompt_kernel)
        form = self.backend.block_format(self.layer.kv_spec)
        self.layer.kv_cache = torch.zeros((num_blocks, *form.block_shape), dtype=form.dtype)
        runtime.launches()

    def plan(self, pasts: Sequence[int], num_new: Sequence[int], parents: Any = None) -> Any:
        """Plan a step of sequences with so many tokens before it, and in it; parents: of trees of drafts."""
        lens = [past + n for past, n in zip(pasts, num_new, strict=True)]
        self.batch = make_batch(pasts, num_new, block_tables(lens, BLOCK), block_size=BLOCK, parents=parents)
        self.batch.plan = self.backend.plan(self.batch, [self.layer])
        return self.batch.plan

    def launch(self) -> list[cudart.Launched]:
        """What the layer launches, copies and torch's own aside."""
        tokens, shape = int(self.batch.query_start_np[-1]), self.shape
        q = torch.zeros(tokens, shape.num_heads, shape.head_size, dtype=torch.bfloat16)
        k = torch.zeros(tokens, shape.num_kv_heads, shape.head_size, dtype=torch.bfloat16)
        out = self.backend.forward(q, k, None if shape.value_head_size else k, self.layer, self.batch)
        assert out.shape == (tokens, shape.num_heads, shape.value_head_size or shape.head_size)
        return self.runtime.launches()


STEPS = {
    "decode": ([5, 100, 1000], [1, 1, 1]),
    "one": ([63], [1]),
    "prompts": ([0, 40], [100, 20]),
    "mixed": ([5, 100, 0, 300], [1, 1, 70, 33]),
    "drafts": ([20, 300], [4, 3]),
}
"""Tokens before a step, and in it."""
TREE = [[-1, 0, 0, 1, 2], [-1, 0, 1, 1, 0]]
