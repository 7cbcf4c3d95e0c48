"""Outputs of sequences that have ended, as text that later ones draft from."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from fwk.interfaces.speculative import DraftView

NOTHING = np.zeros(0, np.int32)

MAX_NAMESPACES = 8
"""Whose outputs are kept at once. All but the one without a name share as much room as that has."""


class Outputs:
    """Follows what running sequences write, and keeps it when they end, apart by the namespace of their K/V."""

    def __init__(self, num_slots: int, capacity: int) -> None:
        self._capacity = capacity
        self._stores: OrderedDict[str, OutputStore] = OrderedDict()  # the latest used last
        self._of_slot = [""] * num_slots  # of sequences that are followed: the worker's may be another's by now
        self._table: np.ndarray | None = None
        self._begun = np.zeros(num_slots, np.int64)  # where the output of a slot's sequence begins; 0: unknown
        self._known = np.zeros(num_slots, np.int64)

    @property
    def is_empty(self) -> bool:
        """Whether no sequence has an output to draft from."""
        return not any(len(store.text) for store in self._stores.values())

    def text(self, slot: int) -> np.ndarray:
        """``OutputStore.text`` of what a sequence may draft from."""
        store = self._stores.get(self._of_slot[slot])
        return NOTHING if store is None else store.text

    def follow(self, view: DraftView) -> None:
        """Sequences have grown."""
        self._table = view.token_ids
        fresh = view.slots[self._begun[view.slots] == 0]
        self._known[view.slots] = view.num_tokens
        self._begun[fresh] = self._known[fresh] - 1  # a sequence's first drafts follow its first output token
        for slot in fresh.tolist() if view.namespaces else ():
            self._of_slot[slot] = view.namespaces[slot]

    def forget(self, slots: Sequence[int]) -> None:
        """Sequences have ended: theirs is kept."""
        for slot in slots:
            if self._table is not None and self._begun[slot]:
                namespace = self._of_slot[slot]
                store = self._stores.get(namespace)
                if store is None:
                    capacity = self._capacity // MAX_NAMESPACES if namespace else self._capacity
                    store = self._stores[namespace] = OutputStore(capacity)
                self._stores.move_to_end(namespace)
                store.add(self._table[slot, self._begun[slot] : self._known[slot]])
                if len(self._stores) > MAX_NAMESPACES:
                    self._stores.popitem(last=False)
        self._begun[list(slots)] = 0


class OutputStore:
    """The newest outputs, one after another: a ring of ``capacity`` tokens in which -1 stands after each output."""

    def __init__(self, capacity: int) -> None:
        self._ring = np.full(capacity, -1, np.int32)
        self._next = 0
        self._is_full = False

    @property
    def text(self) -> np.ndarray:
        """What is kept: [at most capacity] int32. No token of an output is followed by another output's."""
        return self._ring if self._is_full else self._ring[: self._next]

    def add(self, tokens: np.ndarray) -> None:
        """Keep an output [length]; the oldest ones make room. Of one longer than the store, its end is kept."""
        capacity = len(self._ring)
        if len(tokens) == 0 or capacity < 2:
            return
        tokens = tokens[-(capacity - 1) :]
        if self._next + len(tokens) + 1 > capacity:  # begin again: what is overwritten in part stays searchable
            self._ring[self._next :] = -1
            self._next, self._is_full = 0, True
        end = self._next + len(tokens)
        self._ring[self._next : end] = tokens
        self._ring[end] = -1
        self._next = end + 1
