"""Strings of constrained JSON that repeat themselves: small models otherwise continue to the length limit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

MIN_REPEATED = 64
"""Tokens in a row that a string has said before, at one distance, until it is ended."""
MAX_PERIOD = 32
"""Tokens of what is repeated."""
_INTERVAL = 16
"""Tokens between two looks."""
_QUOTE = b'"'


class Quotes:
    """The tokens of a vocabulary with a quotation mark.

    ``within``: those that hold one. ``first``: those that begin with one, as bits of a mask, [ceil(vocab_size / 32)]
    int32: within a string these are the tokens that end it.
    """

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self.within = frozenset(i for i, piece in enumerate(token_bytes) if _QUOTE in piece)
        is_first = np.zeros(-(-len(token_bytes) // 32) * 32, np.uint8)
        is_first[[i for i in self.within if token_bytes[i].startswith(_QUOTE)]] = 1
        self.first = np.packbits(is_first, bitorder="little").view(np.int32)


class LoopGuard:
    """The tokens since the last quotation mark, and whether they go round in a circle."""

    __slots__ = ("_quotes", "_tokens", "is_looping")

    def __init__(self, quotes: Quotes, tokens: Sequence[int] = (), *, is_looping: bool = False) -> None:
        self._quotes = quotes
        self._tokens = list(tokens)
        self.is_looping = is_looping

    def accept(self, token_id: int) -> None:
        """A token that the text continues with."""
        if token_id in self._quotes.within:
            self._tokens.clear()
            self.is_looping = False
            return
        self._tokens.append(token_id)
        if len(self._tokens) % _INTERVAL == 0:
            self.is_looping = _is_periodic(self._tokens)

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens; past a quotation mark, all."""
        del self._tokens[-num_tokens:]
        self.is_looping = _is_periodic(self._tokens)

    def fork(self) -> LoopGuard:
        """An independent copy."""
        return LoopGuard(self._quotes, self._tokens, is_looping=self.is_looping)

    def narrow(self, row: np.ndarray) -> None:
        """Leave in a mask of a loop the tokens that end the string, where any may come."""
        ends = row & self._quotes.first[: len(row)]
        if ends.any():
            row[:] = ends


def _is_periodic(tokens: list[int]) -> bool:
    last = tokens[-MIN_REPEATED:]
    return len(tokens) > MIN_REPEATED and any(
        tokens[-MIN_REPEATED - period : -period] == last
        for period in range(1, min(MAX_PERIOD, len(tokens) - MIN_REPEATED) + 1)
    )
