"""The part in each worker: media are encoded when a step comes to their tokens, and kept by content."""

from __future__ import annotations

import logging
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from fwk.errors import EngineDead, FwkError, PluginFault, one_line_traceback
from fwk.interfaces.feature import LoadedModel, ModelBuild, WorkerPart, WorkerPartContext
from fwk.interfaces.model import Model, ModelContext
from fwk.interfaces.multimodal import POSITION_PLANES, POSITION_SHIFT, Media
from fwk.types import Batch, ForwardBatch, Inserted, NewSequence
from fwk_multimodal.media import PromptMedia, encodes_apart
from fwk_multimodal.media.rows import read_rows, write_rows

log = logging.getLogger(__name__)


class EncoderCache:
    """What was encoded, by content. Those used least recently go first when there are more than ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._found: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: bytes) -> Tensor | None:
        found = self._found.get(key)
        if found is not None:
            self._found.move_to_end(key)
        return found

    def put(self, key: bytes, rows: Tensor) -> None:
        """Keep it, unless it alone is too large."""
        if key in self._found or rows.nbytes > self.max_bytes:
            return
        if rows.untyped_storage().nbytes() > rows.nbytes:  # of a batch, all of which it would keep
            rows = rows.clone()
        self._found[key] = rows
        self.num_bytes += rows.nbytes
        while self.num_bytes > self.max_bytes:
            self.num_bytes -= self._found.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        self._found.clear()
        self.num_bytes = 0


class PromptPlanes:
    """How far the positions of a prompt's tokens in each plane are from their places (M-RoPE).

    Text has one position in all planes. Media begin behind the largest position before them, and what follows goes on
    behind their own largest one.
    """

    def __init__(self, media: Sequence[Media], planes: Sequence[np.ndarray | None]) -> None:
        """planes: of each piece, ``POSITION_PLANES``; None: its tokens are as text."""
        self.end = media[-1].end
        self._table = np.zeros((3, self.end), np.int64)
        behind = 0  # what the text so far is behind its places
        last = 0
        for item, own in zip(media, planes, strict=True):
            self._table[:, last : item.start] = behind
            first = item.start + behind
            if own is None:
                self._table[:, item.start : item.end] = behind
            else:
                self._table[:, item.start : item.end] = own + first - np.arange(item.start, item.end)
                behind = first + int(own.max()) + 1 - item.end
            last = item.end
        self.behind = behind

    def shift(self, start: int, count: int) -> np.ndarray:
        """[3, count] int64: of tokens from place ``start`` on."""
        found = np.full((3, count), self.behind)
        known = self._table[:, start : start + count]
        found[:, : known.shape[1]] = known
        return found


class MediaRows(WorkerPart):
    """The media of the sequences that a worker knows, and the rows that a model makes of them.

    A step encodes what its tokens come to and nothing else, so that a prompt of many pieces holds up the others no
    longer than a step each. What the cache has given up is encoded again, from the payload.
    """

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._is_fed = encodes_apart(context.options)
        self._model: Model | None = None
        self._cache = EncoderCache(0 if self._is_fed else context.options.mm_encoder_cache_bytes)
        self._payloads: dict[str, Any] = {}  # opened files, by path
        self._media: dict[int, Sequence[Media]] = {}  # by slot; none once all of them are computed
        self._num_computed: dict[int, int] = {}
        self._cut: dict[int, tuple[bytes, Tensor]] = {}  # by slot, key and rows of a piece that a step ended in
        self._planes: dict[int, PromptPlanes] = {}  # by slot, of sequences whose media have some

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"open": self.open_payloads, "close": self.close_payloads, "encode": self.encode}

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        context.media = self.context.inputs if build.role in ("served", "encoder") else frozenset()
        context.has_encoder = build.role == "encoder" or not self._is_fed
        if self._model is not None and context.media and self._is_fed:
            raise FwkError(
                "the processes of --mm-encoder-workers keep the weights that they started with: start the server "
                "again with the others"
            )
        return ""

    def kept_bytes(self, takes: frozenset[str]) -> int:
        return self._cache.max_bytes if takes else 0

    def open_payloads(self, paths: list[str]) -> str:
        """Open payloads that requests to come read; why one cannot be opened, if so."""
        try:
            for path in paths:
                self._payloads[path] = np.load(path, allow_pickle=False)
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            return f"what was made of the request's media cannot be read: {type(error).__name__}"
        return ""

    def close_payloads(self, paths: list[str]) -> None:
        """No request reads these any more."""
        for path in paths:
            if path in self._payloads:
                self._payloads.pop(path).close()

    def model_loaded(self, loaded: LoadedModel) -> None:
        self._model = cast(Model, loaded.model)  # one that pools is not given this part
        self._cache.clear()  # what was encoded is of the old weights
        self._cut.clear()

    def begin(self, new: NewSequence, asked: PromptMedia) -> None:
        self._media[new.slot] = asked.media
        self._num_computed[new.slot] = new.num_computed_tokens
        planes = [self._array(item, POSITION_PLANES) for item in asked.media]
        if any(own is not None for own in planes):
            self._planes[new.slot] = PromptPlanes(asked.media, planes)

    def forget(self, slot: int) -> None:
        self._media.pop(slot, None)
        self._num_computed.pop(slot, None)
        self._planes.pop(slot, None)
        self._cut.pop(slot, None)

    def calls_layers(self, batch: Batch) -> bool:
        """Whether a step comes to tokens of media, or behind some: no capture has room for rows, nor for planes."""
        for scheduled in batch.sequences:
            if scheduled.slot in self._planes:
                return True
            past = self._num_computed.get(scheduled.slot, 0)
            end = past + scheduled.num_new_tokens
            if any(item.end > past and item.start < end for item in self._media.get(scheduled.slot, ())):
                return True
        return False

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        if self._planes:
            self._shift(batch, forward)
        rows: list[np.ndarray] = []
        parts: list[tuple[Media, slice]] = []
        cut: dict[int, Media] = {}  # by slot
        first = 0
        for scheduled in batch.sequences:
            start, first = first, first + scheduled.num_new_tokens
            media = self._media.get(scheduled.slot)
            if media is None:
                continue
            past = self._num_computed[scheduled.slot]
            end = self._num_computed[scheduled.slot] = past + scheduled.num_new_tokens
            for item in media:
                low, high = max(item.start, past), min(item.end, end)
                if low < high:
                    rows.append(np.arange(low, high) + (start - past))
                    parts.append((item, slice(low - item.start, high - item.start)))
                    if high < item.end:
                        cut[scheduled.slot] = item
            if end >= media[-1].end:
                del self._media[scheduled.slot]
        if any(item.is_span for item, _ in parts):
            self._see_spans(forward, rows, parts)
        if parts:
            known = dict(self._cut.pop(one.slot) for one in batch.sequences if one.slot in self._cut)
            encoded = self._encoded([item for item, _ in parts], known)
            self._cut |= {slot: (item.key, encoded[item.key]) for slot, item in cut.items()}
            values = [encoded[item.key][part] for item, part in parts]
            forward.inserted = Inserted(self.context.send(np.concatenate(rows)), torch.cat(values))

    def _see_spans(
        self, forward: ForwardBatch, rows: Sequence[np.ndarray], parts: Sequence[tuple[Media, slice]]
    ) -> None:
        """Tokens of a piece see those behind them, too. rows: of the batch, by piece."""
        starts, counts = forward.query_start_np[:-1], np.diff(forward.query_start_np)
        place = np.arange(forward.num_tokens) - np.repeat(starts, counts)
        mask = np.arange(counts.max()) <= place[:, None]
        if forward.tree_mask is not None:  # of drafts in other sequences
            mask[:, : forward.tree_mask.shape[1]] &= forward.tree_mask.numpy(force=True)
        for own, (item, part) in zip(rows, parts, strict=True):
            if item.is_span:
                if part.stop != item.length:
                    raise EngineDead("a step ends within media whose tokens see each other")
                mask[own[:, None], place[own]] = True
        forward.tree_mask = self.context.send(mask)

    def _shift(self, batch: Batch, forward: ForwardBatch) -> None:
        """Before ``_num_computed`` goes on. Behind its media all tokens of a sequence are shifted alike."""
        shifts: list[np.ndarray] = []
        for scheduled in batch.sequences:
            planes, count = self._planes.get(scheduled.slot), scheduled.num_new_tokens
            if planes is None:
                shifts.append(np.zeros((3, count), np.int64))
            else:
                shifts.append(planes.shift(self._num_computed[scheduled.slot], count))
        forward.extras[POSITION_SHIFT] = self.context.send(np.concatenate(shifts, 1))

    def _encoded(self, items: Sequence[Media], known: Mapping[bytes, Tensor]) -> dict[bytes, Tensor]:
        """Rows by key: [length, hidden_size] each. Those of a kind that are not known yet are encoded together.

        known: of pieces that steps have ended within, whatever the cache has kept: no piece is encoded, nor read, once
        for each step that comes to some of its tokens.
        """
        found: dict[bytes, Tensor] = {}
        missing: dict[str, dict[bytes, Media]] = {}
        for item in items:
            if item.key in found:
                continue
            rows = self._cache.get(item.key)
            if rows is None:
                rows = known.get(item.key)
            if rows is None:
                rows = self._encoded_before(item)
            if rows is None:
                missing.setdefault(item.kind, {})[item.key] = item
            else:
                found[item.key] = rows
        for kind, of_kind in missing.items():
            for item, rows in zip(of_kind.values(), self._made(kind, [*of_kind.values()]), strict=True):
                found[item.key] = rows
                self._cache.put(item.key, rows)
        return found

    def _encoded_before(self, item: Media) -> Tensor | None:
        """Rows that came with the request; None: it came with what they are made of."""
        if not self._is_fed:
            return None
        found = read_rows(self._payloads[item.payload], item.index)
        return None if found is None else found.to(self.context.device, non_blocking=True)

    def encode(self, kind: str, pieces: Sequence[Sequence[Any]]) -> None:
        """In a process that encodes: rows of pieces of one kind to files of their own, all together.

        pieces: of each the payload, the number in it, its tokens, and the file for its rows. What it raises is of one
        of them, or of all.
        """
        items = [Media(b"", kind, 0, length, payload, index) for payload, index, length, _ in pieces]
        paths = sorted({item.payload for item in items})
        trouble = self.open_payloads(paths)
        try:
            if trouble:
                raise FwkError(trouble)
            for (*_, target), rows in zip(pieces, self._made(kind, items), strict=True):
                write_rows(target, rows)
        finally:
            self.close_payloads(paths)

    def _made(self, kind: str, items: Sequence[Media]) -> Sequence[Tensor]:
        """What the model encodes. Raises ``PluginFault`` in the name of the processor whose arrays it cannot."""
        file, model = self._payloads[items[0].payload], self._model
        assert model is not None
        try:
            made = model.encode(kind, [self._read(item) for item in items])
        except (FwkError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            told = f"{type(model).__name__} raised {type(error).__name__} for the arrays that {_who(file)} answered"
            log.error("%s: %s", told, one_line_traceback(error))
            raise PluginFault(f"{told} in process") from error
        found, wanted = [len(rows) for rows in made], [item.length for item in items]
        if found != wanted:
            raise PluginFault(
                f"{type(model).__name__} made {found} rows of the arrays that {_who(file)} answered in process, "
                f"which stand for {wanted} tokens"
            )
        return made

    def _read(self, item: Media) -> dict[str, Tensor]:
        """The arrays of a piece of media, by name."""
        prefix, file = f"{item.index}.", self._payloads[item.payload]
        names = [name for name in file.files if name.startswith(prefix)]
        return {name.removeprefix(prefix): torch.from_numpy(file[name]).to(self.context.device) for name in names}

    def _array(self, item: Media, name: str) -> np.ndarray | None:
        """One of them, on the host; None: there is none of this name."""
        file, key = self._payloads[item.payload], f"{item.index}.{name}"
        return file[key] if key in file.files else None


def _who(file: Any) -> str:
    """What messages call the processor that made the arrays of a payload."""
    return f"multimodal processor {file['who']}" if "who" in file.files else "the multimodal processor"
