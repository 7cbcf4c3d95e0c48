"""Objects of clients that are kept in memory, and with ``--files-dir`` on the disk, too."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from threading import Lock
from typing import Any

import orjson
from starlette.exceptions import HTTPException

from fwk.errors import NotServed
from fwk_server._common.body import shown
from fwk_server._common.records import Key, Records

OVERHEAD = 512
"""Bytes that an entry takes besides its JSON, and each name of a part of it."""

log = logging.getLogger(__name__)


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

    Used on the event loop and by threads. ``records``: where they outlive the server, under a ``kind`` of their own.
    """

    def __init__(self, max_bytes: int, records: Records, kind: str) -> None:
        self.max_bytes = max_bytes
        self._records = records
        self._kind = kind
        self.num_bytes = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._holders: dict[Key, Key] = {}  # of a part: the newest object that has it
        self._lock = Lock()

    def load(self) -> None:
        """Take over what an earlier server kept. What was put meanwhile is newer."""
        newer = list(self._entries.items())
        self._entries.clear()
        self._holders.clear()
        self.num_bytes = 0
        for key, data in self._records.all(self._kind):
            head, _, rest = data.partition(b"\n")
            self._put(key, _Entry(rest, tuple(orjson.loads(head))), is_new=False)
        for key, entry in newer:
            self._put(key, entry)

    async def flush(self) -> None:
        """Have what was put outlive the server. Where it cannot be written, the log says so, and it does not."""
        try:
            await self._records.flush()
        except NotServed as error:
            log.warning("%s", error)

    def put(self, key: Key, entry: dict[str, Any], parts: Iterable[str] = ()) -> bool:
        """Keep an entry; False: it does not fit, and what was kept stays.

        parts: ids by which ``holding`` finds it, for the same tenant.
        """
        made = _Entry(orjson.dumps(entry), tuple(parts))
        if made.size > self.max_bytes:
            return False
        self._put(key, made)
        return True

    def _put(self, key: Key, made: _Entry, *, is_new: bool = True) -> None:
        with self._lock:
            self._drop(key)
            self._entries[key] = made
            self._holders.update({(key[0], part): key for part in made.parts})
            self.num_bytes += made.size
            while self.num_bytes > self.max_bytes:
                oldest = next(iter(self._entries))
                self._drop(oldest)
                self._records.delete(self._kind, oldest)
            if is_new:
                self._records.put(self._kind, key, orjson.dumps(made.parts) + b"\n" + made.data)

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
            self._records.delete(self._kind, key)
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
