"""The part in each worker: it cuts the model's steps where they call attention."""

from __future__ import annotations

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackend
from fwk.interfaces.feature import WorkerPart, WorkerPartContext
from fwk.interfaces.graphs import StepPieces
from fwk_features.piecewise_graphs import ENABLE
from fwk_features.piecewise_graphs.pieces import Pieces


class PromptGraphs(WorkerPart):
    """Has no part in sequences."""

    def __init__(self, context: WorkerPartContext) -> None:
        """Raises ``ConfigError`` on the host itself."""
        super().__init__(context)
        if context.is_host:
            raise ConfigError(f"{ENABLE}: on this device one capture serves steps of all sizes; leave it out")

    def pieces(self, attention: AttentionBackend) -> StepPieces:
        return Pieces(attention, self.context.options.sizes(self.context.step_tokens))
