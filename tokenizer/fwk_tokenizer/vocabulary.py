"""What each token id stands for, in bytes."""

from __future__ import annotations

import json
from functools import cache, cached_property
from typing import Any

from tokenizers import Tokenizer

from fwk_tokenizer.lengths import max_characters


@cache
def byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the other bytes for 256 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    pairs = [(chr(byte), byte) for byte in printable]
    pairs += [(chr(256 + i), byte) for i, byte in enumerate(others)]
    return dict(pairs)


class Vocabulary:
    """Bytes of every token, and which tokens are special.

    ``is_byte_level`` tells whether a text is just its tokens' bytes in a row; otherwise (sentencepiece) spaces at
    the start and byte fall-back need the tokeniser's own decoder.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self.is_byte_level = decoder is not None and _is_byte_level(json.loads(decoder.__getstate__()))
        added = tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = [token.content for token in added.values() if token.special]
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def max_characters(self) -> int | None:
        """Of a text, in one token; None when there is no such number."""
        return max_characters(_state(self._tokenizer), byte_of_char())

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an id that has no token (a padded vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._lookup(token_id)
        return known

    def all_bytes(self, vocab_size: int) -> list[bytes]:
        """``token_bytes`` of the ids below ``vocab_size``, in a fraction of the time that asking for each takes."""
        found = [b""] * vocab_size
        for piece, token_id in self._tokenizer.get_vocab().items():
            if token_id < vocab_size:
                found[token_id] = self._added.get(token_id) or self._of_piece(piece)
        return found

    def _lookup(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added
        piece = self._tokenizer.id_to_token(token_id)
        return b"" if piece is None else self._of_piece(piece)

    def _of_piece(self, piece: str) -> bytes:
        if self.is_byte_level:
            try:
                return bytes(map(byte_of_char().__getitem__, piece))
            except KeyError:
                return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _state(tokenizer: Tokenizer) -> dict[str, Any]:
    """What ``max_characters`` reads of a tokenizer.json; all of one is ten times as long, for its merges."""
    parts = {"normalizer": tokenizer.normalizer, "pre_tokenizer": tokenizer.pre_tokenizer}
    added = tokenizer.get_added_tokens_decoder().values()
    return {
        **{name: part and json.loads(part.__getstate__()) for name, part in parts.items()},
        "added_tokens": [{"content": x.content, "lstrip": x.lstrip, "rstrip": x.rstrip} for x in added],
        "model": {
            "type": type(tokenizer.model).__name__,
            "byte_fallback": getattr(tokenizer.model, "byte_fallback", False),
            "vocab": tokenizer.get_vocab(with_added_tokens=False),
        },
    }


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if not decoder:
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(part) for part in decoder.get("decoders", []))
    return decoder.get("type") == "ByteLevel"
