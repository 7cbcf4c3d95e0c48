"""Media in prompts: encoded when a step comes to their tokens, and kept by content for those that come again."""

from __future__ import annotations

import zipfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fwk.errors import EngineDead
from fwk.interfaces.device import Upload
from fwk.interfaces.model import Model
from fwk.types import Batch, Inserted, Media
from fwk.worker.sequence_table import SequenceTable


class NoMedia:
    """Of a model that takes none."""

    def begin(self, batch: Batch) -> None:
        """Take new sequences' media, and forget those of sequences that left."""

    def inserted(self, batch: Batch) -> Inserted | None:
        """What the step inserts in place of tokens' embeddings; None where it is of tokens alone."""
        return None


class EncoderCache:
    """What was encoded, by content. Those used least recently go first when there are more than ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._found: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Tensor | None:
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        return found

    def put(self, key: bytes, rows: Tensor) -> None:
        """Keep it, unless it alone is too large."""
        if key in self._found or rows.nbytes > self._max_bytes:
            return
        if rows.untyped_storage().nbytes() > rows.nbytes:  # of a batch, all of which it would keep
            rows = rows.clone()
        self._found[key] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= self._found.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._found.clear()
        self.num_bytes = 0


class MediaInputs(NoMedia):
    """The media of the sequences that a worker knows, and the rows that a model makes of them.

    A step encodes what its tokens come to and nothing else, so that a prompt of many pieces holds up the others no
    longer than a step each. What the cache has given up is encoded again, from the payload.
    """

    def __init__(
        self, model: Model, table: SequenceTable, cache: EncoderCache, device: torch.device, send: Upload
    ) -> None:
        self.model = model
        self._table = table
        self._cache = cache
        self._device = device
        self._send = send
        self._payloads: dict[str, Any] = {}  # opened files, by path
        self._media: dict[int, Sequence[Media]] = {}  # by slot; none once all of them are computed

    def operations(self) -> dict[str, Callable[..., Any]]:
        return {"open_media": self.open, "close_media": self.close}

    def open(self, paths: list[str]) -> str:
        """Open payloads that requests to come read; why one cannot be opened, if so."""
        try:
            for path in paths:
                self._payloads[path] = np.load(path, allow_pickle=False)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            return f"what was made of the request's media cannot be read: {type(error).__name__}"
        return ""

    def close(self, paths: list[str]) -> None:
        """No request reads these any more."""
        for path in paths:
            if path in self._payloads:
                self._payloads.pop(path).close()

    def use(self, model: Model) -> None:
        """Other weights serve from now on: what was encoded is of the old ones."""
        self.model = model
        self._cache.clear()

    def begin(self, batch: Batch) -> None:
        for slot in batch.freed_slots:
            self._media.pop(slot, None)
        for new in batch.new:
            if new.media:
                self._media[new.slot] = new.media

    def inserted(self, batch: Batch) -> Inserted | None:
        if not self._media:
            return None
        rows: list[np.ndarray] = []
        parts: list[tuple[Media, slice]] = []
        first = 0
        for scheduled in batch.sequences:
            start, first = first, first + scheduled.num_new_tokens
            media = self._media.get(scheduled.slot)
            if media is None:
                continue
            past = int(self._table.num_computed[scheduled.slot])
            end = past + scheduled.num_new_tokens
            for item in media:
                low, high = max(item.start, past), min(item.end, end)
                if low < high:
                    rows.append(np.arange(low, high) + (start - past))
                    parts.append((item, slice(low - item.start, high - item.start)))
            if end >= media[-1].end:
                del self._media[scheduled.slot]
        if not parts:
            return None
        encoded = self._encoded([item for item, _ in parts])
        values = [encoded[item.key][part] for item, part in parts]
        return Inserted(self._send(np.concatenate(rows)), torch.cat(values))

    def _encoded(self, items: Sequence[Media]) -> dict[bytes, Tensor]:
        """Rows by key: [length, hidden_size] each. Those of a kind that are not known yet are encoded together."""
        found: dict[bytes, Tensor] = {}
        missing: dict[str, dict[bytes, Media]] = {}
        for item in items:
            rows = self._cache.get(item.key)
            if rows is None:
                missing.setdefault(item.kind, {})[item.key] = item
            else:
                found[item.key] = rows
        for kind, of_kind in missing.items():
            made = self.model.encode(kind, [self._read(item) for item in of_kind.values()])
            for item, rows in zip(of_kind.values(), made, strict=True):
                if len(rows) != item.length:
                    raise EngineDead(f"the model made {len(rows)} rows of media with {item.length} tokens")
                found[item.key] = rows
                self._cache.put(item.key, rows)
        return found

    def _read(self, item: Media) -> dict[str, Tensor]:
        """The arrays of a piece of media, by name."""
        prefix, file = f"{item.index}.", self._payloads[item.payload]
        names = [name for name in file.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): torch.from_numpy(file[name]).to(self._device) for name in names}
