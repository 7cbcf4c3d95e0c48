"""Uploads, whose file is written to the disk as it comes: a form of one file and a few short fields."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from fwk.errors import InvalidRequest, NotServed
from fwk_server._common.body import shown

MAX_FIELD = 1024
MAX_FIELDS = 8
MAX_HEADERS = 4096
"""Bytes of the headers of a part."""

FORM_BYTES = 2**16
"""Of a form, besides its file."""
PIECE = 2**20
"""Bytes that are written at a time, off the event loop."""


class Store(Protocol):
    """Where files go; it counts their bytes."""

    def new_path(self) -> Path: ...

    def take(self, size: int, *, is_new: bool = False) -> None:
        """``size`` bytes are about to be written. Raises what refuses the upload when they are too many."""
        ...

    def give_back(self, size: int) -> None: ...


class Upload:
    """A form that is read. Its file, named ``file``, has ``size`` bytes at ``path``; they are counted in the store.

    lists: names of fields that may be given more than once, each of whose values is then in ``lists``.
    """

    def __init__(
        self, store: Store, *, max_fields: int = MAX_FIELDS, max_field: int = MAX_FIELD, lists: Collection[str] = ()
    ) -> None:
        self._store = store
        self._max_fields, self._max_field = max_fields, max_field
        self.fields: dict[str, str] = {}
        self.lists: dict[str, list[str]] = {name: [] for name in lists}
        self.filename: str | None = None  # None: no file was in it
        self.size = 0
        self.path = store.new_path()
        self._target: IO[bytes] | None = None
        self._headers: dict[bytes, bytes] = {}
        self._num_header_bytes = 0
        self._name = self._value = self._text = b""
        self._field: str | None = None  # None: the file
        self._pieces: list[bytes] = []  # of the file, until they are written
        self._num_parts = 0
        self._has_ended = False

    async def read(self, request: Request, run_blocking: Callable[..., Any]) -> None:
        """Read the body. Raises ``InvalidRequest``, ``NotServed`` for what is no form, and ``NoRoom``."""
        kind, options = parse_options_header(request.headers.get("content-type"))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise NotServed("the content-type must be multipart/form-data, with a boundary", 415)
        try:
            parser = MultipartParser(options[b"boundary"], self._callbacks())
            held = 0
            async for data in request.stream():
                parser.write(data)
                held += len(data)
                if held >= PIECE:
                    await run_blocking(self._write)
                    held = 0
        except FormParserError as error:
            raise InvalidRequest(f"the form cannot be read: {error}") from None
        if not self._has_ended:
            raise InvalidRequest("the form ends before its last boundary")
        await run_blocking(self._write)

    def finish(self) -> None:
        """Close the file, which is on the disk then."""
        assert self._target is not None
        os.fsync(self._target.fileno())
        self._target.close()

    def discard(self) -> None:
        """Leave nothing of it."""
        if self._target is not None:
            self._target.close()
        self._store.give_back(self.size)
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.filename is not None and self._target is None:
            self._target = self.path.open("wb")
        if self._target is not None:
            self._target.write(b"".join(self._pieces))
            self._target.flush()
        self._pieces = []

    def _callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._on_name,
            "on_header_value": self._on_value,
            "on_header_end": self._on_header,
            "on_headers_finished": self._on_headers,
            "on_part_data": self._on_data,
            "on_part_end": self._on_part_end,
            "on_end": self._on_end,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > self._max_fields:
            raise InvalidRequest(f"a form has at most {self._max_fields} fields")
        self._headers, self._num_header_bytes = {}, 0

    def _on_name(self, data: bytes, start: int, end: int) -> None:
        self._name += self._counted(data[start:end])

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += self._counted(data[start:end])

    def _counted(self, data: bytes) -> bytes:
        self._num_header_bytes += len(data)
        if self._num_header_bytes > MAX_HEADERS:
            raise InvalidRequest(f"the headers of a form's part take at most {MAX_HEADERS} bytes")
        return data

    def _on_header(self) -> None:
        self._headers[self._name.lower()] = self._value
        self._name = self._value = b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        name = options.get(b"name", b"").decode(errors="replace")
        if name == "file" and b"filename" in options:
            if self.filename is not None:
                raise InvalidRequest("file is given twice", "file")
            self._field, self.filename = None, options[b"filename"].decode(errors="replace") or "upload.jsonl"
            return
        if name in self.fields:
            raise InvalidRequest(f"{shown(name)} is given twice", name[:256])
        self._field = name

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is None:
            self._store.take(end - start, is_new=True)
            self.size += end - start
            self._pieces.append(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > 4 * self._max_field:
            raise self._too_long(self._field)

    def _on_part_end(self) -> None:
        """Of a field, decoded as a whole: a character may have come in two pieces."""
        if self._field is None:
            return
        text, self._text = self._text.decode(errors="replace"), b""
        if len(text) > self._max_field:
            raise self._too_long(self._field)
        if self._field in self.lists:
            self.lists[self._field].append(text)
        else:
            self.fields[self._field] = text

    def _too_long(self, name: str) -> InvalidRequest:
        return InvalidRequest(f"{shown(name)} has more than {self._max_field} characters", name[:256])

    def _on_end(self) -> None:
        self._has_ended = True
