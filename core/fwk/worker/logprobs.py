"""Log-probabilities as clients see them: of the model's own logits, before any processor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fwk.interfaces.model import Model
from fwk.types import Batch, ForwardBatch, TokenLogprobs
from fwk.worker.sequence_table import SequenceTable

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


@dataclass(slots=True)
class PromptLogprobs:
    """Of the prompt tokens that follow a step's, of a sequence that wants them: given to the device.

    packed: ``packed_logprobs`` of some of these tokens each. token_ids: for each of these, the tokens.
    """

    slot: int
    num_top: int
    packed: list[Tensor]
    token_ids: list[list[int]]

    def unpacked(self, packed: Sequence[Tensor]) -> list[TokenLogprobs]:
        """One entry per token. packed: copies in the host's memory."""
        found: list[TokenLogprobs] = []
        for some, token_ids in zip(packed, self.token_ids, strict=True):
            found.extend(unpacked_logprobs(some, token_ids, [self.num_top] * len(token_ids)))
        return found


def prompt_logprobs(
    model: Model,
    table: SequenceTable,
    batch: Batch,
    forward: ForwardBatch,
    hidden: Tensor,
    send: Callable[[np.ndarray], Tensor] = torch.from_numpy,
) -> list[PromptLogprobs]:
    """Log-probabilities of the prompt tokens that follow this step's, of sequences that want them.

    hidden: [num_tokens, hidden_size], of all tokens of the step where one of its sequences wants any. send: brings an
    array to where that is, without waiting.
    """
    result: list[PromptLogprobs] = []
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
        found = PromptLogprobs(slot, num_top, [], [])
        for offset in range(0, count, ROWS_AT_ONCE):
            n = min(ROWS_AT_ONCE, count - offset)
            logits = model.logits(hidden[start + offset : start + offset + n].contiguous())
            first = position + offset + 1
            token_ids = table.token_ids[slot, first : first + n].astype(np.int64)
            found.packed.append(packed_logprobs(logits, send(token_ids), max(num_top, 1)))
            found.token_ids.append(token_ids.tolist())
        result.append(found)
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
    numbers, words = packed.view(torch.float32).tolist(), packed.tolist()
    return [
        TokenLogprobs(token, number[0], word[1], list(zip(word[2 + most :][:k], number[2 : 2 + most][:k], strict=True)))
        for token, number, word, k in zip(token_ids, numbers, words, num_top, strict=True)
    ]


def _some(logits: Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    packed = packed_logprobs(logits, torch.tensor(token_ids, device=logits.device), max([1, *num_top]))
    return unpacked_logprobs(packed.cpu(), token_ids, num_top)
