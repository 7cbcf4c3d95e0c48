"""Words that must not appear."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import SamplingParams
from fwk_sampling._common.rows import asked_rows, forbid


class Endings:
    """A trie over the words' tokens before the last one, read backwards from the end of the text.

    One walk of at most the longest word's length finds every word that the text has all but completed, however many
    words there are.
    """

    __slots__ = ("children", "forbidden")

    def __init__(self) -> None:
        self.children: dict[int, Endings] = {}
        self.forbidden: list[int] = []  # last tokens of the words whose earlier tokens lead here

    def add(self, word: Sequence[int]) -> None:
        node = self
        for token_id in reversed(word[:-1]):
            node = node.children.setdefault(token_id, Endings())
        node.forbidden.append(word[-1])

    def forbidden_after(self, text: Sequence[int]) -> list[int]:
        """The tokens that would complete a word right after ``text``."""
        found = list(self.forbidden)
        node: Endings | None = self
        for token_id in reversed(text):
            node = node.children.get(token_id)
            if node is None:
                break
            found += node.forbidden
        return found


class BadWords(LogitsProcessor):
    """Forbids the last token of a bad word wherever the text, prompt included, ends in the tokens before it.

    The same as transformers' ``NoBadWordsLogitsProcessor``.
    """

    def __init__(self, context: SamplingContext) -> None:
        super().__init__(context)
        self._words: dict[int, tuple[Endings, int]] = {}  # slot -> the words, and the longest one's length - 1

    def add(self, slot: int, params: SamplingParams) -> bool:
        words = [word for word in params.bad_word_token_ids if word]
        if not words:
            return False
        endings = Endings()
        for word in words:
            endings.add(word)
        self._words[slot] = endings, max(map(len, words)) - 1
        return True

    def remove(self, slot: int) -> None:
        del self._words[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        parts: list[tuple[int, np.ndarray]] = []
        for row, (endings, reach) in asked_rows(self._words, view):
            end = int(view.num_tokens[row])
            text = view.token_ids[view.slots[row], max(0, end - reach) : end].tolist()
            found = endings.forbidden_after(text)
            if found:
                parts.append((row, np.array(found, np.int64)))
        if parts:
            forbid(logits, parts, view, "bad_words", self.context)
        return logits
