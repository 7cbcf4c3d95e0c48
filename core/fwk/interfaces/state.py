"""What a recurrent layer keeps of a sequence: tensors of a fixed size, one row for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.model import ModelContext

ALIGNMENT = 64
"""Of a tensor's first byte in a row: a cache line."""


class RecurrentState:
    """The states of one layer. ``tensors`` are [num_rows, *shape] each, allocated once all layers are built; the rows
    of one sequence lie together, those of all layers.

    ``ForwardBatch.state_rows`` says which row is which sequence's. It is zeros before a sequence's first token, and the
    layer leaves in it the state after the step's last one. Rows are copied, saved and filled again by core.

    - ``shapes``: as given.
    - ``dtypes``: as given.
    """

    def __init__(
        self, context: ModelContext, shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype]
    ) -> None:
        """shapes, dtypes: of a row, by the tensor's name; this rank's part."""
        self.shapes, self.dtypes = dict(shapes), dict(dtypes)
        self.tensors: dict[str, Tensor] = {}
        context.recurrent_states.append(self)

    @property
    def row_bytes(self) -> int:
        """Of one sequence, each tensor's from a multiple of ``ALIGNMENT`` on."""
        return sum(-(-self._size(name) // ALIGNMENT) * ALIGNMENT for name in self.shapes)

    def bind(self, rows: Tensor) -> None:
        """Take the tensors from ``rows`` [num_rows, row_bytes] uint8, zeros whose rows may stand apart."""
        start = 0
        for name, shape in self.shapes.items():
            part = rows[:, start : start + self._size(name)]
            self.tensors[name] = part.view(self.dtypes[name]).view(len(rows), *shape)
            start += -(-self._size(name) // ALIGNMENT) * ALIGNMENT

    def allocate(self, num_rows: int, device: torch.device) -> None:
        """Zeros for ``num_rows`` rows of this layer alone."""
        import torch  # noqa: PLC0415 - interfaces are read where no torch is

        self.bind(torch.zeros((num_rows, self.row_bytes), dtype=torch.uint8, device=device))

    def _size(self, name: str) -> int:
        return math.prod(self.shapes[name]) * self.dtypes[name].itemsize
