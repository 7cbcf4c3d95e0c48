"""Objects of clients that are kept in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import orjson
from starlette.exceptions import HTTPException

from fwk_server._common.body import shown

OVERHEAD = 512
"""Bytes that an entry takes besides its JSON, and each name of a part of it."""

Key = tuple[str, str]  # the tenant, and the object's id


class UnknownObject(HTTPException):
    """No such object is kept for this caller."""

    def __init__(self, noun: str, name: str, param: str) -> None:
        self.param = param
        super().__init__(404, f"no {noun} {shown(name)} is stored here: it was not stored, deleted or made room")


@dataclass(frozen=True, slots=True)
class _Entry:
    data: bytes
    parts: tuple[str, ...]

    @property
    def size(self) -> int:
        return len(self.data) + OVERHEAD * (1 + len(self.parts))


class ObjectStore:
    """Whole objects as JSON, at most ``max_bytes`` of it; what was used least recently goes first.

    Used on the event loop and by threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._holders: dict[Key, Key] = {}  # of a part: the newest object that has it
        self._lock = Lock()

    def put(self, key: Key, entry: dict[str, Any], parts: Iterable[str] = ()) -> bool:
        """Keep an entry; False: it does not fit, and what was kept stays.

        parts: ids by which ``holding`` finds it, for the same tenant.
        """
        made = _Entry(orjson.dumps(entry), tuple(parts))
        if made.size > self.max_bytes:
            return False
        with self._lock:
            self._drop(key)
            self._entries[key] = made
            self._holders.update({(key[0], part): key for part in made.parts})
            self.num_bytes += made.size
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))
        return True

    def get(self, key: Key, noun: str, param: str) -> dict[str, Any]:
        """The entry, which has a ``noun``. Raises ``UnknownObject``; ``param`` is where its id was given."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                raise UnknownObject(noun, key[1], param)
            self._entries.move_to_end(key)
        found = orjson.loads(entry.data)
        if noun not in found:
            raise UnknownObject(noun, key[1], param)
        return found

    def holding(self, key: Key) -> dict[str, Any] | None:
        """The entry that has a part; None: there is none."""
        with self._lock:
            holder = self._holders.get(key)
            entry = self._entries.get(holder) if holder is not None else None
        return orjson.loads(entry.data) if entry is not None else None

    def of(self, tenant: str) -> Iterator[dict[str, Any]]:
        """The entries of a tenant, those used most recently last."""
        with self._lock:
            found = [entry.data for key, entry in self._entries.items() if key[0] == tenant]
        yield from map(orjson.loads, found)

    def delete(self, key: Key) -> bool:
        """Forget an entry: whether there was one."""
        with self._lock:
            return self._drop(key)

    def _drop(self, key: Key) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        self.num_bytes -= entry.size
        for part in entry.parts:
            if self._holders.get((key[0], part)) == key:
                del self._holders[key[0], part]
        return True
