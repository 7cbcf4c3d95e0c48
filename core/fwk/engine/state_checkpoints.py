"""States of recurrent layers that are kept for the prefix cache: from which prefixes a sequence can continue.

A recurrent layer has no K/V to share: after a prefix it can continue only where its state of exactly that place was
kept. States are copied, never shared, so none is locked: workers copy one out before a step and others in after it.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf


class StateCheckpoints:
    """Which blocks of the prefix cache end at a kept state, and where the workers have it.

    What the step being planned keeps is found from the next step on (``commit``). When all places are taken, the state
    that was used longest ago is given up.
    """

    def __init__(self, num_places: int, block_size: int, interval: int) -> None:
        """interval: tokens between two states that are kept while a sequence generates."""
        self._block_size = block_size
        self._interval = -(-interval // block_size) * block_size
        self._free = list(range(num_places - 1, -1, -1))
        self._is_used = num_places > 0
        self._places: dict[int, int] = {}  # by the prefix cache's block, the least recently used first
        self._kept: dict[int, int] = {}  # the same, of the step being planned
        self._given_back: list[int] = []

    @property
    def num_kept(self) -> int:
        """States that sequences can continue from."""
        return len(self._places)

    def num_usable(self, block_ids: SequenceOf[int]) -> int:
        """How many of a cached prefix's blocks a sequence can continue from: the last of them ends at a state."""
        return next((count for count in range(len(block_ids), 0, -1) if block_ids[count - 1] in self._places), 0)

    def use(self, block: int) -> int:
        """The place of a block's state, to be copied by the step being planned."""
        place = self._places.pop(block)
        self._places[block] = place
        return place

    def cut(self, num_computed: int, num_new: int, num_prompt_tokens: int) -> int:
        """Tokens to compute at once, so that a state is kept at the last place another prompt can continue from."""
        last = (num_prompt_tokens - 1) // self._block_size * self._block_size
        return last - num_computed if self._is_used and num_computed < last < num_computed + num_new else num_new

    def take(self, num_computed: int, num_prompt_tokens: int) -> int | None:
        """A place for the state after ``num_computed`` tokens; None if it is not to be kept, or cannot be."""
        unit = self._block_size if num_computed < num_prompt_tokens else self._interval
        if not self._is_used or num_computed % unit:
            return None
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._places), None)
        return None if oldest is None else self._places.pop(oldest)

    def keep(self, block: int, place: int) -> None:
        """The state in a place is that at the end of a block of the prefix cache."""
        if block in self._places or block in self._kept:
            self._given_back.append(place)
        else:
            self._kept[block] = place

    def give_back(self, place: int) -> None:
        """Nothing came of it. A step under way may still write there: what comes later overwrites it."""
        self._given_back.append(place)

    def commit(self) -> None:
        """The step that was being planned is launched."""
        self._places |= self._kept
        self._free += self._given_back
        self._kept, self._given_back = {}, []

    def forget(self, block: int) -> None:
        """The prefix cache has given a block up."""
        for places in (self._places, self._kept):
            place = places.pop(block, None)
            if place is not None:
                self._given_back.append(place)

    def check(self, num_places: int, num_saving: int) -> None:
        """Prove that every place has one owner."""
        owned = [*self._free, *self._given_back, *self._places.values(), *self._kept.values()]
        if len(set(owned)) != len(owned) or len(owned) + num_saving != num_places:
            raise AssertionError("places of states do not balance")
