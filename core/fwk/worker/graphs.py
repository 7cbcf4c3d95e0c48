"""A step's model: computed operator by operator, or replayed from what was captured once for steps of all sizes.

``StepModel`` is what the runner calls. A ``GraphCapture`` knows how a device captures: a CPU records a tape of native
operators (``worker.recording``); CUDA graphs, one for each of some sizes, have the same shape.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from fwk.interfaces.model import Model
from fwk.interfaces.operators import Operators
from fwk.types import ForwardBatch

StepOutput = tuple[Tensor, Tensor | None]
"""Hidden states [num_hidden, hidden_size], and logits [num_logits, vocab_size] if ``batch.logits_indices`` has any.

Valid until the next step.
"""


class StepSize(NamedTuple):
    """All that sets a step apart from another, besides what is in the input buffers and the plan of attention."""

    num_tokens: int
    num_hidden: int  # hidden states that are wanted: of all tokens, or fewer (``ForwardBatch.hidden_indices``)
    num_logits: int
    num_seqs: int

    @staticmethod
    def of(batch: ForwardBatch) -> StepSize:
        num_hidden = batch.num_tokens if batch.hidden_indices is None else len(batch.hidden_indices)
        return StepSize(batch.num_tokens, num_hidden, len(batch.logits_indices), batch.num_seqs)


class NotCapturable(Exception):
    """Why steps of this model cannot be captured, as a sentence goes on after "computed operator by operator:"."""


class Graph(ABC):
    """A captured step. Its inputs are read where they were when it was captured."""

    @abstractmethod
    def replay(self, size: StepSize) -> StepOutput:
        """Compute a step of that size, with one call. The same tensors come back as long as the size is the same."""


class GraphCapture(ABC):
    """How a device captures steps."""

    @abstractmethod
    def capture(self, step: Callable[[StepSize], StepOutput], most: StepSize) -> Graph:
        """Make what replays steps up to ``most``. ``step`` computes one of any size, on inputs that mean nothing.

        Raises ``NotCapturable``.
        """


class StepModel:
    """The model as the runner calls it, every step operator by operator.

    is_greedy: the model's own (``ModelContext``), 1 while a greedy step runs.
    """

    def __init__(self, model: Model, is_greedy: Tensor) -> None:
        self.model = model
        self._is_greedy = is_greedy

    def run(self, batch: ForwardBatch) -> StepOutput:
        """Compute one step; attention is planned already."""
        if not batch.is_greedy:
            return self._run(batch)
        self._is_greedy.fill_(1)
        try:
            return self._run(batch)
        finally:
            self._is_greedy.fill_(0)

    def _run(self, batch: ForwardBatch) -> StepOutput:
        hidden = self.model.forward(batch)
        if not len(batch.logits_indices):
            return hidden, None
        return hidden, self.model.logits(hidden.index_select(0, batch.logits_indices))

    def prepare(self, blank: Callable[[StepSize], ForwardBatch]) -> None:
        """Capture, where that is done, before the first step.

        ``blank`` makes a batch of a size, whose numbers mean nothing and whose attention is planned.
        """


class CapturedStepModel(StepModel):
    """Steps are captured once, prompts and next tokens alike, and replayed from then on.

    A step in which a sequence has an adapter or something else than tokens, or which is larger than ``most``, runs as
    in ``StepModel``; so does every step of a model that cannot be captured (``refusal``).
    """

    def __init__(
        self, model: Model, is_greedy: Tensor, operators: Operators, capture: GraphCapture, most: StepSize
    ) -> None:
        super().__init__(model, is_greedy)
        self._operators = operators
        self._capture = capture
        self._most = most
        self.graph: Graph | None = None
        self.refusal = ""
        """Why steps are not replayed; empty if they are."""

    def prepare(self, blank: Callable[[StepSize], ForwardBatch]) -> None:
        def step(size: StepSize) -> StepOutput:
            batch = blank(size)
            hidden = self.model.forward(batch)
            return hidden, self.model.logits(self._operators.rows(hidden.contiguous(), batch.logits_indices))

        try:
            self.graph = self._capture.capture(step, self._most)
        except NotCapturable as reason:
            self.refusal = str(reason)

    def _run(self, batch: ForwardBatch) -> StepOutput:
        size = StepSize.of(batch)
        if self.graph is None or not self._is_capturable(batch, size):
            return super()._run(batch)
        return self.graph.replay(size)

    def _is_capturable(self, batch: ForwardBatch, size: StepSize) -> bool:
        if batch.adapter_ids is not None or batch.extras:
            return False
        return all(count <= most for count, most in zip(size, self._most, strict=True))
