"""Responses kept in memory."""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock
from typing import Any

import orjson
from starlette.exceptions import HTTPException

from fwk_server._common.body import shown

OVERHEAD = 512
"""Bytes that an entry takes besides its JSON."""

Key = tuple[str, str]  # the tenant, and the response's id


class UnknownResponse(HTTPException):
    """No such response is kept for this caller."""

    def __init__(self, name: str, param: str) -> None:
        self.param = param
        super().__init__(404, f"no response {shown(name)} is stored here: it was not stored, deleted or made room")


class ResponseStore:
    """Whole responses as JSON, at most ``max_bytes`` of it; what was used least recently goes first.

    An entry holds ``response``, ``input`` (the items of its request) and ``context`` (all items of the conversation
    before its output). Used on the event loop and by threads.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._entries: OrderedDict[Key, bytes] = OrderedDict()
        self._lock = Lock()

    def put(self, key: Key, entry: dict[str, Any]) -> None:
        """Keep an entry, if it fits at all."""
        data = orjson.dumps(entry)
        with self._lock:
            self._drop(key)
            if len(data) + OVERHEAD > self.max_bytes:
                return
            self._entries[key] = data
            self.num_bytes += len(data) + OVERHEAD
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def get(self, key: Key, param: str = "response_id") -> dict[str, Any]:
        """The entry. Raises ``UnknownResponse``; ``param`` is where its id was given."""
        with self._lock:
            data = self._entries.get(key)
            if data is None:
                raise UnknownResponse(key[1], param)
            self._entries.move_to_end(key)
        return orjson.loads(data)

    def delete(self, key: Key) -> bool:
        """Forget an entry: whether there was one."""
        with self._lock:
            return self._drop(key)

    def _drop(self, key: Key) -> bool:
        data = self._entries.pop(key, None)
        if data is not None:
            self.num_bytes -= len(data) + OVERHEAD
        return data is not None
