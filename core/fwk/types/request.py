"""A request as the engine gets it, and the small things it answers with."""

from __future__ import annotations

from typing import Literal

import msgspec

from fwk.types.sampling import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


class Request(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """What the caller asked, already tokenised and checked.

    ``request_id`` is ours (unique in the engine's life); the client's own id is only a label in the API process.
    ``sampling.max_tokens`` is set. ``cache_namespace`` separates K/V that must not be shared: it holds whatever
    changes K/V or must stay private (LoRA adapter, cache salt, multimodal content).
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    n: int = 1
    priority: int = 0
    cache_namespace: str = ""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probability of one token, and of the most likely ones at its place (most likely first)."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]] = []
