"""Log-probabilities as clients see them: of the model's own logits, before any processor."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fwk.types import TokenLogprobs

ALIGNED = 16
"""Numbers of which a row has a multiple on a device: torch's kernel adds up a row in an order that depends on where in
its 16 bytes it begins, and so would depend on the rows before it."""

ROWS_AT_ONCE = 256
"""Rows turned into float32 log-probabilities at a time: bounds the memory of a long prompt's."""


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """One entry per row of ``logits`` [num_rows, vocab_size]: of its token, and its ``num_top`` most likely ones."""
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        result.extend(_some(logits[start:end], token_ids[start:end], num_top[start:end]))
    return result


def packed_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """What ``unpacked_logprobs`` reads, made where the logits are, so that one copy brings all of it to the host.

    logits: [n, vocab_size]; token_ids: [n] int64. Returns [n, 2 + 2 * num_top] int32: the bits of the token's
    log-probability, its rank from 1 on, the bits of the largest ones, and their tokens.
    """
    logits = logits.float()
    if not logits.is_cpu and logits.shape[1] % ALIGNED:
        logits = torch.nn.functional.pad(logits, (0, -logits.shape[1] % ALIGNED), value=-torch.inf)
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, token_ids.clamp(min=0).unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1, keepdim=True, dtype=torch.int32) + 1
    values, indices = logprobs.topk(num_top, dim=1)
    parts = (chosen.view(torch.int32), ranks, values.contiguous().view(torch.int32), indices.to(torch.int32))
    return torch.cat(parts, dim=1)


def unpacked_logprobs(packed: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """One entry per row of ``packed``, in the host's memory: of its token, and its ``num_top`` most likely ones."""
    most = (packed.shape[1] - 2) // 2
    numbers = cast("list[list[float]]", packed.view(torch.float32).tolist())  # pyright: ignore[reportUnknownMemberType]
    words = cast("list[list[int]]", packed.tolist())  # pyright: ignore[reportUnknownMemberType]
    return [
        TokenLogprobs(token, number[0], word[1], list(zip(word[2 + most :][:k], number[2 : 2 + most][:k], strict=True)))
        for token, number, word, k in zip(token_ids, numbers, words, num_top, strict=True)
    ]


def _some(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    packed = packed_logprobs(logits, torch.tensor(token_ids, device=logits.device), max([1, *num_top]))
    return unpacked_logprobs(packed.cpu(), token_ids, num_top)
