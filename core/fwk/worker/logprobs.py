"""Log-probabilities as clients see them: of the model's own logits, before any processor."""

from __future__ import annotations

import torch
from torch import Tensor

from fwk.interfaces.model import Model
from fwk.types import Batch, ForwardBatch, TokenLogprobs
from fwk.worker.sequence_table import SequenceTable

ROWS_AT_ONCE = 256
"""Rows turned into float32 log-probabilities at a time: bounds the memory of a long prompt's."""


def token_logprobs(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """One entry per row of ``logits`` [num_rows, vocab_size]: of its token, and its ``num_top`` most likely ones."""
    result: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        end = start + ROWS_AT_ONCE
        result.extend(_some(logits[start:end], token_ids[start:end], num_top[start:end]))
    return result


def prompt_logprobs(
    model: Model, table: SequenceTable, batch: Batch, forward: ForwardBatch, hidden: Tensor
) -> dict[int, list[TokenLogprobs]]:
    """Log-probabilities of the prompt tokens that follow this step's, by slot, of sequences that want them.

    hidden: [num_tokens, hidden_size], of all tokens of the step where one of its sequences wants any.
    """
    result: dict[int, list[TokenLogprobs]] = {}
    for i, scheduled in enumerate(batch.sequences):
        slot = scheduled.slot
        num_top = int(table.prompt_logprobs[slot])
        if num_top < 0:
            continue
        start, end = int(forward.query_start_np[i]), int(forward.query_start_np[i + 1])
        position = int(forward.seq_lens_np[i]) - (end - start)
        count = min(end - start, int(table.num_prompt[slot]) - 1 - position)
        if count <= 0:
            continue
        found: list[TokenLogprobs] = []
        for offset in range(0, count, ROWS_AT_ONCE):
            n = min(ROWS_AT_ONCE, count - offset)
            logits = model.logits(hidden[start + offset : start + offset + n].contiguous())
            first = position + offset + 1
            tokens = table.token_ids[slot, first : first + n].tolist()
            found.extend(token_logprobs(logits, tokens, [num_top] * n))
        result[slot] = found
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
