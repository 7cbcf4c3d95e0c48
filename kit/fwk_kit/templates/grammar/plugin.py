"""Constrained output by comparing beginnings: one of several given texts."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext
from fwk.types import GrammarRequest

if TYPE_CHECKING:
    from collections.abc import Sequence


class MineGrammars(GrammarBackend):
    """Compiles nothing: the texts are the grammar."""

    def compile(self, request: GrammarRequest) -> Choice:
        try:
            texts = json.loads(request.source)
        except ValueError as error:
            raise InvalidRequest(f"the choices are not JSON: {error}") from None
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequest("the choices must be a list of texts, with at least one of them")
        return Choice(self.context, [text.encode() for text in texts], [b""])


class Choice(Grammar):
    """What has been said so far, after each token."""

    def __init__(self, context: GrammarContext, texts: Sequence[bytes], said: list[bytes]) -> None:
        self._context, self._texts, self._said = context, texts, said
        self._is_over = False

    def _fits(self, said: bytes) -> bool:
        return any(text.startswith(said) for text in self._texts)

    def fill_mask(self, row: np.ndarray) -> None:
        bits = np.zeros(len(row) * 32, bool)
        if not self._is_over:
            for token_id, piece in enumerate(self._context.token_bytes):
                bits[token_id] = bool(piece) and self._fits(self._said[-1] + piece)
            if self._said[-1] in self._texts:
                bits[list(self._context.eos_token_ids)] = True
        row[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        if not self._is_over and token_id in self._context.eos_token_ids and self._said[-1] in self._texts:
            self._is_over = True
            self._said.append(self._said[-1])
            return True
        piece = self._context.token_bytes[token_id]
        if self._is_over or not piece or not self._fits(self._said[-1] + piece):
            return False
        self._said.append(self._said[-1] + piece)
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            del self._said[-num_tokens:]
            self._is_over = False

    def fork(self) -> Choice:
        twin = Choice(self._context, self._texts, list(self._said))
        twin._is_over = self._is_over
        return twin

    @property
    def is_finished(self) -> bool:
        said = self._said[-1]
        return self._is_over or (said in self._texts and sum(text.startswith(said) for text in self._texts) == 1)
