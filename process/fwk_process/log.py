"""The log of every process: lines for people, or a JSON object per line for programs."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterable
from typing import Any, Literal, TextIO

from fwk_process.hiding import HidingFormatter, hide
from fwk_process.progress import is_watched

Format = Literal["text", "json"]

CLEAR_LINE = "\r\x1b[K"
"""What terminals take for it."""

FIELDS = "fields"
"""Attribute of a record (``extra={FIELDS: {...}}``) whose items become members of the JSON object."""


class JsonFormatter(logging.Formatter):
    """A record as one line of JSON: time (UTC), level, process, logger, message, the record's own fields, error."""

    def __init__(self, process: str, secrets: Iterable[str | None]) -> None:
        super().__init__()
        self._process = process
        self._secrets = [form for secret in secrets if secret for form in (secret, json.dumps(secret)[1:-1])]

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields: dict[str, Any] = getattr(record, FIELDS, {})
        line |= {name: value for name, value in fields.items() if name not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return hide(json.dumps(line, ensure_ascii=False, default=str), self._secrets)


class ClearingHandler(logging.StreamHandler[TextIO]):
    """Clears progress bars before a line: this process's own, and on a terminal one that another process has drawn.

    They come again below it.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record. Where no bar can be, tqdm is left alone: its first lock is a semaphore that stays."""
        if not (self.stream.isatty() and is_watched()):
            super().emit(record)
            return
        tqdm = sys.modules.get("tqdm.std")  # imported by the first bar
        with tqdm.tqdm.external_write_mode(file=self.stream) if tqdm is not None else contextlib.nullcontext():
            self.stream.write(CLEAR_LINE)
            super().emit(record)


def set_up_log(level: str, form: Format = "text", process: str = "", secrets: Iterable[str | None] = ()) -> None:
    """Log to standard error; ``secrets`` are left out of whatever is logged. ``process``: which of the server's."""
    handler = ClearingHandler(sys.stderr)
    if form == "json":
        handler.setFormatter(JsonFormatter(process or "server", secrets))
    else:
        name = f" {process}:" if process else ""
        handler.setFormatter(HidingFormatter(f"%(asctime)s %(levelname)s{name} %(message)s", secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler])
