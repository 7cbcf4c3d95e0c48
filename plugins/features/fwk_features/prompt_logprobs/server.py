"""The part in the server: requests that ask, and what they are told."""

from __future__ import annotations

import msgspec

from fwk.interfaces.dialect import EmbedInput, GenerateInput, OutputDelta
from fwk.interfaces.feature import RequestPart, ServerPart
from fwk.types import TokenLogprobs
from fwk_features.prompt_logprobs import PromptScores, Scored

_decode = msgspec.msgpack.Decoder(list[TokenLogprobs]).decode


class PromptLogprobsServer(ServerPart):
    """Lets requests ask."""

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        num_top = item.sampling.prompt_logprobs if isinstance(item, GenerateInput) else None
        return None if num_top is None else PromptLogprobsCall(num_top)


class PromptLogprobsCall(RequestPart):
    """A request that asks: its first sequence gets all of them with its first delta, the others the leading None."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._told: set[int] = set()

    async def enter(self, item: GenerateInput) -> Scored:
        return Scored(self._num_top)

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        if delta.index not in self._told:
            self._told.add(delta.index)
            chunks = event.entries if isinstance(event, PromptScores) else []
            delta.prompt_logprobs = [None, *(entry for chunk in chunks for entry in _decode(chunk))]
        return delta
