"""Tokens to text as they come."""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from fwk_tokenizer.vocabulary import Vocabulary


class TextStream(Protocol):
    """The text of one sequence of tokens: each new one's, which is empty while a character is unfinished."""

    def feed(self, token_id: int) -> str: ...

    def end(self) -> str:
        """What is left."""
        ...


class _ByteStream:
    """For byte-level vocabularies: an incremental UTF-8 decoder over the tokens' bytes; O(1) a token."""

    def __init__(self, vocabulary: Vocabulary, skip_special: bool) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._skipped = vocabulary.special_ids if skip_special else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._token_bytes(token_id))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


class _TokenizerStream:
    """For other vocabularies: the tokenizers library's own stream.

    It starts after the prompt's last tokens, so that a leading space is treated as in the middle of a text.
    """

    MAX_UNDECIDED = 16
    """Tokens that may stay without text before they are given out as they are: keeps the cost linear."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._undecided: list[int] = []

    def feed(self, token_id: int) -> str:
        self._undecided.append(token_id)
        text = self._stream.step(self._tokenizer, token_id)
        if text is not None:
            self._undecided.clear()
            return text
        if len(self._undecided) >= self.MAX_UNDECIDED:
            text = self.end()
            self._stream = DecodeStream(skip_special_tokens=self._skip_special)
            return text
        return ""

    def end(self) -> str:
        text = self._tokenizer.decode(self._undecided, skip_special_tokens=self._skip_special)
        self._undecided.clear()
        return text


class _NoStream:
    """Where there is no tokenizer."""

    def feed(self, token_id: int) -> str:
        return ""

    def end(self) -> str:
        return ""


def text_stream(tokenizer: Tokenizer | None, vocabulary: Vocabulary | None, skip_special: bool) -> TextStream:
    """For one sequence. skip_special: special tokens are no text. Without a tokenizer no token has any."""
    if tokenizer is None or vocabulary is None:
        return _NoStream()
    if vocabulary.is_byte_level:
        return _ByteStream(vocabulary, skip_special)
    return _TokenizerStream(tokenizer, skip_special)
