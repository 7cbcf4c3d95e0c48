"""Log-probabilities in the three shapes the API has: chat, legacy completions, and vLLM's prompt_logprobs.

There is one entry for every token that was generated and counted in ``usage``, also for those whose text a stop string
trimmed away: entries say what the model chose, the text says what is left of it. Their ``text_offset`` is the end of
the text.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from fwk.interfaces.dialect import TextTools
from fwk.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say; OpenAI's own marker for "very unlikely"."""


class TokenTexts:
    """The strings and bytes of tokens, cached: a stream with log-probabilities asks for the same few all the time."""

    def __init__(self, text: TextTools) -> None:
        self._text = text
        self.string = lru_cache(maxsize=1 << 16)(self._string)
        self.visible = lru_cache(maxsize=1 << 16)(self._visible)
        self.bytes = lru_cache(maxsize=1 << 16)(self._bytes)

    def _bytes(self, token_id: int) -> list[int]:
        return list(self._text.token_bytes(token_id))

    def _string(self, token_id: int) -> str:
        return self._text.token_bytes(token_id).decode("utf-8", "replace")

    def _visible(self, token_id: int) -> bytes:
        """The token's bytes in text without special tokens."""
        if not (self._text.has_tokenizer and self._text.decode([token_id], skip_special_tokens=True)):
            return b""
        return self._text.token_bytes(token_id)


def finite(logprob: float) -> float:
    """A number JSON can hold."""
    return logprob if math.isfinite(logprob) else LOWEST


def chat_logprobs(tokens: TokenTexts, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """The ``logprobs`` of a chat choice or chunk."""
    content = []
    for entry in entries:
        item = _chat_token(tokens, entry.token_id, entry.logprob)
        item["top_logprobs"] = [_chat_token(tokens, token_id, value) for token_id, value in entry.top[:num_top]]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_token(tokens: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.string(token_id), "logprob": finite(logprob), "bytes": tokens.bytes(token_id)}


class LegacyLogprobs:
    """Writes the ``logprobs`` of one completion choice, whole or piece by piece.

    A token's offset is the number of characters before it, counted over the tokens' bytes: the tokens inside a
    character that takes several all get that character's offset.
    """

    def __init__(self, tokens: TokenTexts, num_top: int, skip_special_tokens: bool) -> None:
        self._tokens = tokens
        self._num_top = num_top
        self._skips_special = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def start_at(self, offset: int) -> None:
        """The tokens that follow begin at character ``offset``."""
        self._decoder.reset()
        self._offset = offset

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], text_len: int
    ) -> dict[str, Any]:
        """The part of an echoed prompt of ``text_len`` characters; nothing predicts its first token."""
        known = [*entries, *([None] * (len(token_ids) - len(entries)))]
        piece = self._write(list(zip(token_ids, known, strict=True)), text_len)
        self.start_at(text_len)
        return piece

    def output(self, entries: Sequence[TokenLogprobs], text_len: int | None = None) -> dict[str, Any]:
        """The next generated tokens; ``text_len`` is the length of the whole text once that is known."""
        return self._write([(entry.token_id, entry) for entry in entries], text_len)

    def _write(self, entries: Sequence[tuple[int, TokenLogprobs | None]], text_len: int | None) -> dict[str, Any]:
        offsets: list[int] = []
        for token_id, _ in entries:
            offsets.append(self._offset if text_len is None else min(self._offset, text_len))
            self._offset += len(self._decoder.decode(self._visible(token_id)))
        return {
            "text_offset": offsets,
            "token_logprobs": [None if entry is None else finite(entry.logprob) for _, entry in entries],
            "tokens": [self._tokens.string(token_id) for token_id, _ in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for _, entry in entries],
        }

    def _visible(self, token_id: int) -> bytes:
        if self._skips_special:
            return self._tokens.visible(token_id)
        return bytes(self._tokens.bytes(token_id))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one. Of tokens that look the same the likeliest stays."""
        top: dict[str, float] = {}
        for token_id, logprob in (*entry.top[: self._num_top], (entry.token_id, entry.logprob)):
            top.setdefault(self._tokens.string(token_id), finite(logprob))
        return top


def joined(first: dict[str, Any] | None, second: dict[str, Any]) -> dict[str, Any]:
    """Two consecutive pieces of legacy log-probabilities as one."""
    return second if first is None else {name: first[name] + second[name] for name in second}


def prompt_logprobs(
    tokens: TokenTexts, entries: Sequence[TokenLogprobs | None], num_top: int
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's shape: per prompt token the chosen and the likeliest ids, each with log-probability, rank and text."""
    return [None if entry is None else _ranked(tokens, entry, num_top) for entry in entries]


def _ranked(tokens: TokenTexts, entry: TokenLogprobs, num_top: int) -> dict[str, dict[str, Any]]:
    ranked = [(entry.token_id, entry.logprob, entry.rank)]
    ranked += [(token_id, logprob, i + 1) for i, (token_id, logprob) in enumerate(entry.top[:num_top])]
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokens.string(token_id)}
        for token_id, logprob, rank in ranked
    }
