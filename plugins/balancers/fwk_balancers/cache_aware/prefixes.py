"""What the prefix cache of each replica may hold, as far as the prompts tell that were sent to it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import islice

CHUNK = 16
"""Tokens that are remembered together."""

MAX_CHUNKS = 4096
"""Of a prompt: what is behind them is not looked at, so that a choice takes a few milliseconds at most."""


def chunks_of(namespace: str, token_ids: Sequence[int]) -> list[int]:
    """A hash for each full chunk of a prompt, which is also that of all tokens before it."""
    found: list[int] = []
    last = hash(namespace)
    count = min(len(token_ids) // CHUNK, MAX_CHUNKS)
    data = array("q", token_ids[: count * CHUNK]).tobytes()
    size = CHUNK * array("q").itemsize
    for start in range(0, count * size, size):
        last = hash((last, data[start : start + size]))
        found.append(last)
    return found


class Prefixes:
    """Chunks that were sent to one replica, the ones used last at the end; the others are forgotten as it does."""

    def __init__(self, max_tokens: int) -> None:
        self._max = max_tokens // CHUNK
        self._chunks: dict[int, None] = {}

    def __len__(self) -> int:
        return len(self._chunks)

    def match(self, chunks: Sequence[int]) -> int:
        """How many of a prompt's first chunks are among them."""
        return next((index for index, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))

    def add(self, chunks: Sequence[int]) -> None:
        """Remember a prompt; its end is forgotten before its beginning."""
        for chunk in reversed(chunks):
            self._chunks.pop(chunk, None)
            self._chunks[chunk] = None
        for chunk in list(islice(self._chunks, max(0, len(self._chunks) - self._max))):
            del self._chunks[chunk]

    def clear(self) -> None:
        self._chunks.clear()
