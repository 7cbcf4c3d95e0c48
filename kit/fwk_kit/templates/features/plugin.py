"""The three parts. Each is built in a process of its own; they share nothing but what they send one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fwk.interfaces.dialect import EmbedInput, GenerateInput, OutputDelta
from fwk.interfaces.feature import (
    EnginePart,
    EnginePartContext,
    FeatureSequence,
    RequestPart,
    ServerPart,
    ServerPartContext,
    WorkerPart,
)
from fwk.types import Batch, ForwardBatch

from . import MineRequest, MineResult

if TYPE_CHECKING:
    from fastapi import FastAPI
    from torch import Tensor


class MineServer(ServerPart):
    """Adds up what comes back from all engines."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        self.total, self.count = 0.0, 0

    def routes(self, app: FastAPI) -> None:
        async def entropy() -> dict[str, float]:
            return {"choices": self.count, "mean_nats": self.total / max(self.count, 1)}

        app.add_api_route("/mine/entropy", entropy, methods=["GET"])

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        asks = isinstance(item, GenerateInput) and item.sampling.extra.get("mine_entropy", False)
        return MineCall(self) if asks else None


class MineCall(RequestPart):
    """One request that asks."""

    def __init__(self, server: MineServer) -> None:
        self._server = server

    async def enter(self, item: GenerateInput) -> MineRequest:
        return MineRequest()

    async def output(self, delta: OutputDelta, event: Any) -> OutputDelta:  # event: MineResult, or None
        if event is not None:
            self._server.total += event.total
            self._server.count += event.count
            delta.reply = {**delta.reply, "mine": {"mean_nats": [event.total / event.count]}}  # of this piece
        return delta


class MineEngine(EnginePart):
    """Holds back nothing and nobody; adds up between two pieces of a reply."""

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._sums: dict[tuple[str, int], MineResult] = {}

    def took(self, sequence: FeatureSequence, result: MineResult) -> None:
        before = self._sums.get(sequence.key, MineResult(0.0, 0))
        self._sums[sequence.key] = MineResult(before.total + result.total, before.count + result.count)

    def event(self, sequence: FeatureSequence) -> MineResult | None:
        return self._sums.pop(sequence.key, None)

    def forget(self, sequence: FeatureSequence) -> None:
        self._sums.pop(sequence.key, None)


class MineWorker(WorkerPart):
    """Looks at the logits of each step, on the device; reads nothing before the step is collected."""

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        forward.is_greedy = False  # it reads all logits, not the largest of each row alone

    def computed(self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None) -> Any:
        if logits is None:
            return None
        logprobs = logits.float().log_softmax(-1)
        entropy = self.context.to_host(-(logprobs.exp() * logprobs).sum(-1))
        return [(s.slot, len(s.draft_token_ids)) for s in batch.sequences if s.samples], entropy

    def results(self, made: Any) -> Mapping[int, MineResult]:
        found: dict[int, MineResult] = {}
        if made is not None:
            rows, entropy = made
            place = 0
            for slot, num_drafts in rows:  # of a sequence whose drafts are verified, the first row alone is sure
                found[slot] = MineResult(float(entropy[place]), 1)
                place += 1 + num_drafts
        return found
