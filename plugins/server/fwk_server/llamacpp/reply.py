"""What goes back: llama.cpp's bodies and events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fwk.interfaces.dialect import Frontend, OutputDelta, TextTools
from fwk.types import TokenLogprobs
from fwk_server._common.chat.outputs import Choice, Usage, run
from fwk_server._common.completion import CompletionCall
from fwk_server._common.replies import event
from fwk_server.llamacpp.request import LlamaCall

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Sequence:
    """One sequence of a call: what it has made, and when."""

    def __init__(self, call: CompletionCall, prompt: int, index: int, frontend: Frontend, begun: float) -> None:
        self.choice = Choice()
        self._call = call
        self._item = call.items[prompt]
        self._number = prompt * call.n + index
        self._frontend = frontend
        self._begun = begun
        self._first = 0.0
        self._num_cached = 0

    def add(self, delta: OutputDelta) -> None:
        self._first = self._first or time.monotonic()
        self._num_cached = max(self._num_cached, delta.cached_tokens)
        self.choice.add(delta)

    def chunk(self, delta: OutputDelta) -> dict[str, Any]:
        """An event before the end."""
        chunk: dict[str, Any] = {
            "index": self._number,
            "content": delta.text,
            "tokens": delta.token_ids,
            "stop": False,
            "id_slot": -1,
            "tokens_predicted": len(self.choice.token_ids),
            "tokens_evaluated": len(self._item.prompt_token_ids),
        }
        if self._call.body.logprobs is not None:
            chunk["completion_probabilities"] = _probabilities(delta.logprobs or [], self._frontend.text)
        return chunk

    def is_late(self, seconds: float) -> bool:
        """Whether it has a whole line and has written for longer, or has ended."""
        has_line = any("\n" in text for text in self.choice.texts)
        is_over = has_line and time.monotonic() - self._first > seconds
        return is_over or self.choice.finish_reason is not None

    def whole(self, asked: LlamaCall) -> dict[str, Any]:
        """The reply in one piece."""
        choice = self.choice
        reply = self.end("".join(choice.texts), choice.token_ids if asked.returns_tokens else [])
        if self._call.body.logprobs is not None:
            reply["completion_probabilities"] = _probabilities(choice.logprobs, self._frontend.text)
        return reply

    def end(self, content: str, tokens: list[int]) -> dict[str, Any]:
        """The last event, or the reply: ``content`` and all that is told of the sequence."""
        choice, num_prompt = self.choice, len(self._item.prompt_token_ids)
        word = choice.stop_reason if isinstance(choice.stop_reason, str) else ""
        return {
            "index": self._number,
            "content": content,
            "tokens": tokens,
            "id_slot": -1,
            "stop": True,
            "model": self._frontend.card.name,
            "tokens_predicted": len(choice.token_ids),
            "tokens_evaluated": num_prompt,
            "generation_settings": settings(self._item.sampling, self._frontend),
            "prompt": self._frontend.text.decode(self._item.prompt_token_ids, skip_special_tokens=False),
            "has_new_line": any("\n" in text for text in choice.texts),
            "truncated": False,
            "stop_type": "limit" if choice.finish_reason in ("length", None) else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": num_prompt + len(choice.token_ids),
            "timings": self._timings(num_prompt),
        }

    def _timings(self, num_prompt: int) -> dict[str, Any]:
        """Milliseconds as a client of this server sees them, waiting included."""
        now = time.monotonic()
        first = self._first or now
        num_tokens, num_computed = len(self.choice.token_ids), num_prompt - self._num_cached
        return {
            "cache_n": self._num_cached,
            **_rate("prompt", num_computed, first - self._begun),
            **_rate("predicted", num_tokens, now - first),
        }


def _rate(name: str, count: int, seconds: float) -> dict[str, Any]:
    ms = 1000 * seconds
    return {
        f"{name}_n": count,
        f"{name}_ms": round(ms, 3),
        f"{name}_per_token_ms": round(ms / max(count, 1), 3),
        f"{name}_per_second": round(count / seconds, 3) if seconds > 0 else 0.0,
    }


def settings(sampling: Any, frontend: Frontend) -> dict[str, Any]:
    """How a request is sampled, under llama.cpp's names."""
    most = -1 if sampling.max_tokens is None else sampling.max_tokens
    return {
        "n_ctx": frontend.card.max_model_len,
        "n_predict": most,
        "max_tokens": most,
        "seed": -1 if sampling.seed is None else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "n_probs": sampling.logprobs or 0,
        **sampling.extra,
    }


