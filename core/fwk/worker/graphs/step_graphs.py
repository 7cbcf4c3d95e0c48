"""A step's model: computed operator by operator, or replayed from what was captured once for steps of all sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

from torch import Tensor

from fwk.interfaces.graphs import CapturedPieces, Graph, GraphCapture, NotCapturable, StepOutput, StepSize
from fwk.interfaces.model import HiddenTap, Model
from fwk.interfaces.operators import Operators
from fwk.types import ForwardBatch
from fwk.worker.graphs.graph_sizes import GraphSizes


class StepModel:
    """The model as the runner calls it, every step operator by operator.

    is_greedy: the model's own (``ModelContext``), 1 while a greedy step runs; None: it has none.
    taps: what heads read of it; what they keep stands alongside the hidden states that ``run`` returns, [num_hidden,
    (1 + number of taps) * hidden_size]. makes_logits: False of a stage before the last.
    """

    def __init__(
        self,
        model: Model,
        is_greedy: Tensor | None,
        operators: Operators,
        taps: Sequence[HiddenTap] = (),
        *,
        makes_logits: bool = True,
    ) -> None:
        self.model = model
        self._makes_logits = makes_logits
        self._is_greedy = is_greedy
        self._operators = operators
        self._taps = taps
        self.pieces: CapturedPieces | None = None
        """What replays steps with ``ForwardBatch.piece_tokens``."""

    def run(self, batch: ForwardBatch) -> StepOutput:
        """Compute one step; attention is planned already."""
        if not batch.is_greedy or self._is_greedy is None:
            return self._run(batch)
        self._is_greedy.fill_(1)
        try:
            return self._run(batch)
        finally:
            self._is_greedy.fill_(0)

    def _run(self, batch: ForwardBatch) -> StepOutput:
        if self.pieces is not None and batch.piece_tokens and batch.is_of_tokens:
            hidden, kept = self.pieces.run(batch)
        else:
            hidden = self.model.forward(batch)
            kept = self._with_taps(hidden)
        if not self._makes_logits or not len(batch.logits_indices):
            return kept, None
        return kept, self.model.logits(hidden.index_select(0, batch.logits_indices))

    def prepare_pieces(self, blank: Callable[[int], ForwardBatch]) -> GraphSizes | None:
        """Capture steps of some numbers of tokens in pieces; these numbers, or None where nothing was captured.

        ``blank`` makes a batch of so many tokens, whose numbers mean nothing.
        """
        sizes = () if self.pieces is None else self.pieces.prepare(self._hidden, blank)
        return GraphSizes(sizes) if sizes else None

    def _hidden(self, batch: ForwardBatch) -> tuple[Tensor, int]:
        hidden = self.model.forward(batch)
        return self._with_taps(hidden), hidden.shape[1]

    def _all_of(self, batch: ForwardBatch) -> StepOutput:
        """As ``_run``, by the model's operators alone."""
        hidden = self.model.forward(batch)
        logits = self.model.logits(self._operators.rows(hidden.contiguous(), batch.logits_indices))
        return self._with_taps(hidden), logits

    def _with_taps(self, hidden: Tensor) -> Tensor:
        kept = [tap.value for tap in self._taps if tap.value is not None]
        return self._operators.join([hidden.contiguous(), *kept]) if kept else hidden

    def prepare(self, blank: Callable[[StepSize], ForwardBatch]) -> None:
        """Capture, where that is done, before the first step.

        ``blank`` makes a batch of a size, whose numbers mean nothing and whose attention is planned.
        """

    def prepare_decodes(self, blank: Callable[[int], ForwardBatch]) -> GraphSizes | None:
        """Capture decode steps of some numbers of rows; these, or None where nothing was captured.

        ``blank`` makes one in which no row stands for a sequence, whose attention is planned.
        """
        return None


class CapturedStepModel(StepModel):
    """Steps are captured once, prompts and next tokens alike, and replayed from then on.

    A step in which a sequence has something else than tokens or asks something of the layers, or which is larger than
    ``most``, runs as in ``StepModel``; so does every step of a model that cannot be captured (``refusal``).
    """

    def __init__(
        self,
        model: Model,
        is_greedy: Tensor | None,
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
            return self._all_of(blank(size))

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
        if not batch.is_of_tokens:
            return False
        return all(count <= most for count, most in zip(size, self._most, strict=True))


class DecodeGraphs(StepModel):
    """Decode steps are replayed, each from the capture of its number of rows; all others run as in ``StepModel``.

    A step that verifies chains of drafts is one, too: its inputs have a row for each draft (``InputBuffers``).

    A step whose inputs were padded to such a number (``ForwardBatch.padding``) yields its own rows alone.
    """

    def __init__(
        self,
        model: Model,
        is_greedy: Tensor | None,
        operators: Operators,
        capture: GraphCapture,
        sizes: GraphSizes,
        taps: Sequence[HiddenTap] = (),
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """around: what captures are made within."""
        super().__init__(model, is_greedy, operators, taps)
        self._around = around
        self._capture = capture
        self._sizes = sizes
        self.graphs: dict[int, Graph] = {}
        """By number of rows."""
        self.refusal = ""
        """Why steps are not replayed; empty if they are."""

    def prepare_decodes(self, blank: Callable[[int], ForwardBatch]) -> GraphSizes | None:
        with self._around():
            return self._prepared(blank)

    def _prepared(self, blank: Callable[[int], ForwardBatch]) -> GraphSizes | None:
        for count in reversed(self._sizes.sizes):  # the largest first: the others find room in its memory
            batch = blank(count)
            try:
                if not batch.is_static:
                    raise NotCapturable(f"attention cannot plan a step of {count} sequences in fixed buffers")
                self.graphs[count] = self._capture.capture(partial(self._captured, batch), StepSize.of(batch))
            except NotCapturable as reason:
                self.refusal = str(reason)
                self.graphs.clear()
                return None
        return self._sizes

    def _captured(self, batch: ForwardBatch, size: StepSize) -> StepOutput:
        return self._all_of(batch)

    def run(self, batch: ForwardBatch) -> StepOutput:
        if batch.is_static:
            hidden, logits = self.graphs[batch.num_seqs].replay(StepSize.of(batch))
        else:
            hidden, logits = super().run(batch)
        if batch.padding and logits is not None:
            count = batch.num_seqs - batch.padding
            return hidden[:count], logits[:count]
        return hidden, logits
