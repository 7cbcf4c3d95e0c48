"""Chains that grow on the device, one token of each at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from fwk.interfaces.speculative import Drafts

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.device import Upload


class Chains:
    """A chain for each row of a view, of up to ``depth`` [num_seqs] tokens.

    ``rows`` [num_rows] int64 are those that grow: on a device all until they are as long as they may be, for what was
    picked is not known; on a CPU none after a pick below 0.
    """

    def __init__(self, depth: np.ndarray, send: Upload) -> None:
        self._depth = depth
        self._send = send
        self.rows = np.flatnonzero(depth > 0)
        self._levels: list[tuple[np.ndarray, Tensor]] = []

    def add(self, picked: Tensor) -> Tensor | None:
        """Take the next token of each of ``rows`` [num_rows] int64.

        Leaves in ``rows`` those that grow further, and returns their places among the others, [num_left] int64; None
        where all do.
        """
        self._levels.append((self.rows, picked))
        goes_on = self._depth[self.rows] > len(self._levels)
        if picked.is_cpu:
            goes_on &= picked.numpy() >= 0
        if goes_on.all():
            return None
        self.rows = self.rows[goes_on]
        return self._send(np.flatnonzero(goes_on))

    def drafts(self) -> Drafts:
        """What was taken."""
        count = len(self._depth)
        counts = np.zeros(count, np.int64)
        if not self._levels:
            return Drafts([[] for _ in range(count)])
        columns: list[Tensor] = []
        for rows, picked in self._levels:
            counts[rows] += 1
            if len(rows) < count:
                picked = picked.new_full((count,), -1).index_copy_(0, self._send(rows), picked)
            columns.append(picked)
        return Drafts(torch.stack(columns, 1), counts=counts)