def _probabilities(entries: list[TokenLogprobs], text: TextTools) -> list[dict[str, Any]]:
    return [
        _token(entry.token_id, entry.logprob, text)
        | {"top_logprobs": [_token(token_id, logprob, text) for token_id, logprob in entry.top]}
        for entry in entries
    ]


def _token(token_id: int, logprob: float, text: TextTools) -> dict[str, Any]:
    data = text.token_bytes(token_id)
    return {
        "id": token_id,
        "token": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": max(logprob, LOWEST),
    }


async def complete(asked: LlamaCall, frontend: Frontend) -> Any:
    """The reply in one piece; of several sequences, an array."""
    found = _sequences(asked.call, frontend)
    async with aclosing(_steps(asked, found, frontend)) as steps:
        async for _ in steps:
            pass
    replies = [_selected(sequence.whole(asked), asked) for sequences in found for sequence in sequences]
    return replies[0] if len(replies) == 1 else replies


async def events(asked: LlamaCall, frontend: Frontend) -> AsyncGenerator[bytes, None]:
    """The reply as server-sent events; the last of each sequence says why it ended."""
    found = _sequences(asked.call, frontend)
    async with aclosing(_steps(asked, found, frontend)) as steps:
        async for prompt, deltas in steps:
            frames: list[bytes] = []
            for delta in deltas:
                sequence = found[prompt][delta.index]
                if (delta.text or delta.token_ids) and not asked.is_prompt_only:
                    frames.append(event(sequence.chunk(delta)))
                if delta.finish_reason is not None:
                    frames.append(event(_selected(sequence.end("", []), asked)))
            if frames:
                yield b"".join(frames)
    for sequences in found:
        for sequence in sequences:
            if sequence.choice.finish_reason is None:  # its time was over
                yield event(_selected(sequence.end("", []), asked))


async def _steps(
    asked: LlamaCall, found: list[list[Sequence]], frontend: Frontend
) -> AsyncGenerator[tuple[int, list[OutputDelta]], None]:
    """What the engine makes, added to the sequences, until all have ended or had their time."""
    async with aclosing(run(frontend, asked.call.items, Usage(asked.call.items))) as steps:
        async for prompt, deltas in steps:
            for delta in deltas:
                if asked.is_prompt_only:
                    delta.text, delta.token_ids = "", []
                    delta.logprobs = None
                    delta.finish_reason = delta.finish_reason and "length"
                found[prompt][delta.index].add(delta)
            yield prompt, deltas
            if asked.max_seconds and all(each.is_late(asked.max_seconds) for every in found for each in every):
                return


def _selected(reply: dict[str, Any], asked: LlamaCall) -> dict[str, Any]:
    """The fields a client asked for; ``a/b`` stands for ``b`` of ``a``. One that is not there is left out."""
    if not asked.returned:
        return reply
    chosen: dict[str, Any] = {}
    for path in asked.returned:
        value: Any = reply
        *_, name = parts = path.split("/")
        for part in parts:
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            chosen[name] = value
    return chosen


def _sequences(call: CompletionCall, frontend: Frontend) -> list[list[Sequence]]:
    begun = time.monotonic()
    return [
        [Sequence(call, prompt, index, frontend, begun) for index in range(call.n)] for prompt in range(len(call.items))
    ]
