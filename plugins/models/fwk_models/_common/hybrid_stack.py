"""Stacks of blocks some of whose mixers are recurrent."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fwk_models._common.recurrent import RecurrentRows
from fwk_models._common.stack import Stack

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch
    from fwk_models._common.stack import Mixer, Rows


class HybridStack(Stack):
    """Token ids to hidden states to logits. width: of the convolutions, set before ``recurrent`` is called."""

    prunes_last_layer = False  # a state is made of all tokens
    divides_layers = False
    width: int
    recurrent_rows: RecurrentRows | None = None  # of the step that is computed

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.recurrent_rows = RecurrentRows.of(batch, self.width)
        return super().forward(batch)

    def recurrent(self, mixer: Callable[[Tensor, RecurrentRows], Tensor]) -> Mixer:
        """A recurrent layer in attention's place."""

        def run(x: Tensor, rows: Rows, batch: ForwardBatch) -> Tensor:
            assert self.recurrent_rows is not None
            return mixer(x, self.recurrent_rows)

        return run
