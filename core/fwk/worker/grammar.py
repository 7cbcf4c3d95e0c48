"""Masks of constrained output: a logits processor of core's own, the first of all."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence, InvalidRequest, one_line_traceback
from fwk.interfaces.grammar import Grammar
from fwk.interfaces.sampling import LogitsProcessor, LogitsView, SamplingContext
from fwk.types import GrammarKind, GrammarRequest, SamplingParams
from fwk.worker.sequence_table import SequenceTable

log = logging.getLogger(__name__)

NUM_THREADS = 2
NUM_KEPT = 32
"""Compiled grammars kept when no sequence waits for them, the least recently used forgotten first.

A server bounds what one of them may allocate (``fwk.server.helper``), so this bounds the cache's bytes too."""

Compile = Callable[[GrammarRequest], Grammar]


@dataclass(slots=True)
class _Compiled:
    """A grammar that is being compiled or has been, and how many sequences wait to start with it."""

    number: int
    future: Future[Grammar]
    num_waiting: int = 0


class GrammarStore:
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


class GrammarMasks(LogitsProcessor):
    """Keeps every constrained sequence inside its grammar.

    The state lives here, where tokens are sampled: between two calls it stands after the tokens that the worker's
    table knows for sure, so a step may be launched before its predecessor's tokens are known elsewhere, and a sequence
    that comes back after a pre-emption is advanced over what it had. A row with more tokens before it (drafts, the
    path through a tree, the steps of a draft model) is masked by the state after those, which is then taken back; a
    row behind a token that the grammar forbids is left alone, for that token will not stand.
    """

    def __init__(self, context: SamplingContext, store: GrammarStore, table: SequenceTable) -> None:
        super().__init__(context)
        self._store = store
        self._table = table
        self._states: dict[int, _State] = {}
        words = -(-context.vocab_size // 32)
        self._eos = np.zeros(words, np.int32)
        for token_id in context.eos_token_ids:
            self._eos.view(np.uint8)[token_id // 8] |= 1 << token_id % 8
        self._tail = np.full(words, -1, np.int32)  # the bits that are tokens
        bits = np.unpackbits(self._tail.view(np.uint8), bitorder="little")
        bits[context.vocab_size :] = 0
        self._tail = np.packbits(bits, bitorder="little").view(np.int32)
        self._bits = torch.from_numpy(np.int32(1) << np.arange(32, dtype=np.int32)).to(context.device)

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
        rows = [i for i, slot in enumerate(view.slots.tolist()) if slot in self._states]
        masks = np.full((len(rows), len(self._eos)), -1, np.int32)
        start = 0
        while start < len(rows):
            slot, end = view.slots[rows[start]], start + 1
            while end < len(rows) and view.slots[rows[end]] == slot:
                end += 1
            self._fill(int(slot), rows[start:end], masks[start:end], view)
            start = end
        return self._mask(logits, rows, masks)

    def ends(self, slot: int, token_ids: Sequence[int]) -> int | None:
        state = self._states[slot]
        if state.is_complete:
            return 0
        for i, token_id in enumerate(token_ids):
            if not _accept(slot, state, token_id):
                if not self._row(slot, state).any():  # complete, which only its mask told
                    state.is_complete = True
                    return i
                raise BlameSequence(slot, f"token {token_id} was chosen, which the grammar forbids", is_refusal=True)
            state.num_tokens += 1
            if token_id in self.context.eos_token_ids:
                return None
            if state.grammar.is_finished:
                state.is_complete = True
                return i + 1
        return None

    def _fill(self, slot: int, rows: list[int], masks: np.ndarray, view: LogitsView) -> None:
        """The masks of a sequence's rows, those with fewer tokens before them first."""
        state = self._states[slot]
        prompt = int(self._table.num_prompt[slot])
        num_sure = int(self._table.num_tokens[slot]) - prompt
        output = view.token_ids[slot, prompt : int(view.num_tokens[rows[-1]])].tolist()
        for token_id in output[state.num_tokens : num_sure]:
            if state.is_complete:
                break
            if not _accept(slot, state, token_id):
                raise BlameSequence(
                    slot, f"the output holds token {token_id}, which the grammar forbids", is_refusal=True
                )
            state.num_tokens += 1
        if state.is_complete:
            return  # this step was launched before the output was known to be complete
        num_drafts = self._fill_rows(slot, state, masks, output[num_sure:], view.num_tokens[rows] - prompt - num_sure)
        if num_drafts:
            state.grammar.rollback(num_drafts)

    def _fill_rows(self, slot: int, state: _State, masks: np.ndarray, drafts: list[int], depths: np.ndarray) -> int:
        """Fill row i with the mask after ``drafts[: depths[i]]``. Returns how many drafts were accepted on the way."""
        num_drafts = 0
        for i, depth in enumerate(depths.tolist()):
            while num_drafts < depth:
                if state.grammar.is_finished or not _accept(slot, state, drafts[num_drafts]):
                    return num_drafts
                num_drafts += 1
            if state.grammar.is_finished:
                return num_drafts
            masks[i] = self._row(slot, state)
            if not masks[i].any():  # nothing may follow: what is sampled here does not count
                state.is_complete = state.is_complete or num_drafts == 0
                masks[i] = -1
        return num_drafts

    def _row(self, slot: int, state: _State) -> np.ndarray:
        """The mask of the next token: [ceil(vocab_size / 32)] int32."""
        mask = np.zeros_like(self._eos)
        try:
            state.grammar.fill_mask(mask)
        except Exception as error:
            raise BlameSequence(slot, f"the grammar cannot go on: {error}", is_refusal=True) from error
        mask &= self._tail
        return mask if state.may_end else mask & ~self._eos

    def _mask(self, logits: Tensor, rows: list[int], masks: np.ndarray) -> Tensor:
        """-inf where a mask has no bit. masks: [len(rows), ceil(vocab_size / 32)] int32."""
        every = len(rows) == logits.shape[0]
        index = None if every else torch.tensor(rows, device=logits.device)
        own = logits if index is None else logits[index]
        if own.device.type == "cpu":
            forbid(own, masks)
        else:
            packed = torch.from_numpy(masks).to(own.device)
            forbidden = (packed.unsqueeze(-1) & self._bits).eq(0).view(len(rows), -1)[:, : own.shape[1]]
            own.masked_fill_(forbidden, -torch.inf)
        return own if index is None else logits.index_copy_(0, index, own)


def forbid(logits: Tensor, masks: np.ndarray) -> None:
    """-inf in place where a mask has no bit; logits: [n, vocab_size] on a CPU, masks: [n, ceil(vocab_size / 32)] int32.

    Next to everything is forbidden, or next to nothing: of most words of 32 tokens nothing has to be looked at.
    """
    num_whole = logits.shape[1] // 32
    values = logits[:, : num_whole * 32].unflatten(1, (num_whole, 32)).numpy()
    for row, words in zip(values, masks, strict=True):
        mixed = np.flatnonzero(words[:num_whole] + 1)  # those that are not all ones
        if len(mixed) * 2 > num_whole:
            mixed = np.flatnonzero(words[:num_whole])
            allowed = row[mixed]
            row.fill(-np.inf)
        else:
            allowed = row[mixed]
        row[mixed] = np.where(_bits(words[mixed]), allowed, -np.inf)
    tail = logits[:, num_whole * 32 :].numpy()
    if tail.shape[1]:
        tail[~_bits(masks[:, num_whole])[:, : tail.shape[1]]] = -np.inf


def _bits(words: np.ndarray) -> np.ndarray:
    """[n] int32 to [n, 32] bool, the lowest bit first."""
    return np.unpackbits(words[:, None].copy().view(np.uint8), axis=1, bitorder="little").view(np.bool_)


def _accept(slot: int, state: _State, token_id: int) -> bool:
    try:
        return state.grammar.accept(token_id)
    except Exception as error:
        raise BlameSequence(slot, f"the grammar cannot go on: {error}", is_refusal=True) from error
