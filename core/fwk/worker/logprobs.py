"""Log-probabilities as clients see them: of the model's own logits, before any processor."""

from __future__ import annotations

import torch
from torch import Tensor

from fwk.types import TokenLogprobs

ROWS_AT_ONCE = 256
"""Rows turned into float32 log-probabilities at a time: bounds the memory of a long prompt's."""


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """One entry per row of ``logits`` [num_rows, vocab_size]: of its token, and its ``num_top`` most likely ones."""
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        result.extend(_some(logits[start:end], token_ids[start:end], num_top[start:end]))
    return result


def _some(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, ids)
    ranks = ((logprobs > chosen).sum(dim=1) + 1).tolist()
    values, indices = logprobs.topk(max(max(num_top), 1), dim=1)
    top_ids, top_values = indices.tolist(), values.tolist()
    return [
        TokenLogprobs(token, value[0], rank, list(zip(top_i[:k], top_v[:k], strict=True)))
        for token, value, rank, top_i, top_v, k in zip(
            token_ids, chosen.tolist(), ranks, top_ids, top_values, num_top, strict=True
        )
    ]
