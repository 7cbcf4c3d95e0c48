"""The observer: keeps the events of a while, and writes it when an engine dies."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from typing import Any

import msgspec

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk_observability.crash_dump import CrashDumpOptions
from fwk_process.folders import output_folder

log = logging.getLogger("fwk.crash_dump")

MAX_ENDED = 10_000
"""Requests that have ended and are kept."""


class CrashDumpObserver(Observer):
    """A file for each death: a line of JSON for it, and one for each request."""

    wants_content = True

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        options: CrashDumpOptions = context.options
        self._folder = output_folder(options.crash_dump_folder or "", "--crash-dump-folder")
        self._seconds = options.crash_dump_seconds
        self._open: dict[str, RequestRecord] = {}
        self._ended: deque[RequestRecord] = deque(maxlen=MAX_ENDED)
        self._num_written = 0

    def request_arrived(self, record: RequestRecord) -> None:
        self._open[record.request_id] = record

    def request_finished(self, record: RequestRecord) -> None:
        self._open.pop(record.request_id, None)
        self._ended.append(record)
        now = time.monotonic()
        while self._ended and self._ended[0].finished is not None and self._ended[0].finished < now - self._seconds:
            self._ended.popleft()

    def engine_died(self, reason: str) -> None:
        died = time.monotonic()
        recent = [record for record in self._ended if (record.finished or died) >= died - self._seconds]
        shown: list[dict[str, Any]] = [
            {"event": "engine_died", "reason": reason, "time": time.time(), "model": self.context.model_name},
            *(_fields(record, died, is_open=True) for record in self._open.values()),
            *(_fields(record, died, is_open=False) for record in reversed(recent)),
        ]
        self._num_written += 1
        path = self._folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}-{self._num_written}.jsonl"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in shown)
        except OSError as error:
            log.error("the requests around the engine's death cannot be written: %s", error)
            return
        log.error("the requests around the engine's death are in %s: %d", path, len(shown) - 1)


def _fields(record: RequestRecord, died: float, *, is_open: bool) -> dict[str, Any]:
    """``arrived`` and ``finished``: seconds before the engine's death."""
    return {
        "event": "under_way" if is_open else "ended",
        "request_id": record.request_id,
        "label": record.label,
        "operation": record.operation,
        "arrived": round(died - record.arrived, 3),
        "finished": round(died - record.finished, 3) if record.finished is not None else None,
        "output_tokens": None if is_open else record.num_output_tokens,
        "finish_reasons": list(record.finish_reasons),
        "n": record.n,
        "sampling": msgspec.to_builtins(record.sampling) if record.sampling is not None else None,
        "prompt_token_ids": list(record.prompt_token_ids) if record.prompt_token_ids is not None else None,
        "outputs": list(record.outputs) if record.outputs is not None else None,
    }
