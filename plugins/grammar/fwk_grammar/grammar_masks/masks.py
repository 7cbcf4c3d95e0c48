"""Masks of constrained output, and the states of grammars that they are made of."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from typing import cast

import numpy as np
from torch import Tensor

from fwk.errors import BlameSequence, InvalidRequest, one_line_traceback
from fwk.interfaces.grammar import Grammar
from fwk.interfaces.grammar_masks import GrammarProcessor, Mask
from fwk.interfaces.sampling import LogitsView, SamplingContext
from fwk.interfaces.step import SequenceRecords
from fwk.types import GrammarKind, GrammarRequest, SamplingParams

log = logging.getLogger(__name__)

NUM_THREADS = 2
NUM_KEPT = 32
"""Compiled grammars kept when no sequence waits for them, the least recently used forgotten first.

A server bounds what one of them may allocate (``jobs.MAX_BYTES``), so this bounds the cache's bytes too."""

Compile = Callable[[GrammarRequest], Grammar]


@dataclass(slots=True)
class _Compiled:
    """A grammar that is being compiled or has been, and how many sequences wait to start with it."""

    number: int
    future: Future[Grammar]
    num_waiting: int = 0


class CompiledGrammars:
    """Compiles grammars in threads of its own, and keeps them for those who will ask again.

    What it does follows from the order of the calls alone, so that the workers of a group number grammars alike.
    """

    def __init__(self, compile_grammar: Compile) -> None:
        self._compile = compile_grammar
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="fwk-grammar")
        self._known: OrderedDict[GrammarRequest, _Compiled] = OrderedDict()
        self._by_number: dict[int, _Compiled] = {}
        self._num_compiled = 0

    def begin(self, build: Callable[[], None]) -> Future[None]:
        """Build what compiles grammars before a first request waits for it; nobody need wait for that to be done.

        What cannot be built is told in the log, and again to every request with a grammar.
        """
        return self._threads.submit(_build, build)

    def prepare(self, kind: str, source: str) -> int:
        """Start compiling for a sequence that waits; returns the grammar's number. It lasts until taken or released."""
        entry = self._entry(GrammarRequest(cast(GrammarKind, kind), source))
        entry.num_waiting += 1
        return entry.number

    def ready(self, numbers: Sequence[int]) -> list[bool]:
        """Which grammars are compiled, or found to be wrong."""
        return [self._by_number[number].future.done() for number in numbers]

    def release(self, number: int) -> None:
        """A sequence that waited has ended."""
        self._by_number[number].num_waiting -= 1
        self._forget()

    def take(self, request: GrammarRequest) -> Grammar:
        """A sequence starts: its own state. Raises what compiling raised; waits if it was not prepared ahead."""
        entry = self._entry(request)
        entry.num_waiting = max(entry.num_waiting - 1, 0)
        self._forget()
        return entry.future.result().fork()

    def close(self) -> None:
        """Compile nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _entry(self, request: GrammarRequest) -> _Compiled:
        entry = self._known.get(request)
        if entry is None:
            entry = _Compiled(self._num_compiled, self._threads.submit(self._compile, request))
            self._num_compiled += 1
            self._known[request] = self._by_number[entry.number] = entry
        self._known.move_to_end(request)
        return entry

    def _forget(self) -> None:
        surplus = len(self._known) - NUM_KEPT
        idle = [request for request, entry in self._known.items() if not entry.num_waiting] if surplus > 0 else []
        for request in idle[:surplus]:
            del self._by_number[self._known.pop(request).number]


def _build(build: Callable[[], None]) -> None:
    try:
        build()
    except Exception as error:
        log.warning("no request can be constrained by a grammar: %s", one_line_traceback(error))


@dataclass(slots=True)
class _State:
    """Where a slot's sequence is in its grammar."""

    grammar: Grammar
    num_tokens: int = 0  # of its output that the grammar has accepted
    may_end: bool = True  # an end-of-sequence token ends it
    is_complete: bool = False


