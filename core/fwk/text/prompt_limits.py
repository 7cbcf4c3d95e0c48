"""How long a prompt may be, and what is done with longer ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from fwk.config import ModelOptions
from fwk.types import SamplingParams

Truncation = Literal["none", "head", "center", "tail", "answer"]


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """``max_len``: tokens of a prompt, where less than the model takes. ``truncation``: which part is cut off."""

    max_len: int | None = None
    truncation: Truncation = "none"

    @classmethod
    def of(cls, options: ModelOptions) -> PromptLimits:
        """As the options say."""
        return cls(options.max_req_input_len, options.long_truncation_mode)

    def bound(self, max_model_len: int) -> int:
        """Tokens of the longest prompt, of those that the model takes."""
        return max_model_len if self.max_len is None else min(self.max_len, max_model_len)

    def reserved(self, max_tokens: int | None) -> int:
        """How many tokens of an answer a prompt is shortened for."""
        return 1 if self.truncation == "answer" else max_tokens or 1

    def shortened_answer(self, sampling: SamplingParams, room: int) -> SamplingParams:
        """``sampling`` with no more tokens than fit behind the prompt, where the answer is what gives way."""
        if self.truncation != "answer" or (sampling.max_tokens or 0) <= room:
            return sampling
        return msgspec.structs.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))

    def shortened(self, token_ids: list[int], max_len: int) -> list[int]:
        """``token_ids`` without what is too much; as they are if nothing is to be cut off, or nothing would be left."""
        if len(token_ids) <= max_len or max_len < 1:
            return token_ids
        match self.truncation:
            case "none":
                return token_ids
            case "head":
                return token_ids[-max_len:]
            case "tail" | "answer":
                return token_ids[:max_len]
            case "center":
                end = max_len // 2
                return token_ids[: max_len - end] + (token_ids[-end:] if end else [])
