"""What each token id stands for, in bytes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any, cast

from tokenizers import Tokenizer

from fwk.text.lengths import most_characters


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
    the start and byte fall-back need the tokeniser's own decoder. ``most_characters``: of a text, in one token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        state: dict[str, Any] = json.loads(tokenizer.to_str())
        self.is_byte_level = _is_byte_level(state.get("decoder"))
        added = cast(list[dict[str, Any]], state.get("added_tokens") or [])
        self.special_ids = frozenset(int(token["id"]) for token in added if token.get("special"))
        self.special_texts = [str(token["content"]) for token in added if token.get("special")]
        self._added = {int(token["id"]): str(token["content"]).encode() for token in added}
        self.most_characters = most_characters(state, byte_of_char())
        self._bytes: dict[int, bytes] = {}

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for an id that has no token (a padded vocabulary)."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._lookup(token_id)
        return known

    def _lookup(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self.is_byte_level:
            alphabet = byte_of_char()
            if all(char in alphabet for char in piece):
                return bytes(alphabet[char] for char in piece)
            return piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if not decoder:
        return False
    if decoder.get("type") == "Sequence":
        return any(_is_byte_level(part) for part in decoder.get("decoders", []))
    return decoder.get("type") == "ByteLevel"
