"""Requests that sample more texts than they return: the likeliest ones go back."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import Frontend, GenerateInput, OutputDelta
from fwk.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class BestOfInput(GenerateInput):
    """One prompt of which ``width`` texts are sampled, and the ``n`` with the highest log-probability a token kept."""

    width: int = 1


def plain(item: GenerateInput) -> dict[str, Any]:
    """The fields of an input."""
    return {part.name: getattr(item, part.name) for part in fields(GenerateInput)}


def best_of(item: GenerateInput, width: int) -> BestOfInput:
    """``item``, its ``n`` texts chosen from ``width``."""
    return BestOfInput(**plain(item), width=width)


async def ranked(frontend: Frontend, item: BestOfInput) -> AsyncGenerator[list[OutputDelta], None]:
    """The whole texts, best first, when all are done. Closing it aborts them."""
    wanted = item.sampling.logprobs
    sampling = msgspec.structs.replace(item.sampling, logprobs=wanted or 0)
    given = GenerateInput(**plain(replace(item, sampling=sampling, n=item.width)))
    wholes: dict[int, OutputDelta] = {}
    async with aclosing(frontend.generate(given)) as steps:
        async for deltas in steps:
            for delta in deltas:
                if delta.finish_reason in ("error", "abort"):
                    raise delta.failure()
                wholes[delta.index] = _joined(wholes.get(delta.index), delta)
    if len(wholes) < item.width or any(whole.finish_reason is None for whole in wholes.values()):
        raise RequestFailed("the engine ended the request before it was finished")
    prompt_logprobs = wholes[0].prompt_logprobs  # computed for the first alone
    best = sorted(wholes.values(), key=lambda whole: -_mean(whole.logprobs or []))[: item.n]
    for index, whole in enumerate(best):
        whole.index, whole.prompt_logprobs = index, prompt_logprobs if index == 0 else None
        if wanted is None:
            whole.logprobs = None
    yield best


def _mean(entries: list[TokenLogprobs]) -> float:
    return sum(max(entry.logprob, -9999.0) for entry in entries) / max(len(entries), 1)


def _joined(whole: OutputDelta | None, delta: OutputDelta) -> OutputDelta:
    if whole is None:
        return replace(delta, token_ids=list(delta.token_ids), logprobs=list(delta.logprobs or []))
    whole.text += delta.text
    whole.token_ids += delta.token_ids
    whole.logprobs = [] if whole.logprobs is None else whole.logprobs
    whole.logprobs += delta.logprobs or []
    whole.finish_reason, whole.stop_reason = delta.finish_reason, delta.stop_reason
    whole.prompt_logprobs = whole.prompt_logprobs if delta.prompt_logprobs is None else delta.prompt_logprobs
    whole.cached_tokens = max(whole.cached_tokens, delta.cached_tokens)
    whole.num_output_tokens = delta.num_output_tokens
    whole.draft_tokens, whole.accepted_draft_tokens = delta.draft_tokens, delta.accepted_draft_tokens
    return whole
