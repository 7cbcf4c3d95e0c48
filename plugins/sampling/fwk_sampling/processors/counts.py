"""How often each token stands in the texts of running sequences, kept from step to step."""

from __future__ import annotations

import numpy as np

from fwk.interfaces.sampling import LogitsView

FIRST_ROOM = 64
Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Of some rows, [n] int64 each: which of the rows, a token id, and how often it stands in the row's output."""


class TokenCounts:
    """The different tokens of each slot's text: of the output with their numbers, and of the prompt with 0.

    A text that is one token longer than it was is not counted anew. Texts with drafts are counted for themselves.
    """

    def __init__(self, num_slots: int) -> None:
        self._ids = np.full((num_slots, FIRST_ROOM), -1, np.int32)
        self._counts = np.zeros((num_slots, FIRST_ROOM), np.int32)
        self._sizes = np.zeros(num_slots, np.int64)
        self._lengths = np.full(num_slots, -1, np.int64)  # of the texts that are counted; -1: nothing is

    def forget(self, slot: int) -> None:
        """Another sequence takes the slot."""
        self._lengths[slot] = -1

    def of(self, view: LogitsView, rows: np.ndarray, wants_prompt: np.ndarray) -> Entries:
        """The entries of some rows [n] of a view. wants_prompt: [n] bool, whether tokens of the prompt count as well.

        A row wants that as long as its slot's sequence lasts, or never.
        """
        if has_texts_of_its_own(view, rows):
            return _counted(view, rows, wants_prompt)
        sizes = self._sizes_of(view, rows, wants_prompt)
        used = np.arange(int(sizes.max(initial=0))) < sizes[:, None]
        owner = np.nonzero(used)[0]
        width = used.shape[1]
        slots = view.slots[rows]
        ids, counts = self._ids[slots, :width][used], self._counts[slots, :width][used]
        return owner, ids.astype(np.int64), counts.astype(np.int64)

    def table(self, view: LogitsView, rows: np.ndarray, wants_prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same as a table: token ids and numbers, [n, most of a row] int32 each.

        A row with fewer tokens repeats its first one; one without any has 0, no times. Not for rows that have
        texts of their own.
        """
        sizes = self._sizes_of(view, rows, wants_prompt)
        slots, width = view.slots[rows], int(sizes.max(initial=0))
        ids, counts = self._ids[slots, :width], self._counts[slots, :width]
        if width and int(sizes.min()) < width:
            unused = np.arange(width) >= sizes[:, None]
            is_empty = sizes == 0
            for numbers in (ids, counts):
                numbers[is_empty] = 0
                np.copyto(numbers, numbers[:, :1].copy(), where=unused)
        return ids, counts

    def _sizes_of(self, view: LogitsView, rows: np.ndarray, wants_prompt: np.ndarray) -> np.ndarray:
        """How many different tokens the texts of some rows hold, once they are counted: [n] int64."""
        slots = view.slots[rows]
        self._follow(view, slots, view.num_tokens[rows], view.num_prompt_tokens[rows], wants_prompt)
        return self._sizes[slots]

    def _follow(
        self, view: LogitsView, slots: np.ndarray, lengths: np.ndarray, prompts: np.ndarray, wants_prompt: np.ndarray
    ) -> None:
        """Count what these slots, each once, hold now."""
        known = self._lengths[slots]
        for i in np.flatnonzero((known != lengths) & (known != lengths - 1)).tolist():
            slot = int(slots[i])
            self._count(slot, view.token_ids[slot], int(prompts[i]), int(lengths[i]), bool(wants_prompt[i]))
        grown = np.flatnonzero(known == lengths - 1)
        if len(grown):
            self._append(slots[grown], view.token_ids[slots[grown], lengths[grown] - 1])
        self._lengths[slots] = lengths

    def _count(self, slot: int, tokens: np.ndarray, num_prompt: int, length: int, wants_prompt: bool) -> None:
        ids, counts = np.unique(tokens[num_prompt:length], return_counts=True)
        if wants_prompt:
            others = np.setdiff1d(tokens[:num_prompt], ids)
            ids, counts = np.concatenate((ids, others)), np.concatenate((counts, np.zeros(len(others), counts.dtype)))
        self._make_room(len(ids))
        self._ids[slot, : len(ids)] = ids
        self._counts[slot, : len(ids)] = counts
        self._sizes[slot] = len(ids)

    def _append(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """One more token of each slot's output: [n] each."""
        sizes = self._sizes[slots]
        self._make_room(int(sizes.max()) + 1)
        width = int(sizes.max())
        is_it = (self._ids[slots, :width] == tokens[:, None]) & (np.arange(width) < sizes[:, None])
        is_known = is_it.any(1)
        places = np.where(is_known, is_it.argmax(1) if width else 0, sizes)
        fresh = ~is_known
        self._ids[slots[fresh], places[fresh]] = tokens[fresh]
        self._counts[slots[fresh], places[fresh]] = 0
        self._counts[slots, places] += 1
        self._sizes[slots] += fresh

    def _make_room(self, count: int) -> None:
        have = self._ids.shape[1]
        if count > have:
            more = ((0, 0), (0, max(have, count - have)))
            self._ids, self._counts = np.pad(self._ids, more, constant_values=-1), np.pad(self._counts, more)


def has_texts_of_its_own(view: LogitsView, rows: np.ndarray) -> bool:
    """Whether texts of some rows [n] of a view are not those of their slots: they end in drafts, or share slots."""
    slots = view.slots[rows]
    return view.has_drafts or (len(slots) > 1 and len(np.unique(slots)) < len(slots))


def _counted(view: LogitsView, rows: np.ndarray, wants_prompt: np.ndarray) -> Entries:
    """The entries of rows, counted from nothing: one sort of all their texts together."""
    texts: list[np.ndarray] = []
    num_prompts: list[int] = []
    for row, wants in zip(rows.tolist(), wants_prompt.tolist(), strict=True):
        num_prompt = int(view.num_prompt_tokens[row])
        start = 0 if wants else num_prompt
        texts.append(view.token_ids[view.slots[row], start : view.num_tokens[row]])
        num_prompts.append(num_prompt - start)
    lengths = np.array([len(text) for text in texts], np.int64)
    owner = np.repeat(np.arange(len(texts)), lengths)
    tokens = np.concatenate(texts).astype(np.int64)
    nth = np.arange(len(tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    is_output = nth >= np.array(num_prompts, np.int64)[owner]
    keys, inverse = np.unique((owner << 32) + tokens, return_inverse=True)
    counts = np.bincount(inverse, weights=is_output, minlength=len(keys)).astype(np.int64)
    return keys >> 32, keys & 0xFFFFFFFF, counts
