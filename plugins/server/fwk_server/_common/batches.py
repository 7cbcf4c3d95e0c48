"""Batches: the requests of a file, run alongside others, and their replies in another file.

Files, states and counts are those of OpenAI's API; other dialects tell of them in words of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import msgspec
import orjson
from starlette.exceptions import HTTPException

from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed
from fwk.interfaces.dialect import Frontend
from fwk_server._common.body import shown
from fwk_server._common.caller import Caller
from fwk_server._common.files import FileStore, StoredFile

MAX_REQUESTS = 50_000
MAX_BATCHES = 10_000
"""Remembered; the oldest that has ended goes first."""
MAX_LINE = 8 * 2**20
MAX_TOLD = 100
"""Errors of a file that are told one by one."""

SECONDS = 24 * 3600.0
"""The completion window."""

PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Seconds between tries of a request that the server cannot take now."""

log = logging.getLogger(__name__)

ErrorBody = Callable[[int, str, str | None, str | None], dict[str, Any]]
Serve = Callable[[str, bytes, Caller], Awaitable[dict[str, Any]]]
"""An endpoint's reply to a body."""


@dataclass(slots=True)
class Batch:
    """One batch while it runs, and after."""

    tenant: str
    body: dict[str, Any]
    task: asyncio.Task[None] | None = None
    has_ended: bool = False


@dataclass(slots=True)
class _Line:
    """A request of the file."""

    custom_id: str
    body: bytes


@dataclass(slots=True)
class _Results:
    """The files of replies and of errors, written as they come; None until there is one."""

    store: FileStore
    files: dict[str, IO[bytes]] = field(default_factory=dict[str, IO[bytes]])

    def write(self, kind: str, line: dict[str, Any]) -> None:
        file = self.files.get(kind)
        if file is None:
            file = self.files[kind] = self.store.new_path().open("wb")
        file.write(orjson.dumps(line) + b"\n")

    def finish(self, batch: Batch) -> None:
        for kind, file in self.files.items():
            file.close()
            name = f"{batch.body['id']}_{kind}.jsonl"
            stored = self.store.add(Path(file.name), name, "batch_output", batch.tenant)
            batch.body[f"{kind}_file_id"] = stored.id