class GrammarMasks(GrammarProcessor):
    """Keeps every constrained sequence inside its grammar.

    The state lives here, where tokens are sampled: between two calls it stands after the tokens that the worker's
    table knows for sure, so a step may be launched before its predecessor's tokens are known elsewhere, and a sequence
    that comes back after a pre-emption is advanced over what it had. A row with more tokens before it (drafts, the
    path through a tree, the steps of a draft model) is masked by the state after those, which is then taken back; a
    row behind a token that the grammar forbids is left alone, for that token will not stand.
    """

    only_masks = True

    def __init__(self, context: SamplingContext, store: CompiledGrammars, table: SequenceRecords, mask: Mask) -> None:
        super().__init__(context)
        self._store = store
        self._table = table
        self._mask = mask
        words = -(-context.vocab_size // 32)
        self._not_eos = np.full(words, -1, np.int32)
        for token_id in context.eos_token_ids:
            self._not_eos.view(np.uint8)[token_id // 8] &= 0xFF ^ 1 << token_id % 8
        rest = context.vocab_size % 32
        self._tail = np.int32((1 << rest) - 1) if rest else None  # of the last word, the bits that are a token's
        if self._tail is not None:
            self._not_eos[-1] &= self._tail
        self._bits = np.empty((0, words), np.int32)
        self._states: dict[int, _State] = {}

    def add(self, slot: int, params: SamplingParams) -> bool:
        if params.grammar is None:
            return False
        try:
            grammar = self._store.take(params.grammar)
        except InvalidRequest as error:
            raise BlameSequence(slot, str(error), is_refusal=True) from None
        self._states[slot] = _State(grammar, may_end=not params.ignore_eos)
        return True

    def remove(self, slot: int) -> None:
        del self._states[slot]

    def apply(self, logits: Tensor, view: LogitsView) -> Tensor:
        slots, depths = view.slots.tolist(), view.num_tokens.tolist()
        rows = [i for i, slot in enumerate(slots) if slot in self._states]
        bits = self._room(len(rows))
        sure = self._num_sure(view.slots[rows])
        if view.has_drafts or not np.array_equal(sure, view.num_tokens[rows]):
            self._fill_by_slot(slots, depths, rows, bits, view.token_ids)
        else:
            self._fill_each([slots[i] for i in rows], sure, bits, view.token_ids)
        for i in np.flatnonzero(~self._limit(bits, [self._states[slots[row]].may_end for row in rows])):
            slot = slots[rows[i]]  # nothing may follow: what is sampled here does not count
            if depths[rows[i]] == self._num_sure(slot):
                self._states[slot].is_complete = True
            bits[i] = -1
        self._mask(logits, np.array(rows), bits)
        return logits

    def ends(self, slot: int, token_ids: Sequence[int]) -> int | None:
        state = self._states[slot]
        if state.is_complete:
            return 0
        for i, token_id in enumerate(token_ids):
            if not _accept(slot, state, token_id):
                self._reject(slot, state, token_id)
                return i
            self._take(state, token_id)
            if state.is_complete:
                return i + 1
            if token_id in self.context.eos_token_ids:
                return None
        return None

    def ends_each(self, slots: Sequence[int], token_ids: Sequence[int]) -> dict[int, int | Exception]:
        states = [self._states[slot] for slot in slots]
        found: dict[int, int | Exception] = {
            slot: 0 for slot, state in zip(slots, states, strict=True) if state.is_complete
        }
        kinds: dict[type[Grammar], list[int]] = {}
        for i, state in enumerate(states):
            if not state.is_complete:
                kinds.setdefault(type(state.grammar), []).append(i)
        for kind, places in kinds.items():
            told = _accept_each(kind, [states[i].grammar for i in places], [token_ids[i] for i in places])
            for i, is_accepted in zip(places, told, strict=True):
                slot, state, token_id = slots[i], states[i], token_ids[i]
                try:
                    if isinstance(is_accepted, Exception):
                        found[slot] = _cannot_continue(slot, is_accepted)
                    elif not is_accepted:
                        self._reject(slot, state, token_id)
                        found[slot] = 0
                    else:
                        self._take(state, token_id)
                        if state.is_complete:
                            found[slot] = 1
                except BlameSequence as error:
                    found[slot] = error
        return found

    def _take(self, state: _State, token_id: int) -> None:
        """A grammar has accepted a token of the output, which may be complete with it."""
        state.num_tokens += 1
        state.is_complete = token_id not in self.context.eos_token_ids and state.grammar.is_finished

    def _reject(self, slot: int, state: _State, token_id: int) -> None:
        """A grammar did not accept a token, for the output is complete without it, which only its mask tells.

        Raises ``BlameSequence`` where that is not so.
        """
        bits = np.empty((1, len(self._not_eos)), np.int32)
        _fill_mask(slot, state, bits[0])
        if self._limit(bits, [state.may_end]).any():
            raise BlameSequence(slot, f"token {token_id} was chosen, which the grammar forbids", is_refusal=True)
        state.is_complete = True

    def grammar(self, slot: int) -> Grammar | None:
        """That of a slot's sequence, after the tokens that ``ends`` was told of; None without, and at its end."""
        state = self._states.get(slot)
        return None if state is None or state.is_complete else state.grammar

    def _num_sure(self, slots: np.ndarray | int) -> np.ndarray:
        """Tokens of sequences that are neither drafts nor still to come from the device."""
        return self._table.num_tokens[slots] - self._table.unknown[slots]

    def _room(self, count: int) -> np.ndarray:
        """[count, ceil(vocab_size / 32)] int32, until the next call."""
        if len(self._bits) < count:
            self._bits = np.empty((count, len(self._not_eos)), np.int32)
        return self._bits[:count]

    def _limit(self, bits: np.ndarray, may_end: list[bool]) -> np.ndarray:
        """Leave what is a token and, where a sequence may not end, does not end it; which rows allow something."""
        if not any(may_end):  # each operation of NumPy is slow here: the forward pass left nothing in the caches
            bits &= self._not_eos
        else:
            if self._tail is not None:
                bits[:, -1] &= self._tail
            if not all(may_end):
                bits[np.logical_not(may_end)] &= self._not_eos
        return np.bitwise_or.reduce(bits, axis=1) != 0

    def _fill_each(self, slots: list[int], lengths: np.ndarray, bits: np.ndarray, token_ids: np.ndarray) -> None:
        """The masks of sequences with a row each, and no drafts: [num_rows, words], of each kind of grammar at once.

        lengths: [num_rows] int64, of their texts.
        """
        num_outputs = (lengths - self._table.num_prompt[slots]).tolist()
        kinds: dict[type[Grammar], tuple[list[Grammar], list[int]]] = {}
        for i, (slot, num_output) in enumerate(zip(slots, num_outputs, strict=True)):
            state = self._states[slot]
            if state.num_tokens < num_output and not state.is_complete:
                self._catch_up(slot, state, token_ids[slot])
            if state.is_complete:
                bits[i] = -1  # this step was launched before the output was known to be complete
                continue
            grammar = state.grammar
            kind = kinds.get(type(grammar))
            if kind is None:
                kind = kinds[type(grammar)] = [], []
            kind[0].append(grammar)
            kind[1].append(i)
        for kind, (grammars, places) in kinds.items():
            for i, error in kind.fill_masks(grammars, bits, places).items():
                raise _cannot_continue(slots[places[i]], error) from error

    def _catch_up(self, slot: int, state: _State, token_ids: np.ndarray) -> None:
        """Accept those tokens of a sequence that are certain and that its grammar has not accepted yet."""
        start = int(self._table.num_prompt[slot]) + state.num_tokens
        for token_id in token_ids[start : int(self._num_sure(slot))].tolist():
            if state.is_complete:
                break
            if not _accept(slot, state, token_id):
                raise BlameSequence(
                    slot, f"the output holds token {token_id}, which the grammar forbids", is_refusal=True
                )
            state.num_tokens += 1

    def _fill_by_slot(
        self, slots: list[int], depths: list[int], rows: list[int], bits: np.ndarray, token_ids: np.ndarray
    ) -> None:
        """The masks of sequences of which some have drafts, one sequence after another."""
        start = 0
        for slot, group in groupby([slots[i] for i in rows]):
            end = start + len(list(group))
            self._fill(slot, [depths[i] for i in rows[start:end]], bits[start:end], token_ids[slot])
            start = end

    def _fill(self, slot: int, depths: list[int], masks: np.ndarray, token_ids: np.ndarray) -> None:
        """The masks of a sequence's rows, each after ``token_ids[: depth]``, those of fewer tokens first."""
        state, num_sure = self._states[slot], int(self._num_sure(slot))
        self._catch_up(slot, state, token_ids)
        if state.is_complete:
            masks.fill(-1)  # this step was launched before the output was known to be complete
            return
        drafts = token_ids[num_sure : depths[-1]].tolist() if depths[-1] > num_sure else []
        num_drafts = self._fill_rows(slot, state, masks, drafts, [depth - num_sure for depth in depths])
        if num_drafts:
            state.grammar.rollback(num_drafts)

    def _fill_rows(self, slot: int, state: _State, masks: np.ndarray, drafts: list[int], depths: list[int]) -> int:
        """Fill row i with the mask after ``drafts[: depths[i]]``. Returns how many drafts were accepted on the way."""
        num_drafts = 0
        for i, depth in enumerate(depths):
            while num_drafts < depth:
                if state.grammar.is_finished or not _accept(slot, state, drafts[num_drafts]):
                    masks[i:] = -1
                    return num_drafts
                num_drafts += 1
            if state.grammar.is_finished:
                masks[i:] = -1
                return num_drafts
            _fill_mask(slot, state, masks[i])
        return num_drafts


def _fill_mask(slot: int, state: _State, row: np.ndarray) -> None:
    try:
        state.grammar.fill_mask(row)
    except Exception as error:
        raise _cannot_continue(slot, error) from error


def _cannot_continue(slot: int, error: Exception) -> BlameSequence:
    return BlameSequence(slot, f"the grammar cannot continue: {error}", is_refusal=True)


def _accept_each(kind: type[Grammar], grammars: list[Grammar], token_ids: list[int]) -> Sequence[bool | Exception]:
    """``Grammar.accept_each``; an error of the one call is the result of each grammar."""
    try:
        told = kind.accept_each(grammars, token_ids)
        if len(told) != len(grammars):
            raise ValueError(f"accept_each of {len(grammars)} grammars told of {len(told)}")
    except Exception as error:
        return [error] * len(grammars)
    return told


def _accept(slot: int, state: _State, token_id: int) -> bool:
    try:
        return state.grammar.accept(token_id)
    except Exception as error:
        raise _cannot_continue(slot, error) from error
