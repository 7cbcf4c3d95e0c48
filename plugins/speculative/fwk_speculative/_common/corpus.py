"""Texts of a file that drafts are taken from, in tokens, with an index of every two that follow one another."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from typing import cast

import numpy as np

from fwk.errors import ConfigError
from fwk_files.regular import open_regular
from fwk_speculative._common.matches import MAX_PLACES, longer_matches


class Corpus:
    """Tokens of texts, one after another, with -1 after each."""

    def __init__(self, texts: Iterator[list[int]], most: int, where: str) -> None:
        """most: tokens; where: for an error of a corpus with more."""
        parts: list[np.ndarray] = []
        length = 0
        for tokens in texts:
            parts.append(np.array([*tokens, -1], np.int32))
            length += len(tokens)
            if length > most:
                raise ConfigError(
                    f"{where} holds more than {most} tokens: shorten it or raise "
                    "--speculative-ngram-external-corpus-max-tokens"
                )
        self.text = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        """[length] int32."""
        pairs = self._pair(self.text[:-1], self.text[1:])
        self._places = np.argsort(pairs, kind="stable")
        self._pairs = pairs[self._places]

    @staticmethod
    def _pair(first: np.ndarray, second: np.ndarray) -> np.ndarray:
        return (first.astype(np.int64) << 32) | (second.astype(np.int64) & 0xFFFFFFFF)

    def longest_match(self, end: np.ndarray) -> tuple[np.ndarray, int]:
        """``matches.longest_match`` of the texts, for matches of two tokens and more."""
        if len(end) < 2 or not len(self._pairs):
            return np.zeros(0, np.int64), 0
        wanted = self._pair(end[-2:-1], end[-1:])[0]
        first, last = (int(np.searchsorted(self._pairs, wanted, side)) for side in ("left", "right"))
        places = self._places[max(first, last - 16 * MAX_PLACES) : last] + 1  # of the last token
        return longer_matches(self.text, end, places[places < len(self.text) - 1], 2)


def read_corpus(path: str, encode: Callable[[str], list[int]], most: int) -> Corpus:
    """A file of JSON lines, each a text or an object with one under ``text``.

    Raises ``ConfigError`` naming the line.
    """
    flag = "--speculative-ngram-external-corpus-path"

    def texts() -> Iterator[list[int]]:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    found: object = json.loads(line)
                except (ValueError, RecursionError):
                    found = None
                if isinstance(found, dict):
                    found = cast("dict[str, object]", found).get("text")
                if not isinstance(found, str):
                    raise ConfigError(
                        f"{flag} {path}: line {number} is neither a JSON string nor an object with a string "
                        "under 'text'"
                    )
                yield encode(found)

    try:
        return Corpus(texts(), most, f"{flag} {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
