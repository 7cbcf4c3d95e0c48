"""What the engine generates: run, counted and, for replies in one piece, collected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import Frontend, GenerateInput, OutputDelta, joined_reply
from fwk.types import TokenLogprobs
from fwk_server._common.best_of import BestOfInput, ranked
from fwk_server._common.healing import HealedInput, without_prefix
from fwk_server._common.transfers import transfer_of

Steps = AsyncGenerator[tuple[int, list[OutputDelta]], None]

_QUEUE_LEN = 256


@dataclass(slots=True)
class Choice:
    """One finished sequence."""

    texts: list[str] = field(default_factory=list[str])
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    hidden_states: list[bytes] = field(default_factory=list[bytes])
    reply: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])  # of features' parts
    transfer: dict[str, Any] | None = None  # what tells another server where K/V of the prompt are

    def add(self, delta: OutputDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if delta.logprobs:
            self.logprobs += delta.logprobs
        if delta.hidden_states is not None:
            self.hidden_states += delta.hidden_states
        if delta.reply:
            self.reply = joined_reply(self.reply, delta.reply)
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason
            self.transfer = transfer_of(delta)


def of_features(told: OutputDelta | Choice) -> dict[str, Any]:
    """The fields of a reply's choice that hold what features add to it."""
    return {"features": told.reply} if told.reply else {}


class Usage:
    """The token counts of a request with one or more prompts."""

    def __init__(self, items: Sequence[GenerateInput], counts_output: bool = True) -> None:
        self._counts_output = counts_output
        self.prompt_tokens = sum(len(item.prompt_token_ids) for item in items)
        self.reasoning_tokens: int | None = None  # None: nobody tells them from others
        self._cached: dict[int, int] = {}
        self._output: dict[tuple[int, int], int] = {}
        self._drafts: dict[tuple[int, int], tuple[int, int]] = {}  # verified and accepted

    def count(self, prompt: int, delta: OutputDelta) -> None:
        if self._counts_output:
            self._output[prompt, delta.index] = delta.num_output_tokens
        if delta.draft_tokens:
            self._drafts[prompt, delta.index] = delta.draft_tokens, delta.accepted_draft_tokens
        if delta.cached_tokens:
            self._cached[prompt] = max(delta.cached_tokens, self._cached.get(prompt, 0))

    def body(self) -> dict[str, Any]:
        completion_tokens = sum(self._output.values())
        body: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached.values())},
        }
        details = {} if self.reasoning_tokens is None else {"reasoning_tokens": self.reasoning_tokens}
        if self._drafts:  # OpenAI's names for what it does with a predicted output
            drafted, accepted = (sum(counts) for counts in zip(*self._drafts.values(), strict=True))
            details |= {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
        if details:
            body["completion_tokens_details"] = details
        return body


async def run(frontend: Frontend, items: Sequence[GenerateInput], usage: Usage) -> Steps:
    """Run checked inputs, several at once. Yields (number of the prompt, deltas) until all have finished.

    Closing it aborts what still runs. A sequence that the engine failed or aborted fails the whole request.
    """
    unfinished = {(prompt, index) for prompt, item in enumerate(items) for index in range(item.n)}
    steps = _one(frontend, items[0]) if len(items) == 1 else _several(frontend, items)
    try:
        async for prompt, deltas in steps:
            for delta in deltas:
                usage.count(prompt, delta)
                if delta.finish_reason is not None:
                    _raise_failure(delta)
                    unfinished.discard((prompt, delta.index))
            yield prompt, deltas
    finally:
        await steps.aclose()
    if unfinished:
        raise RequestFailed("the engine ended the request before it was finished")


async def collect(
    frontend: Frontend,
    items: Sequence[GenerateInput],
    usage: Usage,
    watch: Callable[[OutputDelta], object] | None = None,
) -> list[list[Choice]]:
    """Run inputs to their end: the choices of each prompt. ``watch`` sees every delta."""
    choices = [[Choice() for _ in range(item.n)] for item in items]
    async with aclosing(run(frontend, items, usage)) as steps:
        async for prompt, deltas in steps:
            for delta in deltas:
                choices[prompt][delta.index].add(delta)
                if watch is not None:
                    watch(delta)
    return choices


def _raise_failure(delta: OutputDelta) -> None:
    if delta.finish_reason in ("error", "abort"):
        raise delta.failure()


async def _one(frontend: Frontend, item: GenerateInput) -> Steps:
    source = _generate(frontend, item)
    try:
        async for deltas in source:
            yield 0, deltas
    finally:
        await source.aclose()


async def _several(frontend: Frontend, items: Sequence[GenerateInput]) -> Steps:
    """Merge the outputs of several inputs as they come; the first error ends all of them."""
    queue: asyncio.Queue[tuple[int, list[OutputDelta] | None]] = asyncio.Queue(_QUEUE_LEN)

    async def pump(prompt: int, item: GenerateInput) -> None:
        source = _generate(frontend, item)
        try:
            async for deltas in source:
                await queue.put((prompt, deltas))
        finally:
            await source.aclose()
            if not cancelled:
                await queue.put((prompt, None))

    cancelled = False
    tasks = [asyncio.ensure_future(pump(prompt, item)) for prompt, item in enumerate(items)]
    running = len(tasks)
    try:
        while running:
            prompt, deltas = await queue.get()
            if deltas is None:
                running -= 1
                await tasks[prompt]  # raises what ended it
            else:
                yield prompt, deltas
    finally:
        cancelled = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _generate(frontend: Frontend, item: GenerateInput) -> AsyncGenerator[list[OutputDelta], None]:
    if isinstance(item, BestOfInput):
        return ranked(frontend, item)
    if isinstance(item, HealedInput):
        return without_prefix(frontend, item)
    # Declared as an iterator, promised to be closable: closing it is how a request is aborted.
    return cast(AsyncGenerator[list[OutputDelta], None], frontend.generate(item))
