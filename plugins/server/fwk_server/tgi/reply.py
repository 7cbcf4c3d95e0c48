"""What goes back: tokens, details, and the events of a stream."""

from __future__ import annotations

import codecs
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import Frontend, OutputDelta, TextTools
from fwk.types import TokenLogprobs
from fwk_server._common.replies import event
from fwk_server.tgi.request import Call

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TokenWriter:
    """Tokens of one sequence as TGI shows them; a character of several tokens is the last one's text."""

    def __init__(self, text: TextTools) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def token(self, entry: TokenLogprobs) -> dict[str, Any]:
        """The next token of the sequence."""
        is_special = self._is_special(entry.token_id)
        data = self._text.token_bytes(entry.token_id)
        text = data.decode("utf-8", "replace") if is_special else self._decoder.decode(data)
        return {"id": entry.token_id, "text": text, "logprob": _finite(entry.logprob), "special": is_special}

    def top(self, entry: TokenLogprobs) -> list[dict[str, Any]]:
        """The likeliest tokens at its place."""
        return [
            {
                "id": token_id,
                "text": self._text.token_bytes(token_id).decode("utf-8", "replace"),
                "logprob": _finite(logprob),
                "special": self._is_special(token_id),
            }
            for token_id, logprob in entry.top
        ]

    def prefill(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> list[dict[str, Any]]:
        """The prompt; nothing predicts its first token."""
        return [
            {
                "id": token_id,
                "text": self._text.token_bytes(token_id).decode("utf-8", "replace"),
                "logprob": None if entry is None else _finite(entry.logprob),
            }
            for token_id, entry in zip(token_ids, entries, strict=True)
        ]

    def _is_special(self, token_id: int) -> bool:
        with_special = self._text.decode([token_id], skip_special_tokens=False)
        return bool(with_special) and not self._text.decode([token_id], skip_special_tokens=True)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


@dataclass(slots=True)
class GeneratedText:
    """One sequence as far as it has come."""

    texts: list[str] = field(default_factory=list[str])
    scores: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])
    num_tokens: int = 0
    reason: str = ""
    prompt_scores: list[TokenLogprobs | None] = field(default_factory=list["TokenLogprobs | None"])

    def add(self, delta: OutputDelta) -> None:
        """Raises ``InvalidRequest`` or ``RequestFailed`` when the engine gave the sequence up."""
        if delta.finish_reason in ("error", "abort"):
            raise delta.failure()
        self.texts.append(delta.text)
        self.scores += delta.logprobs or []
        self.num_tokens += len(delta.token_ids)
        if delta.prompt_logprobs is not None:
            self.prompt_scores = delta.prompt_logprobs
        if delta.finish_reason == "length":
            self.reason = "length"
        elif delta.finish_reason is not None:
            self.reason = "stop_sequence" if isinstance(delta.stop_reason, str) else "eos_token"

    @property
    def mean_logprob(self) -> float:
        return sum(_finite(entry.logprob) for entry in self.scores) / max(len(self.scores), 1)


async def complete(call: Call, frontend: Frontend) -> dict[str, Any]:
    """The reply in one piece. Of several sequences, the one of the highest mean log-probability."""
    texts_by_index = [GeneratedText() for _ in range(call.item.n)]
    async with aclosing(frontend.generate(call.item)) as steps:
        async for deltas in steps:
            for delta in deltas:
                texts_by_index[delta.index].add(delta)
    if not all(generated.reason for generated in texts_by_index):
        raise RequestFailed("the engine ended the request before it was finished")
    best = max(texts_by_index, key=lambda generated: generated.mean_logprob) if call.item.n > 1 else texts_by_index[0]
    reply: dict[str, Any] = {"generated_text": call.prefix + "".join(best.texts)}
    if call.parameters.has_details:
        prompt_scores = texts_by_index[0].prompt_scores  # only the first sequence's are computed
        reply["details"] = _details(call, frontend, best, prompt_scores)
        if call.item.n > 1:
            reply["details"]["best_of_sequences"] = [
                {"generated_text": call.prefix + "".join(other.texts)} | _details(call, frontend, other, prompt_scores)
                for other in texts_by_index
                if other is not best
            ]
    return reply


def _details(
    call: Call, frontend: Frontend, generated: GeneratedText, prompt_scores: list[TokenLogprobs | None]
) -> dict[str, Any]:
    writer = TokenWriter(frontend.text)
    details: dict[str, Any] = {
        "finish_reason": generated.reason,
        "generated_tokens": generated.num_tokens,
        "seed": call.seed,
        "prefill": writer.prefill(call.item.prompt_token_ids, prompt_scores) if prompt_scores else [],
        "tokens": [writer.token(entry) for entry in generated.scores],
    }
    if call.parameters.top_n_tokens:
        details["top_tokens"] = [writer.top(entry) for entry in generated.scores]
    return details


async def events(call: Call, frontend: Frontend) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events: one per token, the last with the whole text and the details."""
    writer, generated = TokenWriter(frontend.text), GeneratedText()
    async with aclosing(frontend.generate(call.item)) as steps:
        async for deltas in steps:
            frames: list[bytes] = []
            for delta in deltas:
                first = generated.num_tokens + 1
                generated.add(delta)
                frames += _frames(call, writer, generated, delta, first)
            if frames:
                yield b"".join(frames)
    if not generated.reason:
        raise RequestFailed("the engine ended the request before it was finished")


def _frames(call: Call, writer: TokenWriter, generated: GeneratedText, delta: OutputDelta, first: int) -> list[bytes]:
    """An event for each token of a delta; ``first`` is the number of its first one."""
    frames: list[dict[str, Any]] = []
    for index, entry in enumerate(delta.logprobs or [], first):
        frame: dict[str, Any] = {"index": index, "token": writer.token(entry), "generated_text": None, "details": None}
        if call.parameters.top_n_tokens:
            frame["top_tokens"] = writer.top(entry)
        frames.append(frame)
    if generated.reason:
        if not frames:
            raise RequestFailed("the engine ended the request without a last token")
        frames[-1]["generated_text"] = call.prefix + "".join(generated.texts)
        frames[-1]["details"] = {
            "finish_reason": generated.reason,
            "generated_tokens": generated.num_tokens,
            "seed": call.seed,
            "input_length": len(call.item.prompt_token_ids),
        }
    return [event(frame) for frame in frames]
