"""A step's model: computed operator by operator, or replayed from what was captured once for steps of all sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from fwk.interfaces.graphs import Graph, GraphCapture, NotCapturable, StepOutput, StepSize
from fwk.interfaces.model import HiddenTap, Model
from fwk.interfaces.operators import Operators
from fwk.types import ForwardBatch


class StepModel:
    """The model as the runner calls it, every step operator by operator.

    is_greedy: the model's own (``ModelContext``), 1 while a greedy step runs. taps: what heads read of it; what they
    keep stands beside the hidden states that ``run`` returns, [num_hidden, (1 + number of taps) * hidden_size].
    """

    def __init__(self, model: Model, is_greedy: Tensor, operators: Operators, taps: Sequence[HiddenTap] = ()) -> None:
        self.model = model
        self._is_greedy = is_greedy
        self._operators = operators
        self._taps = taps

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
            return self._with_taps(hidden), None
        return self._with_taps(hidden), self.model.logits(hidden.index_select(0, batch.logits_indices))

    def _with_taps(self, hidden: Tensor) -> Tensor:
        kept = [tap.value for tap in self._taps if tap.value is not None]
        return self._operators.join([hidden.contiguous(), *kept]) if kept else hidden

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
        self,
        model: Model,
        is_greedy: Tensor,
        operators: Operators,
        capture: GraphCapture,
        most: StepSize,
        taps: Sequence[HiddenTap] = (),
    ) -> None:
        super().__init__(model, is_greedy, operators, taps)
        self._capture = capture
        self._most = most
        self.graph: Graph | None = None
        self.refusal = ""
        """Why steps are not replayed; empty if they are."""

    def prepare(self, blank: Callable[[StepSize], ForwardBatch]) -> None:
        def step(size: StepSize) -> StepOutput:
            batch = blank(size)
            hidden = self.model.forward(batch)
            return self._with_taps(hidden), self.model.logits(
                self._operators.rows(hidden.contiguous(), batch.logits_indices)
            )

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
