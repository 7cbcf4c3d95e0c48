"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): a layer behind the last, for one token more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext, TokenPredictor
from fwk_layers import LMHead, ReplicatedLinear, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.types import ForwardBatch

Layer = Callable[["Tensor", "ForwardBatch"], "Tensor"]
"""A decoder layer: [num_tokens, hidden_size] to the wanted tokens' [num_hidden, hidden_size]."""


class NextTokenPredictor(TokenPredictor):
    """h' = M [norm(h); norm(embedding)] through a decoder layer; embedding and head are the model's own."""

    def __init__(self, context: ModelContext, prefix: str, make_layer: Callable[[ModelContext], Layer]) -> None:
        size, eps = context.config.hidden_size, context.config.rms_norm_eps
        self.embedding_norm = RMSNorm(context, f"{prefix}.enorm", size, eps)
        self.hidden_norm = RMSNorm(context, f"{prefix}.hnorm", size, eps)
        self.projection = ReplicatedLinear(context, f"{prefix}.eh_proj", 2 * size, size)
        self.layer = make_layer(context)
        self.norm = RMSNorm(context, f"{prefix}.shared_head.norm", size, eps)
        self.head: LMHead | None = None
        self._operators = context.operators

    def forward(self, embedded: Tensor, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        parts = [self.embedding_norm(embedded), self.hidden_norm(hidden.contiguous())]
        return self.layer(self.projection(self._operators.join(parts)), batch)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(self.norm(hidden))


def make_predictors(
    context: ModelContext, head: LMHead, make_layer: Callable[[ModelContext, int], Layer]
) -> Sequence[TokenPredictor]:
    """Those that ``num_nextn_predict_layers`` announces; ``make_layer`` gets a context in which its layer is the last.

    Raises ``ModelLoadError`` when the checkpoint has none of the tensors: conversions often leave them out.
    """
    config = context.config
    found: list[TokenPredictor] = []
    for index in range(config.num_layers, config.num_layers + config.integer("num_nextn_predict_layers", 0, low=0)):
        prefix = f"model.layers.{index}"
        if not context.weights.has(f"{prefix}.eh_proj.weight"):
            raise ModelLoadError(
                f"config.json announces num_nextn_predict_layers, but the checkpoint has no {prefix}.eh_proj.weight: "
                "it was converted without its layers for multi-token prediction"
            )
        own = replace(context, config=replace(config, num_layers=index + 1))

        def layer(context: ModelContext, index: int = index) -> Layer:
            return make_layer(context, index)

        predictor = NextTokenPredictor(own, prefix, layer)
        predictor.head = head
        found.append(predictor)
    return found
