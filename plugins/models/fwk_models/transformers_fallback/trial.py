"""Try on the loaded model what transformers does not declare: that a flat batch of sequences is what each is alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fwk.errors import ModelLoadError

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import ModelContext
    from fwk_models.transformers_fallback.model import TransformersModel

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Of the largest number: batches of two tokens and of one are rounded differently."""


def check_flattening(model: TransformersModel, context: ModelContext) -> None:
    """Run two one-token sequences together, then the second alone, with attention that attends to nothing.

    Queries, keys and hidden states of the second must be the same: then no convolution, recurrence or count of tokens
    ties it to its neighbour, and its position is the one given. Finds the attention layers on the way.
    """
    position = min(7, context.max_model_len - 1)
    both = torch.tensor([1, 2], device=context.device) % context.config.vocab_size
    places = torch.tensor([0, position], device=context.device)
    with model.attention.recording() as together:
        hidden = model.run(both, places)
    with model.attention.recording() as alone:
        lone = model.run(both[1:], places[1:])
    name = type(model.causal).__name__
    if not alone:
        raise ModelLoadError(f"transformers' {name} does not call its attention through AttentionInterface")
    if tuple(model.logits(lone).shape) != (1, context.config.vocab_size):
        raise ModelLoadError(f"transformers' {name} makes no logits for {context.config.vocab_size} tokens")
    pairs = [(hidden, lone)]
    for first, second in zip(together, alone, strict=True):
        pairs += zip(first, second, strict=True)
    if not all(_same(a[1:], b) for a, b in pairs):
        raise ModelLoadError(
            f"transformers' {name} cannot run on a flat batch: a token's numbers depend on its neighbours outside "
            "attention, or its position is not the one given"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() <= TOLERANCE[a.dtype] * b.abs().max().clamp(min=1e-6))
