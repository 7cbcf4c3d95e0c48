"""What is captured of a model's steps before requests come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from fwk.types import ForwardBatch
from fwk.worker.graphs.graph_sizes import GraphSizes
from fwk.worker.graphs.step_graphs import StepModel
from fwk.worker.runner.inputs import InputBuffers


class Captures:
    """Of the runner's model of now, of inputs in the runner's buffers.

    planned: the same batch, with attention planned. num_rows: of the largest step that the model captures by itself
    (``DecodeGraphs``); 0: of none.
    """

    def __init__(
        self,
        model: Callable[[], StepModel],
        inputs: InputBuffers,
        planned: Callable[[ForwardBatch], ForwardBatch],
        num_rows: int = 0,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._planned = planned
        self._num_rows = num_rows

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Capture steps, and run a decode step of one token on blocks that no sequence holds yet."""
        self._model().prepare(lambda size: self._planned(self._inputs.blank(*size)))
        self._inputs.graph_sizes = self.decodes()
        self._inputs.piece_sizes = self.pieces()
        first, one = np.zeros(1, np.int64), np.ones(1, np.int64)
        self._model().run(self._planned(self._inputs.fill(first, first, first, np.arange(2), one, first)))

    def decodes(self) -> GraphSizes | None:
        """Have the model capture decode steps, where it does that: ``StepModel.prepare_decodes``."""
        if not self._num_rows:
            return None
        blank = self._inputs.capture_decodes(self._num_rows)
        return self._model().prepare_decodes(lambda count: self._planned(blank(count)))

    def pieces(self) -> GraphSizes | None:
        """Have the model capture steps with prompts, where it does that: ``StepModel.prepare_pieces``."""
        return self._model().prepare_pieces(self._blank_tokens)

    def _blank_tokens(self, count: int) -> ForwardBatch:
        forward = self._inputs.blank(count, 1, 1, 1)
        forward.hidden_indices = None
        return forward
