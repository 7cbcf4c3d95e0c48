"""How long a prompt may be, and what is done with longer ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fwk.config import ModelOptions

Truncation = Literal["none", "head", "center", "tail"]


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

    def shortened(self, token_ids: list[int], max_len: int) -> list[int]:
        """``token_ids`` without what is too much; as they are if nothing is to be cut off, or nothing would be left."""
        if len(token_ids) <= max_len or max_len < 1:
            return token_ids
        match self.truncation:
            case "none":
                return token_ids
            case "head":
                return token_ids[-max_len:]
            case "tail":
                return token_ids[:max_len]
            case "center":
                end = max_len // 2
                return token_ids[: max_len - end] + (token_ids[-end:] if end else [])
