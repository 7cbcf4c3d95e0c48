"""The part in the server: requests that ask, and what they are told."""

from __future__ import annotations

from typing import TypeGuard

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, OutputDelta
from fwk.interfaces.feature import RequestPart, ServerPart
from fwk_features.hidden_states import NewStates, Wanted

MAX_TOKENS = 16384
"""Tokens of a request whose hidden states are returned: kilobytes each."""


class HiddenStatesServer(ServerPart):
    """Lets requests ask."""

    def check(self, item: GenerateInput | EmbedInput) -> None:
        if not _asks(item):
            return
        name, length = "return_hidden_states", len(item.prompt_token_ids) + (item.sampling.max_tokens or 0)
        num_tokens = item.n * length
        if num_tokens > MAX_TOKENS:
            raise InvalidRequest(
                f"{name} is for {MAX_TOKENS} tokens at most, prompt, max_tokens and n counted, not {num_tokens}", name
            )

    def open(self, item: GenerateInput | EmbedInput, caller: str) -> RequestPart | None:
        return HiddenStatesCall() if _asks(item) else None


class HiddenStatesCall(RequestPart):
    """A request that asks."""

    async def enter(self, item: GenerateInput) -> Wanted:
        return Wanted()

    async def output(self, delta: OutputDelta, event: msgspec.Struct | None) -> OutputDelta:
        if isinstance(event, NewStates):  # those of tokens behind a stop string are left out
            delta.hidden_states = event.rows[: len(event.rows) - delta.num_cut]
        return delta


def _asks(item: GenerateInput | EmbedInput) -> TypeGuard[GenerateInput]:
    return isinstance(item, GenerateInput) and item.sampling.return_hidden_states
