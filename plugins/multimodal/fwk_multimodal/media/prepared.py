"""What processors made of items, kept in the server by content: each is decoded once, by one of those that wait."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from fwk.interfaces.multimodal import MediaItem
from fwk_multimodal.media.placing import ItemShape, PayloadFile


def digest_of(item: MediaItem) -> bytes:
    """Of its content. A server has one processor, with one set of settings."""
    return hashlib.sha256(item.kind.encode() + b"\0" + item.data).digest()


@dataclass(frozen=True, eq=False, slots=True)
class Prepared:
    """An item that was decoded.

    file: of its arrays, removed when nothing refers to this any more.
    """

    shape: ItemShape
    file: PayloadFile
    num_bytes: int


@dataclass(eq=False, slots=True)
class Preparing:
    """An item that a request decodes, for which others wait. found: None where it failed."""

    is_done: threading.Event = field(default_factory=threading.Event)
    found: Prepared | None = None

    def wait(self) -> Prepared | None:
        """Blocks until it is decoded. Whoever decodes it ends, within the limits of a job."""
        self.is_done.wait()
        return self.found


class PreparedItems:
    """By content; those used least recently go first beyond ``max_bytes``. Safe to use from any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[bytes, Prepared] = OrderedDict()
        self._preparing: dict[bytes, Preparing] = {}
        self.num_bytes = 0

    def claim(
        self, digests: Iterable[bytes]
    ) -> tuple[dict[bytes, Prepared], dict[bytes, Preparing], dict[bytes, Preparing]]:
        """Those that are kept, those that the caller must decode and ``publish``, and those that others decode now."""
        known: dict[bytes, Prepared] = {}
        own: dict[bytes, Preparing] = {}
        others: dict[bytes, Preparing] = {}
        with self._lock:
            for digest in digests:
                if digest in self._kept:
                    self._kept.move_to_end(digest)
                    known[digest] = self._kept[digest]
                elif digest in self._preparing:
                    others[digest] = self._preparing[digest]
                else:
                    own[digest] = Preparing()
            self._preparing |= own
        return known, own, others

    def publish(self, digest: bytes, found: Prepared | None) -> None:
        """What the caller has made of an item that it had claimed, for those that wait; None: nothing."""
        with self._lock:
            preparing = self._preparing.pop(digest)
            if found is not None and found.num_bytes <= self._max_bytes:
                self._kept[digest] = found
                self.num_bytes += found.num_bytes
                while self.num_bytes > self._max_bytes:
                    self.num_bytes -= self._kept.popitem(last=False)[1].num_bytes
        preparing.found = found
        preparing.is_done.set()

    def clear(self) -> None:
        """Keep none of them."""
        with self._lock:
            self._kept.clear()
            self.num_bytes = 0
