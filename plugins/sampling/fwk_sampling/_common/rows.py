"""What the processors share: which rows asked, and editing scattered entries of many rows at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.sampling import LogitsView, SamplingContext

T = TypeVar("T")


def asked_rows(settings: Mapping[int, T], view: LogitsView) -> list[tuple[int, T]]:
    """The rows whose slot has settings, with them. O(num_rows)."""
    return [(row, settings[slot]) for row, slot in enumerate(view.slots.tolist()) if slot in settings]


def entries(parts: Sequence[tuple[int, np.ndarray]], context: SamplingContext) -> tuple[Tensor, Tensor]:
    """Rows and columns [num_entries] int64 of the token ids listed for each row: one index for all of them."""
    rows = np.repeat(
        np.fromiter((row for row, _ in parts), np.int64, len(parts)),
        np.fromiter((len(ids) for _, ids in parts), np.int64, len(parts)),
    )
    columns = np.concatenate([ids for _, ids in parts]).astype(np.int64, copy=False)
    return context.send(rows), context.send(columns)


def forbid(
    logits: Tensor, parts: Sequence[tuple[int, np.ndarray]], view: LogitsView, cause: str, context: SamplingContext
) -> None:
    """Set the listed entries to -inf, in place. Blames the sequence that this leaves without any token."""
    rows, columns = entries(parts, context)
    lowest = torch.full((), -torch.inf, dtype=logits.dtype, device=logits.device)
    logits.index_put_((rows, columns), lowest)
    require_token(logits, [row for row, _ in parts], view, cause, context)


def require_token(logits: Tensor, rows: Sequence[int], view: LogitsView, cause: str, context: SamplingContext) -> None:
    """Raise ``BlameSequence`` for the first of ``rows`` in which every entry is -inf. NaN is the sampler's business.

    On a device, which the host does not wait for, they are noted in the view.
    """
    why = f"no token is allowed: {cause}, together with the limits applied before it, rules out the whole vocabulary"
    if not logits.is_cpu:
        asked = np.zeros(len(logits), bool)
        asked[rows] = True
        view.refusals.append(((logits.amax(-1) == -torch.inf) & context.send(asked), why))
        return
    table = logits.numpy()  # numpy's maximum of one row costs a third of torch's
    empty = [row for row in rows if table[row].max() == -np.inf]
    if empty:
        raise BlameSequence(int(view.slots[empty[0]]), why, is_refusal=True)