class BatchRunner:
    """Runs batches, all of them together ``concurrency`` requests at a time.

    A batch lives as long as the server. What the server cannot take now is tried again; what it refuses is an error of
    that request alone.
    """

    def __init__(
        self, frontend: Frontend, store: FileStore, serve: Serve, error_body: ErrorBody, concurrency: int
    ) -> None:
        self._frontend = frontend
        self._store = store
        self._serve = serve
        self._error_body = error_body
        self._slots = asyncio.Semaphore(concurrency)
        self._concurrency = concurrency
        self.batches: dict[str, Batch] = {}

    def start(
        self,
        endpoint: str,
        file: StoredFile,
        caller: Caller,
        metadata: dict[str, str] | None = None,
        *,
        kind: str = "batch",
        total: int = 0,
    ) -> Batch:
        """Begin a batch of requests to an endpoint. Raises ``NotServed`` when too many are under way.

        kind: how its id begins. total: the number of requests, where it is known before they are read.
        """
        if len(self.batches) >= MAX_BATCHES:
            ended = next((name for name, batch in self.batches.items() if batch.has_ended), None)
            if ended is None:
                raise NotServed(f"{MAX_BATCHES} batches are under way: try again later", 429)
            del self.batches[ended]
        now = int(time.time())
        body: dict[str, Any] = {
            "id": f"{kind}_{uuid.uuid4().hex}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file.id,
            "completion_window": "24h",
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": now,
            "expires_at": now + int(SECONDS),
            "request_counts": {"total": total, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        batch = self.batches[body["id"]] = Batch(file.tenant, body)
        batch.task = asyncio.create_task(self._run(batch, file, caller))
        return batch

    async def cancel(self, batch: Batch) -> None:
        """End a batch: what has been answered stays. One that has ended is left as it is."""
        if not batch.has_ended and batch.task is not None:
            batch.body |= {"status": "cancelling", "cancelling_at": int(time.time())}
            batch.task.cancel()
            await asyncio.gather(batch.task, return_exceptions=True)
            self._end(batch, "cancelled")

    async def close(self) -> None:
        """End all."""
        for batch in list(self.batches.values()):
            await self.cancel(batch)

    def _end(self, batch: Batch, status: str) -> None:
        if not batch.has_ended:
            batch.has_ended = True
            batch.body |= {"status": status, f"{status}_at": int(time.time())}

    async def _run(self, batch: Batch, file: StoredFile, caller: Caller) -> None:
        endpoint = batch.body["endpoint"]
        try:
            total, errors = await self._frontend.run_blocking(validated, file, endpoint)
        except OSError:
            total, errors = 0, [_error("file_not_found", "the file was deleted", None)]
        if errors:
            batch.body["errors"] = {"object": "list", "data": errors}
            self._end(batch, "failed")
            return
        counts = batch.body["request_counts"]
        counts["total"] = total
        batch.body |= {"status": "in_progress", "in_progress_at": int(time.time())}
        results = _Results(self._store)
        status = "cancelled"
        try:
            async with asyncio.timeout(SECONDS):
                with contextlib.closing(lines_of(file)) as lines:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(self._concurrency, total)):
                            group.create_task(self._work(batch, lines, results, caller))
            status = "completed"
        except TimeoutError:
            status = "expired"
        except Exception as error:  # of a disk that is full, say
            log.exception("a batch cannot go on")
            found = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            said = f"internal error: {type(found).__name__}"
            batch.body["errors"] = {"object": "list", "data": [_error("internal_error", said, None)]}
            status = "failed"
        finally:
            results.finish(batch)
            if status == "completed":
                batch.body["finalizing_at"] = int(time.time())
            self._end(batch, status)

    async def _work(self, batch: Batch, lines: Iterator[_Line], results: _Results, caller: Caller) -> None:
        counts = batch.body["request_counts"]
        for line in lines:  # shared with the others
            async with self._slots:
                status, body = await self._answer(batch.body["endpoint"], line.body, caller)
            is_fine = status == 200
            counts["completed" if is_fine else "failed"] += 1
            response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
            told = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": response}
            results.write("output" if is_fine else "error", told | {"error": None})

    async def _answer(self, endpoint: str, data: bytes, caller: Caller) -> tuple[int, dict[str, Any]]:
        found = 503, dict[str, Any]()
        for seconds in PATIENCE:
            try:
                return 200, await self._serve(endpoint, data, caller)
            except (EngineDead, NotServed) as error:
                status = 503 if isinstance(error, EngineDead) else error.status
                found = status, self._error_body(status, str(error), None, None)
                if status not in (429, 503):
                    return found
                await asyncio.sleep(seconds)
            except InvalidRequest as error:
                return 400, self._error_body(400, str(error), error.param, None)
            except HTTPException as error:
                return error.status_code, self._error_body(
                    error.status_code, str(error.detail), getattr(error, "param", None), getattr(error, "code", None)
                )
            except RequestFailed as error:
                return 500, self._error_body(500, str(error), None, None)
            except Exception as error:
                log.exception("a request of a batch failed")
                return 500, self._error_body(500, f"internal error: {type(error).__name__}", None, None)
        return found


class _RawLine(msgspec.Struct):
    custom_id: str
    body: msgspec.Raw


_decode_line = msgspec.json.Decoder(_RawLine).decode


def validated(file: StoredFile, endpoint: str) -> tuple[int, list[dict[str, Any]]]:
    """The number of requests of a file, and what is wrong with it. Runs off the event loop."""
    errors: list[dict[str, Any]] = []
    seen: set[str] = set()
    number = 0
    with file.path.open("rb") as source:
        for number, data in enumerate(iter(lambda: source.readline(MAX_LINE + 1), b""), 1):
            wrong = _wrong(data, endpoint, seen) if number <= MAX_REQUESTS else "too_many_requests"
            if wrong:
                message = f"a batch has at most {MAX_REQUESTS} requests" if number > MAX_REQUESTS else wrong
                errors.append(_error("invalid_request", message, number))
                if len(errors) == MAX_TOLD or number > MAX_REQUESTS:
                    break
    if not number:
        errors.append(_error("empty_file", "the file has no lines", None))
    return number, errors


def _wrong(data: bytes, endpoint: str, seen: set[str]) -> str:
    if len(data) > MAX_LINE:
        return f"a line has at most {MAX_LINE} bytes"
    try:
        line = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        return f"not JSON: {error}"
    if not isinstance(line, dict):
        return "a line must be a JSON object"
    name = line.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= 512:
        return "custom_id must be a string of 1 to 512 characters"
    if name in seen:
        return f"custom_id {shown(name)} is there twice"
    seen.add(name)
    if line.get("method") != "POST":
        return "method must be POST"
    if line.get("url") != endpoint:
        return f"url must be {endpoint}, the batch's endpoint, not {shown(line.get('url'))}"
    if not isinstance(line.get("body"), dict):
        return "body must be an object"
    if line["body"].get("stream"):
        return "body.stream: the replies of a batch are not streamed"
    return ""


def lines_of(file: StoredFile) -> Generator[_Line]:
    """The requests of a file that was validated."""
    with file.path.open("rb") as source:
        for data in source:
            # The body as it is written: what reads it refuses keys that are given twice, and nesting.
            try:
                line = _decode_line(data)
            except RecursionError:
                yield _Line(orjson.loads(data)["custom_id"], data)
            else:
                yield _Line(line.custom_id, bytes(line.body))


def _error(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
