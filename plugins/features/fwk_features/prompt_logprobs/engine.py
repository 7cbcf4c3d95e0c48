"""The part in the engine: keeps what the steps of a prompt report until its first token has come."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from fwk.errors import InvalidRequest
from fwk.interfaces.feature import EnginePart, EnginePartContext, FeatureSequence
from fwk.types import Request
from fwk_features.prompt_logprobs import PromptScores, StepScores


@dataclass(slots=True)
class _Known:
    """count: tokens of a prompt whose entries have come. entries: of them, until they are sent."""

    count: int = 0
    entries: list[msgspec.Raw] = field(default_factory=list[msgspec.Raw])


class PromptLogprobsEngine(EnginePart):
    """Scores a prompt once, with the request's first sequence, and computes it whole for that."""

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._known: dict[tuple[str, int], _Known] = {}

    def check(self, request: Request) -> None:
        if request.num_encoder_tokens:
            raise InvalidRequest(
                "an encoder reads the prompt of this model, so its tokens have no log-probabilities", "prompt_logprobs"
            )

    def matchable(self, sequence: FeatureSequence, count: int) -> int:
        return 0 if self._is_wanting(sequence) else count

    def new(self, sequence: FeatureSequence) -> msgspec.Struct | msgspec.Raw | None:
        return super().new(sequence) if self._is_wanting(sequence) else None

    def took(self, sequence: FeatureSequence, result: StepScores) -> None:
        known = self._known.setdefault(sequence.key, _Known())
        known.count += result.count
        known.entries.append(result.entries)

    def event(self, sequence: FeatureSequence) -> PromptScores | None:
        known = self._known.get(sequence.key)
        if known is None or not known.entries:
            return None
        entries, known.entries = known.entries, []
        return PromptScores(entries)

    def preempted(self, sequence: FeatureSequence) -> None:
        if self._is_wanting(sequence):
            self._known.pop(sequence.key, None)

    def forget(self, sequence: FeatureSequence) -> None:
        self._known.pop(sequence.key, None)

    def _is_wanting(self, sequence: FeatureSequence) -> bool:
        """Whether entries of its prompt are still to come."""
        known = self._known.get(sequence.key)
        count = 0 if known is None else known.count
        return sequence.key[1] == 0 and count < sequence.num_prompt_tokens - 1
