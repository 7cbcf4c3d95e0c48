"""What becomes of a sequence: what ``fwk.LLM`` gives, and features that make it in a way of their own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fwk.types import FinishReason, TokenLogprobs

_SHOWN = 60


@dataclass(slots=True, repr=False)
class Completion:
    """What became of one sequence.

    - ``text``, ``token_ids``: of the output.
    - ``finish_reason``, ``stop_reason``: why it ended, and what text or token stopped it.
    - ``logprobs``: of each token of the output; None: not asked for.
    - ``prompt_token_ids``, ``prompt_logprobs``: of the prompt; the first token has no log-probability.
    - ``cached_tokens``: of the prompt, those that were not computed again.
    - ``draft_tokens``, ``accepted_draft_tokens``: verified by speculative decoding, and right.
    - ``hidden_states``: of each token of the prompt and of the output but its last, if asked for: float32 numbers,
      little-endian.
    - ``vector``: of an input that nothing follows: float32 numbers, little-endian.
    - ``features``: what features add to the reply, by their names.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_token_ids: list[int] = field(default_factory=list[int])
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    hidden_states: list[bytes] = field(default_factory=list[bytes])
    vector: bytes | None = None
    features: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 3] + "..."
        counts = f"{len(self.prompt_token_ids)} tokens in, {len(self.token_ids)} out"
        return f"Completion({text!r}, finish_reason={self.finish_reason!r}, {counts})"
