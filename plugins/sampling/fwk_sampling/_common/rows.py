"""What the processors share: which rows asked, and editing scattered entries of many rows at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence
from fwk.interfaces.sampling import LogitsView

T = TypeVar("T")


def asked_rows(settings: Mapping[int, T], view: LogitsView) -> list[tuple[int, T]]:
    """The rows whose slot has settings, with them. O(num_rows)."""
    return [(row, settings[slot]) for row, slot in enumerate(view.slots.tolist()) if slot in settings]


def entries(parts: Sequence[tuple[int, np.ndarray]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns [num_entries] int64 of the token ids listed for each row: one index for all of them."""
    rows = np.repeat(
        np.fromiter((row for row, _ in parts), np.int64, len(parts)),
        np.fromiter((len(ids) for _, ids in parts), np.int64, len(parts)),
    )
    columns = np.concatenate([ids for _, ids in parts]).astype(np.int64, copy=False)
    return torch.from_numpy(rows).to(device), torch.from_numpy(columns).to(device)


def forbid(logits: Tensor, parts: Sequence[tuple[int, np.ndarray]], view: LogitsView, cause: str) -> None:
    """Set the listed entries to -inf, in place. Raises ``BlameSequence`` when that leaves a row without any token."""
    logits[entries(parts, logits.device)] = -torch.inf
    require_token(logits, [row for row, _ in parts], view, cause)


def require_token(logits: Tensor, rows: Sequence[int], view: LogitsView, cause: str) -> None:
    """Raise ``BlameSequence`` for the first of ``rows`` in which every entry is -inf. NaN is the sampler's business."""
    if logits.is_cpu:
        table = logits.numpy()  # numpy's maximum of one row costs a third of torch's
        empty = [row for row in rows if table[row].max() == -np.inf]
    else:
        is_empty = logits[torch.tensor(rows, device=logits.device)].amax(-1) == -torch.inf
        empty = [row for row, gone in zip(rows, is_empty.tolist(), strict=True) if gone]
    if empty:
        raise BlameSequence(
            int(view.slots[empty[0]]),
            f"no token is allowed: {cause}, together with the limits applied before it, rules out the whole vocabulary",
            is_refusal=True,
        )


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A copy that the host does not wait for, where the device is another; on a CPU the same memory."""
    return torch.from_numpy(values).to(device, non_blocking=True)
