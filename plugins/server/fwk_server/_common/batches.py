"""Batches: the requests of a file, run alongside others, and their replies in another file.

Files, states and counts are those of OpenAI's API; other dialects tell of them in words of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import IO, Any

import msgspec
import orjson
from starlette.exceptions import HTTPException

from fwk.errors import EngineDead, InvalidRequest, NotServed, RequestFailed
from fwk.interfaces.dialect import Frontend
from fwk_server._common.body import MAX_DEPTH, check_counts, is_too_deep, shown
from fwk_server._common.caller import Caller
from fwk_server._common.files import FileStore, NoRoom, StoredFile, UnknownFile

MAX_REQUESTS = 50_000
MAX_BATCHES = 10_000
"""Remembered; the oldest that has ended goes first."""
MAX_LINE = 8 * 2**20
MAX_TOLD = 100
"""Errors of a file that are told one by one."""

SECONDS = 24 * 3600.0
"""The completion window."""

ENDED = ("completed", "failed", "expired", "cancelled")
"""States that a batch does not leave."""

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
    caller: Caller
    task: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self.body["id"]

    @property
    def has_ended(self) -> bool:
        return self.body["status"] in ENDED


@dataclass(slots=True)
class Line:
    """A line of a batch's file: a request's body as it is written, or why it is none.

    ``custom_id``: empty where it is not known.
    """

    number: int
    custom_id: str
    body: bytes = b""
    wrong: str = ""


class _Results:
    """The files of replies and of errors, written as they come; a batch that goes on adds to those it has."""

    def __init__(self, store: FileStore, batch: Batch) -> None:
        self._store = store
        self._batch = batch
        self._files: dict[str, IO[bytes]] = {}

    @staticmethod
    def paths(store: FileStore, batch: Batch) -> dict[str, Path]:
        return {kind: store.records.folder / f"{batch.id}_{kind}" for kind in ("output", "error")}

    def resume(self) -> set[int]:
        """The numbers of the lines that were answered before. What was cut off is taken away. Off the event loop."""
        done: set[int] = set()
        counts = self._batch.body["request_counts"]
        for (kind, path), name in zip(
            self.paths(self._store, self._batch).items(), ("completed", "failed"), strict=True
        ):
            counts[name] = 0
            if path.exists():
                size, end = path.stat().st_size, 0
                with path.open("rb") as file:
                    for number, length in _whole_lines(file):
                        done.add(number)
                        counts[name] += 1
                        end += length
                os.truncate(path, end)
                self._files[kind] = path.open("ab")
                self._store.give_back(size - end)
        return done

    def write(self, kind: str, line: dict[str, Any]) -> None:
        data = orjson.dumps(line) + b"\n"
        self._store.take(len(data))
        file = self._files.get(kind)
        if file is None:
            file = self._files[kind] = self.paths(self._store, self._batch)[kind].open("wb")
        place = file.tell()
        try:
            file.write(data)
            file.flush()  # a server that is killed has written it
        except OSError:
            file.truncate(place)
            raise

    def close(self) -> None:
        """Off the event loop: it waits for the disk."""
        for file in self._files.values():
            with file:
                os.fsync(file.fileno())

    def finish(self) -> None:
        """Tell of the files, which are closed."""
        batch = self._batch
        for kind, file in self._files.items():
            name = f"file-{kind}-{batch.id.rpartition('_')[2]}"
            self._store.add(Path(file.name), f"{batch.id}_{kind}.jsonl", "batch_output", batch.tenant, name)
            batch.body[f"{kind}_file_id"] = name


def _whole_lines(file: IO[bytes]) -> Iterator[tuple[int, int]]:
    """The numbers of a results file's lines that are whole, and their bytes."""
    for data in file:
        try:
            number = int(orjson.loads(data)["id"].split("_")[2])
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            return
        if not data.endswith(b"\n"):
            return
        yield number, len(data)


class _Lines:
    """Lines that several tasks take from: read by threads, one at a time."""

    def __init__(self, file: StoredFile, endpoint: str, done: set[int]) -> None:
        self._lines = (line for line in lines_of(file, endpoint) if line.number not in done)
        self._lock = Lock()

    def next(self) -> Line | None:
        with self._lock:
            return next(self._lines, None)

    def close(self) -> None:
        with self._lock:
            self._lines.close()


