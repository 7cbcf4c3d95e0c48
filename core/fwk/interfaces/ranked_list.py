"""A collection in order of rank: cheap to add to, to remove from, and to read from the front, however long it is."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any, Generic, TypeVar

from sortedcontainers import SortedKeyList  # pyright: ignore[reportMissingTypeStubs]

Item = TypeVar("Item", bound=Hashable)
Key = TypeVar("Key", bound=Hashable)


class Ranked(Collection[Item], Generic[Item]):
    """Items, lowest rank first; among equals, those added first.

    A rank may be anything that can be compared with the other ranks; it stays the item's until ``add`` gives it another
    one. Adding and removing take O(log n) comparisons. Do not change it while it is read.
    """

    def __init__(self) -> None:
        self._entries: dict[Item, tuple[Any, int, Item]] = {}
        self._sorted: Any = SortedKeyList(key=_place)
        self._num_added = 0

    def add(self, item: Item, rank: Any, number: int | None = None) -> None:
        """Put an item in, or give one that is in another rank. ``number`` decides among equals."""
        if item in self._entries:
            self.remove(item)
        self._num_added += 1
        entry = (rank, self._num_added if number is None else number, item)
        self._sorted.add(entry)
        self._entries[item] = entry

    def remove(self, item: Item) -> None:
        """Take an item out. Raises ``KeyError`` when it is not in."""
        entry = self._entries.pop(item)
        try:
            self._sorted.remove(entry)
        except ValueError:
            raise ValueError(
                f"the ranks have no order (is one of them not a number?): {entry[0]!r} is not found again"
            ) from None

    def rank(self, item: Item) -> Any:
        """The rank an item was added with. Raises ``KeyError`` when it is not in."""
        return self._entries[item][0]

    def __contains__(self, item: object) -> bool:
        return item in self._entries

    def __iter__(self) -> Iterator[Item]:
        return (entry[2] for entry in self._sorted)

    def __len__(self) -> int:
        return len(self._entries)


def _place(entry: tuple[Any, int, Any]) -> tuple[Any, int]:
    return entry[:2]


class Groups(Generic[Key, Item]):
    """Ranked items by group, in ranked groups: the group of lowest rank first. A group without items is not there."""

    def __init__(self) -> None:
        self._ranked: Ranked[Key] = Ranked()
        self._items: dict[Key, Ranked[Item]] = {}

    def add(self, group: Key, item: Item, rank: Any, group_rank: Any) -> None:
        """Put an item into a group; the group has that rank from now on."""
        self._items.setdefault(group, Ranked()).add(item, rank)
        self._ranked.add(group, group_rank)

    def discard(self, group: Key, item: Item) -> None:
        """Take an item out of a group, if it is in it."""
        mine = self._items.get(group)
        if mine is not None and item in mine:
            mine.remove(item)
            if not mine:
                del self._items[group]
                self._ranked.remove(group)

    def rank(self, group: Key, rank: Any) -> None:
        """Give a group another rank, if it is there."""
        if group in self._items:
            self._ranked.add(group, rank)

    def get(self, group: Key) -> Collection[Item]:
        """The items of a group, lowest rank first."""
        return self._items.get(group, ())

    def __contains__(self, group: object) -> bool:
        return group in self._items

    def __iter__(self) -> Iterator[Key]:
        return iter(self._ranked)
