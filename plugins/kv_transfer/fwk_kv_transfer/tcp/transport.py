"""Blocks of the KV cache over TCP: signed pieces, on the connection by which the two sides have agreed."""

from __future__ import annotations

import numpy as np

from fwk_kv_transfer._common.signed import Job, SignedTransfer
from fwk_kv_transfer._common.wire import Wire


class TcpTransfer(SignedTransfer):
    """A piece is written to the KV cache after its tag was checked."""

    transport = "tcp"

    def lend(self, wire: Wire, ids: np.ndarray) -> None:
        for start in range(0, len(ids), self._blocks.per_piece):
            wire.send(self._blocks.read(ids[start : start + self._blocks.per_piece]).reshape(-1).data)

    def fetch(self, wire: Wire, job: Job) -> None:
        step = self._blocks.per_piece
        rows = np.empty((min(step, len(job.block_ids)), self._blocks.block_bytes), np.uint8)
        for start in range(0, len(job.block_ids), step):
            ids = job.block_ids[start : start + step]
            wire.receive_into(rows[: len(ids)].reshape(-1).data)
            job.check()
            self._blocks.write(ids, rows[: len(ids)])
