"""A step's model: computed operator by operator, or replayed from what was captured of a step of the same size.

``StepModel`` is what the runner calls. A ``GraphCapture`` knows how a device captures: a CPU records a tape of native
operators (``worker.recording``); a CUDA graph has the same shape.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from fwk.interfaces.model import Model
from fwk.types import ForwardBatch

log = logging.getLogger(__name__)

StepOutput = tuple[Tensor, Tensor | None]
"""Hidden states [num_tokens, hidden_size], and logits [num_logits, vocab_size] where ``batch.logits_at`` asks for some.

Valid until the next step.
"""


class Graph(ABC):
    """A captured step. Its inputs are read where they were when it was captured."""

    @abstractmethod
    def replay(self) -> StepOutput:
        """Compute the step anew, with one call."""


@dataclass(frozen=True, slots=True)
class Captured:
    """A step that was computed while it was captured. ``graph`` is None where that was not possible: ``refusal``."""

    output: StepOutput
    graph: Graph | None
    refusal: str = ""


class GraphCapture(ABC):
    """How a device captures steps."""

    @abstractmethod
    def capture(self, step: Callable[[], StepOutput]) -> Captured:
        """Compute a step once, and make of it what can be replayed."""


class StepModel:
    """The model as the runner calls it, every step operator by operator."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def run(self, batch: ForwardBatch) -> StepOutput:
        """Compute one step; attention is planned already."""
        hidden = self.model.forward(batch)
        if not len(batch.logits_at):
            return hidden, None
        return hidden, self.model.logits(hidden.index_select(0, batch.logits_at))


class CapturedStepModel(StepModel):
    """Decode steps are captured with the first of their size, and replayed from the second on.

    Captured is what depends on the number of sequences alone: one token each, all sampled, no drafts, no adapters.
    Everything else runs as in ``StepModel``.
    """

    def __init__(self, model: Model, capture: GraphCapture, max_seqs: int) -> None:
        super().__init__(model)
        self._capture = capture
        self._max_seqs = max_seqs
        self._graphs: dict[int, Graph | None] = {}
        self.refusal = ""
        """Why the latest capture failed; empty if none has."""

    @property
    def sizes(self) -> list[int]:
        """Numbers of sequences whose steps are replayed."""
        return sorted(size for size, graph in self._graphs.items() if graph is not None)

    def run(self, batch: ForwardBatch) -> StepOutput:
        size = batch.num_seqs
        if size > self._max_seqs or not _is_plain_decode(batch):
            return super().run(batch)
        if size not in self._graphs:
            return self._first(batch)
        graph = self._graphs[size]
        return super().run(batch) if graph is None else graph.replay()

    def _first(self, batch: ForwardBatch) -> StepOutput:
        def step() -> StepOutput:
            hidden = self.model.forward(batch)
            return hidden, self.model.logits(hidden)  # every token is asked for its logits

        captured = self._capture.capture(step)
        self._graphs[batch.num_seqs] = captured.graph
        if captured.graph is None and captured.refusal != self.refusal:
            self.refusal = captured.refusal
            log.info("decode steps of %d sequences are computed operator by operator: %s", batch.num_seqs, self.refusal)
        return captured.output


def _is_plain_decode(batch: ForwardBatch) -> bool:
    return (
        batch.is_decode
        and len(batch.logits_at) == batch.num_seqs
        and batch.tree_mask is None
        and batch.adapter_ids is None
        and not batch.extras
    )