class BatchRunner:
    """Runs batches, all of them together ``concurrency`` requests at a time.

    A batch lives as long as the records of the ``store``: one that a server left goes on with the next, with the lines
    that have no answer. What the server cannot take now is tried again; what it refuses is an error of that request
    alone.
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
        self._batches: dict[str, Batch] = {}
        self._is_closing = False

    def load(self) -> None:
        """Take over the files and batches that an earlier server kept, and go on with what has not ended."""
        for (tenant, name), data in self._store.records.all("batch"):
            told = orjson.loads(data)
            self._batches[name] = Batch(tenant, told["body"], Caller.of_record(tenant, told["caller"]))
        waiting = [batch for batch in self._batches.values() if not batch.has_ended]
        self._store.load(path for batch in waiting for path in _Results.paths(self._store, batch).values())
        for batch in waiting:
            log.info("batch %s goes on", batch.id)
            batch.task = asyncio.create_task(self._run(batch))

    def known(self) -> list[Batch]:
        """All batches, the oldest first. Raises ``NotServed`` while another server has them."""
        self._store.records.check_open()
        return list(self._batches.values())

    def get(self, name: str) -> Batch | None:
        """A batch, if it is known. Raises as ``known`` does."""
        self._store.records.check_open()
        return self._batches.get(name)

    def forget(self, batch: Batch) -> None:
        """One that has ended."""
        del self._batches[batch.id]
        self._store.records.delete("batch", (batch.tenant, batch.id))

    async def start(
        self,
        endpoint: str,
        file: StoredFile,
        caller: Caller,
        metadata: dict[str, str] | None = None,
        *,
        kind: str = "batch",
        total: int = 0,
    ) -> Batch:
        """Begin a batch of requests to an endpoint, which is recorded then. Raises ``NotServed`` when too many are
        under way, or it cannot be recorded.

        kind: how its id begins. total: the number of requests, where it is known before they are read.
        """
        if len(self._batches) >= MAX_BATCHES:
            ended = next((batch for batch in self._batches.values() if batch.has_ended), None)
            if ended is None:
                raise NotServed(f"{MAX_BATCHES} batches are under way: try again later", 429)
            self.forget(ended)
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
        batch = self._batches[body["id"]] = Batch(file.tenant, body, caller)
        self._record(batch)
        try:
            await self._store.records.flush()
        except NotServed:
            del self._batches[batch.id]
            raise
        batch.task = asyncio.create_task(self._run(batch))
        return batch

    async def cancel(self, batch: Batch) -> None:
        """End a batch: what has been answered stays. One that has ended is left as it is."""
        if not batch.has_ended and batch.task is not None:
            batch.body |= {"status": "cancelling", "cancelling_at": int(time.time())}
            self._record(batch)
            batch.task.cancel()
            await asyncio.gather(batch.task, return_exceptions=True)
            self._end(batch, "cancelled")
            await self._store.records.flush()

    async def close(self) -> None:
        """End all, or leave them as they are for the next server."""
        self._is_closing = self._store.records.is_lasting
        for batch in list(self._batches.values()):
            if not self._is_closing:
                await self.cancel(batch)
            elif batch.task is not None:
                batch.task.cancel()
                await asyncio.gather(batch.task, return_exceptions=True)

    def _record(self, batch: Batch) -> None:
        told = {"body": batch.body, "caller": batch.caller.record()}
        self._store.records.put("batch", (batch.tenant, batch.id), orjson.dumps(told))

    def _end(self, batch: Batch, status: str) -> None:
        if not batch.has_ended:
            batch.body |= {"status": status, f"{status}_at": int(time.time())}
            self._record(batch)

    async def _run(self, batch: Batch) -> None:
        endpoint, run_blocking = batch.body["endpoint"], self._frontend.run_blocking
        results = _Results(self._store, batch)
        status = "cancelled"
        try:
            done: set[int] = await run_blocking(results.resume)
            if batch.body["status"] == "cancelling":  # by an earlier server
                return
            status = "failed"
            file = self._store.get(batch.body["input_file_id"], batch.tenant)
            total, is_any_good, errors = await run_blocking(validated, file, endpoint)
            batch.body["errors"] = {"object": "list", "data": errors} if errors else None
            if not is_any_good:
                return
            batch.body["request_counts"]["total"] = total
            batch.body |= {"status": "in_progress", "in_progress_at": int(time.time())}
            async with asyncio.timeout(max(batch.body["expires_at"] - time.time(), 0)):
                with contextlib.closing(_Lines(file, endpoint, done)) as lines:
                    async with asyncio.TaskGroup() as group:
                        for _ in range(min(self._concurrency, total)):
                            group.create_task(self._work(batch, lines, results))
            status = "completed"
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        except TimeoutError:
            status = "expired"
        except Exception as error:  # of a disk that is full, say
            found = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            batch.body["errors"] = {"object": "list", "data": [_fatal(found)]}
        finally:
            await run_blocking(results.close)
            if not self._is_closing:
                results.finish()
                if status == "completed":
                    batch.body["finalizing_at"] = int(time.time())
                self._end(batch, status)

    async def _work(self, batch: Batch, lines: _Lines, results: _Results) -> None:
        counts = batch.body["request_counts"]
        while (line := await self._frontend.run_blocking(lines.next)) is not None:
            told: dict[str, Any] = {
                "id": f"batch_req_{line.number}_{uuid.uuid4().hex}",
                "custom_id": line.custom_id or None,
                "response": None,
                "error": {"code": "invalid_request", "message": line.wrong},
            }
            is_fine = False
            if not line.wrong:
                async with self._slots:
                    status, body = await self._answer(batch.body["endpoint"], line.body, batch.caller)
                is_fine = status == 200
                response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
                told |= {"response": response, "error": None}
            results.write("output" if is_fine else "error", told)
            counts["completed" if is_fine else "failed"] += 1

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


def model_of(data: bytes) -> Any:
    """What the body of a line calls the model, of any type. Off the event loop: bodies are large."""
    return orjson.loads(data).get("model")


def validated(file: StoredFile, endpoint: str) -> tuple[int, bool, list[dict[str, Any]]]:
    """The number of lines of a file, whether a request is among them, and what is wrong with it. Off the event loop."""
    errors: list[dict[str, Any]] = []
    is_any_good, number = False, 0
    for line in lines_of(file, endpoint):
        number = line.number
        if number > MAX_REQUESTS:
            return 0, False, [_error("too_many_requests", f"a batch has at most {MAX_REQUESTS} requests", number)]
        is_any_good |= not line.wrong
        if line.wrong and len(errors) < MAX_TOLD:
            errors.append(_error("invalid_request", line.wrong, number))
    if not number:
        errors.append(_error("empty_file", "the file has no lines", None))
    return number, is_any_good, errors


def lines_of(file: StoredFile, endpoint: str) -> Generator[Line]:
    """The lines of a file. Not on the event loop: each may take its time."""
    seen: set[str] = set()
    with file.path.open("rb") as source:
        number = 0
        while data := source.readline(MAX_LINE + 1):
            number += 1
            if len(data) > MAX_LINE:
                while data and not data.endswith(b"\n"):
                    data = source.readline(MAX_LINE)
                yield Line(number, "", wrong=f"a line has at most {MAX_LINE} bytes")
                continue
            yield _read(data, endpoint, number, seen)


def _read(data: bytes, endpoint: str, number: int, seen: set[str]) -> Line:
    """A line. Its body is not looked into: what serves it does, and says what is wrong with it."""
    try:
        check_counts(data)
        line = orjson.loads(data)
    except InvalidRequest as error:
        return Line(number, "", wrong=str(error))
    except orjson.JSONDecodeError as error:
        return Line(number, "", wrong=f"not JSON: {error}")
    if not isinstance(line, dict):
        return Line(number, "", wrong="a line must be a JSON object")
    name = line.get("custom_id")
    if not isinstance(name, str) or not 0 < len(name) <= 512:
        return Line(number, "", wrong="custom_id must be a string of 1 to 512 characters")
    wrong = f"custom_id {shown(name)} is there twice" if name in seen else _wrong(line, endpoint)
    seen.add(name)
    # Too deep a body is refused by what reads it.
    is_deep = not wrong and is_too_deep(line["body"])
    if not wrong and not is_deep:
        wrong = _twice(json.loads(data, object_pairs_hook=list))
    if wrong:
        return Line(number, name, wrong=wrong)
    try:
        return Line(number, name, bytes(_decode_line(data).body))
    except RecursionError:
        return Line(number, name, data)


def _wrong(line: dict[str, Any], endpoint: str) -> str:
    """What is wrong with a line that has a name; its body is an object where this is empty."""
    if line.get("method") != "POST":
        return "method must be POST"
    if line.get("url") != endpoint:
        return f"url must be {endpoint}, the batch's endpoint, not {shown(line.get('url'))}"
    if not isinstance(line.get("body"), dict):
        return "body must be an object"
    if line["body"].get("stream"):
        return "body.stream: the replies of a batch are not streamed"
    if any(is_too_deep(value) for key, value in line.items() if key != "body"):
        return f"a line is nested at most {MAX_DEPTH} levels deep"
    return ""


def _twice(pairs: list[tuple[str, Any]]) -> str:
    """What is wrong with the keys of a line itself."""
    keys = [key for key, _ in pairs]
    seen: set[str] = set()
    twice = next((key for key in keys if key in seen or seen.add(key)), None)
    return "" if twice is None else f"the key {shown(twice)} is given twice"


def _fatal(error: Exception) -> dict[str, Any]:
    """Why a batch cannot go on."""
    if isinstance(error, FileNotFoundError | UnknownFile):
        return _error("file_not_found", "the file was deleted", None)
    if isinstance(error, NoRoom):
        return _error("no_room", f"the results do not fit: {error}", None)
    log.error("a batch cannot go on", exc_info=error)
    return _error("internal_error", f"internal error: {type(error).__name__}", None)


def _error(code: str, message: str, line: int | None) -> dict[str, Any]:
    return {"code": code, "message": message, "param": None, "line": line}
