"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2) as a head that drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.errors import ConfigError
from fwk.interfaces.speculative import SpeculativeContext
from fwk_speculative._common.heads import DraftHead, HeadDecoder
from fwk_speculative.mtp import MtpOptions

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.model import Model, TokenPredictor
    from fwk.interfaces.speculative import TargetStep
    from fwk.types import ForwardBatch


class MtpDecoder(HeadDecoder):
    """The checkpoint's first predictor, on its own outputs from the second draft on, as other servers run it too."""

    def __init__(self, context: SpeculativeContext) -> None:
        target, build = context.target, context.build
        assert target is not None
        assert build is not None
        predictors = build(target.make_predictors, None)
        if not predictors:
            raise ConfigError(
                "--speculative-algorithm mtp: this model, or what reads it here, has no layers for multi-token "
                "prediction; eagle3 takes a head of its own, suffix and ngram need none"
            )
        super().__init__(context, context.options or MtpOptions(), _PredictorHead(target, predictors[0]))


class _PredictorHead(DraftHead):
    def __init__(self, target: Model, predictor: TokenPredictor) -> None:
        self._target, self._predictor = target, predictor

    def features(self, step: TargetStep) -> Tensor:
        return step.hidden

    def forward(self, features: Tensor, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        hidden = self._predictor.forward(self._target.embed(batch.token_ids), features, batch)
        return hidden, hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._predictor.logits(hidden)
