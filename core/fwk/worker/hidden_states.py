"""Hidden states for replies: of the tokens of a step, in the host's memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fwk.types import Batch, ForwardBatch, SequenceResult
from fwk.worker.sequence_table import SequenceTable


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Of a sequence's tokens in a step: float32 numbers of each, little-endian, from the token at ``start`` on."""

    slot: int
    start: int
    rows: list[bytes]

    def put(self, results: dict[int, SequenceResult]) -> None:
        """Into the sequence's result, of which a chunk of a prompt has none yet."""
        result = results.setdefault(self.slot, SequenceResult(self.slot, []))
        result.hidden_start, result.hidden_states = self.start, self.rows


def hidden_states(table: SequenceTable, batch: Batch, forward: ForwardBatch, hidden: Tensor) -> list[HiddenStates]:
    """Of the sequences that want them; waits for the device.

    hidden: [num_tokens, hidden_size], what the model's logits are made of, of all tokens of the step.
    """
    found: list[HiddenStates] = []
    for i, scheduled in enumerate(batch.sequences):
        if table.wants_hidden[scheduled.slot]:
            start, end = int(forward.query_start_np[i]), int(forward.query_start_np[i + 1])
            position = int(forward.seq_lens_np[i]) - (end - start)
            rows = hidden[start:end].to(device="cpu", dtype=torch.float32).contiguous().numpy()
            found.append(HiddenStates(scheduled.slot, position, [row.tobytes() for row in rows]))
    return found


def put_all(found: Iterable[HiddenStates], results: dict[int, SequenceResult], gone: Collection[int] = ()) -> None:
    """Into the results of those that are still there."""
    for one in found:
        if one.slot not in gone:
            one.put(results)
