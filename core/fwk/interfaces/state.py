"""What a recurrent layer keeps of a sequence: tensors of a fixed size, one row for each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.model import ModelContext


class RecurrentState:
    """The states of one layer. ``tensors`` are [num_rows, *shape] each, allocated once all layers are built.

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
        """Of one sequence."""
        return sum(math.prod(shape) * self.dtypes[name].itemsize for name, shape in self.shapes.items())

    def allocate(self, num_rows: int, device: torch.device) -> None:
        """Zeros for ``num_rows`` rows; on a CPU, those never written take no memory."""
        import torch  # noqa: PLC0415 - interfaces are read where no torch is

        for name, shape in self.shapes.items():
            self.tensors[name] = torch.zeros((num_rows, *shape), dtype=self.dtypes[name], device=device)
