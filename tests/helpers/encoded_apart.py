"""An engine in this process whose media another worker encodes, as a process of ``--mm-encoder-workers`` does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import fwk
from fwk.interfaces.dialect import GenerateInput
from fwk.interfaces.multimodal import Media
from fwk.interfaces.parallel import SingleRank
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.setup.checkpoint import open_model
from fwk.setup.resolve import resolve
from fwk.worker.builder import WorkerBuilder
from fwk.worker.encoding import EncodingWorker
from fwk_multimodal.media.rows import gather_rows
from fwk_multimodal.media.server import MediaRequests


@contextmanager
def encoded_apart(model: Path, folder: Path, **options: Any) -> Iterator[tuple[fwk.LLM, list[int]]]:
    """What users of ``LLM`` are refused, and how many pieces were encoded at a time. folder: for files of rows."""
    plugins = discover()
    config = build_config(plugins, {**options, "model": str(model), "mm_encoder_workers": 1})
    setup = resolve(config, open_model(config, plugins, lambda line: None), plugins)
    worker = EncodingWorker(WorkerBuilder(config, setup, SingleRank(), 0), "media")
    worker.load()
    numbers, batches = count(), list[int]()

    async def sent(self: MediaRequests, item: GenerateInput) -> tuple[list[Media], Any]:
        media: list[Media] = list(item.media)
        files = [folder / f"{next(numbers)}.npz" for _ in media]
        for kind in sorted({one.kind for one in media}):
            pairs = [(one, file) for one, file in zip(media, files, strict=True) if one.kind == kind]
            pieces = [(one.payload, one.index, one.length, str(file)) for one, file in pairs]
            worker.call("features.media.encode", kind, pieces)
            batches.append(len(pieces))
        target = self._payloads.new()
        return gather_rows(target.path, media, files), target

    llm = fwk.LLM.__new__(fwk.LLM)
    llm._load(config, plugins, lambda line: None)
    with patch.object(MediaRequests, "sent", sent), llm:
        yield llm, batches
    worker.close()
