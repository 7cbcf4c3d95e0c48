"""A grammar that begins behind a mark: any text may stand before it, which is no part of the answer.

A backend that has the kind ``delayed`` calls ``compile_delayed`` for it, and compiles the grammar of the answer itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple

import msgspec
import numpy as np

from fwk.interfaces.grammar import Grammar, GrammarBackend, GrammarContext, GrammarRequest
from fwk.types import GrammarKind

MAX_SPACE = 4
"""Tokens of white space that may stand before the first mark, and behind the last."""


class Delay(msgspec.Struct, frozen=True):
    """What the source of a ``delayed`` request says, as JSON.

    opens: tokens of the mark that the text before the answer begins with, where there is any; empty: it has begun.
    closes: tokens of each mark that ends it. follows: tokens that come behind it; empty: white space may.
    """

    kind: GrammarKind
    source: str
    opens: list[int]
    closes: list[list[int]]
    follows: list[int]


class _At(Enum):
    LEAD = auto()  # nothing but white space has come
    OPENING = auto()  # within the first mark
    BEFORE = auto()  # in the text that the grammar does not bind
    FOLLOWING = auto()  # within what comes behind the last mark
    GAP = auto()  # white space, before the answer
    ANSWER = auto()


class _State(NamedTuple):
    at: _At
    num_tokens: int = 0  # of it
    length: int = 0  # of the text that is not bound


class _Marks:
    """A delay, in a model's tokens. Shared by the states of all sequences that have it."""

    def __init__(self, delay: Delay, context: GrammarContext, answer: Grammar) -> None:
        self.delay, self.context = delay, context
        self.words = -(-context.vocab_size // 32)
        self.closing_ids = frozenset(ids[0] for ids in delay.closes if len(ids) == 1)
        self.closing_texts = [b"".join(context.token_bytes[i] for i in ids) for ids in delay.closes if len(ids) > 1]
        self.longest = max(map(len, self.closing_texts), default=0)
        pieces = context.token_bytes
        blanks = [i for i, piece in enumerate(pieces) if piece.isspace() and i not in context.special_ids]
        self.blanks = self._mask(blanks)
        self.free = ~self._mask(context.eos_token_ids)
        first = np.zeros(self.words, np.int32)
        answer.fill_mask(first)
        if (first & self.blanks).any():  # it would be the answer's own
            self.blanks = np.zeros(self.words, np.int32)

    def only(self, token_id: int) -> np.ndarray:
        """A mask that allows one token."""
        return self._mask((token_id,))

    def is_blank(self, token_id: int) -> bool:
        """Whether a token is white space that is not the answer's."""
        return bool(self.blanks.view(np.uint32)[token_id // 32] >> np.uint32(token_id % 32) & 1)

    def closing(self, text: bytes, piece: bytes) -> bytes | None:
        """What of ``piece`` stands behind a mark that ends in it, where ``text`` is before it; None when none does."""
        for mark in self.closing_texts:
            near = text[-len(mark) + 1 :] + piece
            place = near.find(mark)
            if place >= 0:
                return near[place + len(mark) :]
        return None

    def _mask(self, token_ids: Sequence[int]) -> np.ndarray:
        mask = np.zeros(self.words, np.uint32)
        ids = np.array(token_ids, np.int64)
        np.bitwise_or.at(mask, ids // 32, np.left_shift(np.uint32(1), (ids % 32).astype(np.uint32)))
        return mask.view(np.int32)


class DelayedGrammar(Grammar):
    """Follows the marks, and from the last one on the answer's own grammar."""

    def __init__(self, marks: _Marks, answer: Grammar, states: list[_State], text: bytes = b"") -> None:
        self._marks, self._answer, self._states = marks, answer, states
        self._text = bytearray(text)  # that is not bound

    def fill_mask(self, row: np.ndarray) -> None:
        marks, (at, count, _) = self._marks, self._states[-1]
        match at:
            case _At.ANSWER:
                self._answer.fill_mask(row)
            case _At.LEAD | _At.GAP:
                row[:] = marks.blanks if count < MAX_SPACE else 0
                if at is _At.LEAD:
                    row |= marks.only(marks.delay.opens[0])
                if at is _At.GAP or not count:
                    own = np.empty_like(row)
                    self._answer.fill_mask(own)
                    row |= own
            case _At.BEFORE:
                row[:] = marks.free
            case _At.OPENING:
                row[:] = marks.only(marks.delay.opens[count])
            case _At.FOLLOWING:
                row[:] = marks.only(marks.delay.follows[count])

    @classmethod
    def fill_masks(
        cls, grammars: Sequence[Grammar], rows: np.ndarray, places: Sequence[int]
    ) -> Mapping[int, Exception]:
        bound: dict[type[Grammar], list[int]] = {}
        others: list[int] = []
        for i, grammar in enumerate(grammars):
            assert isinstance(grammar, DelayedGrammar)
            is_bound = grammar._states[-1].at is _At.ANSWER
            (bound.setdefault(type(grammar._answer), []) if is_bound else others).append(i)
        raised: dict[int, Exception] = {}
        for kind, own in [*bound.items(), (Grammar, others)]:
            some = [grammars[i] if kind is Grammar else grammars[i]._answer for i in own]  # type: ignore[attr-defined]
            told = kind.fill_masks(some, rows, [places[i] for i in own]) if own else {}
            raised |= {own[i]: error for i, error in told.items()}
        return raised

    def accept(self, token_id: int) -> bool:
        following = self._after(token_id)
        if following is not None:
            self._states.append(following)
        return following is not None

    def _after(self, token_id: int) -> _State | None:
        marks, (at, count, length) = self._marks, self._states[-1]
        opens, follows = marks.delay.opens, marks.delay.follows
        if at in (_At.LEAD, _At.OPENING) and token_id == opens[count if at is _At.OPENING else 0]:
            num = count + 1 if at is _At.OPENING else 1
            return _State(_At.BEFORE if num == len(opens) else _At.OPENING, num if num < len(opens) else 0)
        if at in (_At.LEAD, _At.GAP) and count < MAX_SPACE and marks.is_blank(token_id):
            return _State(at, count + 1, length)
        if at in (_At.GAP, _At.ANSWER) or (at is _At.LEAD and not count):
            return _State(_At.ANSWER, 0, length) if self._answer.accept(token_id) else None
        if at is _At.FOLLOWING and token_id == follows[count]:
            is_last = count + 1 == len(follows)
            return _State(_At.ANSWER if is_last else at, 0 if is_last else count + 1, length)
        return self._before(token_id, length) if at is _At.BEFORE else None

    def _before(self, token_id: int, length: int) -> _State | None:
        marks = self._marks
        if token_id in marks.closing_ids:
            return self._closed(length)
        if token_id in marks.context.eos_token_ids:
            return None
        piece = marks.context.token_bytes[token_id]
        rest = marks.closing(bytes(self._text[max(0, length - marks.longest) : length]), piece)
        if rest is not None:
            return self._closed(length) if not rest.strip() else None
        if not marks.closing_texts:
            return _State(_At.BEFORE)
        self._text[length:] = piece
        return _State(_At.BEFORE, 0, length + len(piece))

    def _closed(self, length: int) -> _State:
        marks = self._marks
        if marks.delay.follows:
            return _State(_At.FOLLOWING, 0, length)
        return _State(_At.GAP if marks.blanks.any() else _At.ANSWER, 0, length)

    def rollback(self, num_tokens: int) -> None:
        own = 0
        for _ in range(num_tokens):
            at = self._states.pop().at
            # The token that led here was the answer's, but for the last of what comes behind the marks.
            before = self._states[-1].at
            own += at is _At.ANSWER and before not in (_At.FOLLOWING, _At.BEFORE)
        if own:
            self._answer.rollback(own)

    def fork(self) -> DelayedGrammar:
        return DelayedGrammar(self._marks, self._answer.fork(), list(self._states), bytes(self._text))

    def forced_tokens(self) -> list[int]:
        at, count, _ = self._states[-1]
        match at:
            case _At.OPENING:
                return self._marks.delay.opens[count:]
            case _At.FOLLOWING:
                return self._marks.delay.follows[count:]
            case _At.ANSWER:
                return self._answer.forced_tokens()
            case _:
                return []

    @property
    def is_finished(self) -> bool:
        return self._states[-1].at is _At.ANSWER and self._answer.is_finished


def compile_delayed(backend: GrammarBackend, request: GrammarRequest) -> Grammar:
    """The state before the first token. Raises ``InvalidRequest`` as the backend does for the answer's grammar."""
    delay = msgspec.json.decode(request.source, type=Delay)
    answer = backend.compile(GrammarRequest(delay.kind, delay.source))
    first = _State(_At.LEAD if delay.opens else _At.BEFORE)
    return DelayedGrammar(_Marks(delay, backend.context, answer.fork()), answer, [first])
