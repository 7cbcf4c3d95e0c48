"""The part in the engine: which of the states that workers report are a sequence's, and new."""

from __future__ import annotations

from dataclasses import dataclass, field

from fwk.errors import InvalidRequest
from fwk.interfaces.feature import EnginePart, EnginePartContext, FeatureSequence
from fwk.types import Request
from fwk_features.hidden_states import NewStates, StepStates


@dataclass(slots=True)
class _Known:
    """num_tokens: leading tokens of a sequence whose states have come. rows: of them, those not sent yet."""

    num_tokens: int = 0
    rows: list[bytes] = field(default_factory=list[bytes])


class HiddenStatesEngine(EnginePart):
    """The prompt is computed whole, for the prefix cache keeps no states of its tokens."""

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._known: dict[tuple[str, int], _Known] = {}

    def check(self, request: Request) -> None:
        if request.num_encoder_tokens:
            raise InvalidRequest(
                "an encoder reads the prompt of this model, so its tokens have no hidden states to return",
                "return_hidden_states",
            )

    def matchable(self, sequence: FeatureSequence, count: int) -> int:
        known = self._known.get(sequence.key)
        has_prompt = known is not None and known.num_tokens >= sequence.num_prompt_tokens
        return count if has_prompt else 0

    def took(self, sequence: FeatureSequence, result: StepStates) -> None:
        """Keep what is new: after a pre-emption the same tokens come again, and rejected drafts are in no text."""
        known = self._known.setdefault(sequence.key, _Known())
        num_computed = len(sequence.token_ids) - 1  # nothing is computed of the newest token
        fresh = result.rows[: max(num_computed - result.start, 0)][known.num_tokens - result.start :]
        known.rows += fresh
        known.num_tokens += len(fresh)

    def event(self, sequence: FeatureSequence) -> NewStates | None:
        known = self._known.get(sequence.key)
        if known is None or not known.rows:
            return None
        rows, known.rows = known.rows, []
        return NewStates(rows)

    def forget(self, sequence: FeatureSequence) -> None:
        self._known.pop(sequence.key, None)
