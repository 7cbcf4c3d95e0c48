"""Message batches: ``/v1/messages/batches``, over the batches that OpenAI's dialect runs, too."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from pydantic import ConfigDict, Field, WithJsonSchema
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from fwk.errors import InvalidRequest
from fwk_server._common import body
from fwk_server._common.batches import MAX_LINE, MAX_REQUESTS, Batch, BatchRunner, lines_of
from fwk_server._common.body import shown
from fwk_server._common.caller import caller_of
from fwk_server._common.documented import BYTES, Reply
from fwk_server._common.fields import CONTEXT, RequestFields
from fwk_server._common.files import FileStore, NoRoom, StoredFile
from fwk_server._common.replies import json_response, off_loop

if TYPE_CHECKING:
    from fastapi import FastAPI

    from fwk_server._common.chat.dialect import ChatDialect

ALL = "/v1/messages/batches"
_ONE = f"{ALL}/{{message_batch_id}}"
MESSAGES = "/v1/messages"
MAX_LISTED = 1_000
_STATES = {"validating": "in_progress", "in_progress": "in_progress", "cancelling": "canceling"}
"""Of our batches, and what they are called here; the others have ended."""
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)
_ID = [{"name": "message_batch_id", "in": "path", "required": True, "schema": {"type": "string", "maxLength": 128}}]
_PAGE: list[dict[str, Any]] = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}},
    {"name": "after_id", "in": "query", "schema": {"type": "string", "maxLength": 128}},
    {"name": "before_id", "in": "query", "schema": {"type": "string", "maxLength": 128}},
]
_REQUESTS = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_REQUESTS,
    "items": {
        "type": "object",
        "x-limit": CONTEXT,
        "properties": {
            "custom_id": {"type": "string", "maxLength": 64},
            "params": {"type": "object", "x-limit": CONTEXT},
        },
    },
}


class BatchBody(RequestFields):
    """``POST /v1/messages/batches``."""

    model_config = ConfigDict(extra="forbid")

    requests: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_REQUESTS), WithJsonSchema(_REQUESTS)]


class BatchReply(Reply):
    """A message batch."""

    id: str
    type: str
    processing_status: str
    request_counts: dict[str, int]


class ListReply(Reply):
    """Message batches."""

    data: list[dict[str, Any]]
    has_more: bool


class DeletedReply(Reply):
    """The reply to a deletion."""

    id: str
    type: str


class UnknownBatch(HTTPException):
    """No such batch is there for this caller."""

    param = "message_batch_id"

    def __init__(self, name: str) -> None:
        super().__init__(404, f"there is no message batch {shown(name)}")


class MessageBatches:
    """The routes, and what they tell of. Batches of one key are not there for another."""

    def __init__(self, store: FileStore, runner: BatchRunner) -> None:
        self._store = store
        self._runner = runner

    def add_routes(self, app: FastAPI, dialect: ChatDialect, error: type[Reply]) -> None:
        """Add the routes."""
        self._frontend = dialect.frontend
        add = partial(dialect.route, app, error=error)
        add(ALL, self.create, reply=BatchReply)
        add(ALL, self.list_batches, reply=ListReply, method="GET", parameters=_PAGE)
        add(_ONE, self.retrieve, reply=BatchReply, method="GET", parameters=_ID)
        add(_ONE, self.delete, reply=DeletedReply, method="DELETE", parameters=_ID)
        add(f"{_ONE}/cancel", self.cancel, reply=BatchReply, parameters=_ID)
        add(f"{_ONE}/results", self.results, method="GET", parameters=_ID, stream=BYTES)

    async def create(self, request: Request) -> Response:
        """Run messages alongside those of other clients."""
        data, caller = await body.read(request), caller_of(request)
        file, total = await off_loop(request, self._frontend, self._written, data, caller.service.tenant)
        batch = await self._runner.start(MESSAGES, file, caller, kind="msgbatch", total=total)
        return json_response(_told(batch, request))

    def _written(self, data: bytes, tenant: str) -> tuple[StoredFile, int]:
        """The file of a batch's requests, and their number. Runs off the event loop."""
        asked = body.validate(BatchBody, body.parse(data))
        names: set[str] = set()
        for i, entry in enumerate(asked.requests):
            at, name = f"requests[{i}]", entry.get("custom_id")
            if not isinstance(name, str) or not _NAME.fullmatch(name):
                raise InvalidRequest(f"{at}.custom_id must be 1 to 64 letters, digits, _ and -", "requests")
            if name in names:
                raise InvalidRequest(f"{at}.custom_id {shown(name)} is there twice", "requests")
            names.add(name)
            params = body.want(entry.get("params"), dict, "an object", f"{at}.params")
            if params.get("stream"):
                raise InvalidRequest(f"{at}.params.stream: the replies of a batch are not streamed", "requests")
        path = self._store.new_path()
        with path.open("wb") as target:
            for entry in asked.requests:
                told = {"custom_id": entry["custom_id"], "method": "POST", "url": MESSAGES, "body": entry["params"]}
                line = orjson.dumps(told) + b"\n"
                if len(line) > MAX_LINE:
                    path.unlink()
                    raise InvalidRequest(f"requests: a request of a batch has at most {MAX_LINE} bytes", "requests")
                target.write(line)
            target.flush()
            os.fsync(target.fileno())
        try:
            self._store.take(path.stat().st_size, is_new=True)
        except NoRoom:
            path.unlink()
            raise
        return self._store.add(path, "requests.jsonl", "batch", tenant), len(asked.requests)

    async def list_batches(self, request: Request) -> Response:
        """List the batches, the newest first."""
        query = request.query_params
        limit, after, before = query.get("limit", "20"), query.get("after_id"), query.get("before_id")
        if not re.fullmatch(r"[0-9]{1,4}", limit, re.ASCII) or not 1 <= int(limit) <= MAX_LISTED:
            raise InvalidRequest(f"limit must be an integer from 1 to {MAX_LISTED}, not {shown(limit)}", "limit")
        tenant = caller_of(request).service.tenant
        found = [batch for batch in self._runner.known() if batch.tenant == tenant][::-1]
        names = [batch.body["id"] for batch in found]
        for place, name in (("after_id", after), ("before_id", before)):
            if name is not None and name not in names:
                raise InvalidRequest(f"{place}: there is no {shown(name)}", place)
        if before is not None:
            found = found[: names.index(before)]
            listed, has_more = found[-int(limit) :], len(found) > int(limit)
        else:
            found = found[names.index(after) + 1 :] if after is not None else found
            listed, has_more = found[: int(limit)], len(found) > int(limit)
        told = [_told(batch, request) for batch in listed]
        ends = {"first_id": told[0]["id"] if told else None, "last_id": told[-1]["id"] if told else None}
        return json_response({"data": told, "has_more": has_more, **ends})

    async def retrieve(self, request: Request) -> Response:
        """Tell of a batch."""
        return json_response(_told(self._batch(request), request))

    async def cancel(self, request: Request) -> Response:
        """End a batch: what has been answered stays."""
        batch = self._batch(request)
        await self._runner.cancel(batch)
        return json_response(_told(batch, request))

    async def delete(self, request: Request) -> Response:
        """Forget a batch that has ended, with its results."""
        batch = self._ended(request, "deleted")
        name = batch.body["id"]
        for file in self._files(batch):
            self._store.delete(file)
        self._runner.forget(batch)
        return json_response({"id": name, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """The results, a line of JSON each, in the order in which they came."""
        batch = self._ended(request, "read")
        return StreamingResponse(self._results(batch), media_type="application/x-jsonl")

    def _results(self, batch: Batch) -> Iterator[bytes]:
        told: set[str] = set()
        for kind in ("output", "error"):
            name = batch.body.get(f"{kind}_file_id")
            if name is None:
                continue
            with self._store.get(name, batch.tenant).path.open("rb") as source:
                for data in source:
                    line = orjson.loads(data)
                    found = line["response"]["body"]
                    told.add(line["custom_id"])
                    result = (
                        {"type": "succeeded", "message": found}
                        if kind == "output"
                        else {"type": "errored", "error": {"request_id": line["response"]["request_id"], **found}}
                    )
                    yield _line(line["custom_id"], result)
        rest = {"type": _REST.get(batch.body["status"], "canceled")}
        for line in lines_of(self._input(batch), MESSAGES):
            if line.custom_id not in told:
                yield _line(line.custom_id, rest)

    def _input(self, batch: Batch) -> StoredFile:
        return self._store.get(batch.body["input_file_id"], batch.tenant)

    def _files(self, batch: Batch) -> Iterator[StoredFile]:
        yield self._input(batch)
        for kind in ("output", "error"):
            name = batch.body.get(f"{kind}_file_id")
            if name is not None:
                yield self._store.get(name, batch.tenant)

    def _batch(self, request: Request) -> Batch:
        name = request.path_params["message_batch_id"]
        batch = self._runner.get(name)
        if batch is None or batch.tenant != caller_of(request).service.tenant:
            raise UnknownBatch(name)
        return batch

    def _ended(self, request: Request, done: str) -> Batch:
        batch = self._batch(request)
        if not batch.has_ended:
            raise InvalidRequest(f"a message batch is {done} when it has ended: cancel it, or wait", "message_batch_id")
        return batch


_REST = {"expired": "expired"}
"""What became of the requests that were not answered, by how the batch ended."""


def _line(name: str, result: dict[str, Any]) -> bytes:
    return orjson.dumps({"custom_id": name, "result": result}) + b"\n"


def _told(batch: Batch, request: Request) -> dict[str, Any]:
    """A batch as Anthropic's API tells of it."""
    found, counts = batch.body, batch.body["request_counts"]
    ended = batch.has_ended
    rest = counts["total"] - counts["completed"] - counts["failed"]
    kind = ("expired" if found["status"] == "expired" else "canceled") if ended else "processing"
    tally = {"processing": 0, "canceled": 0, "expired": 0} | {kind: rest}
    end = next((found[f"{status}_at"] for status in _ENDS if f"{status}_at" in found), None)
    return {
        "id": found["id"],
        "type": "message_batch",
        "processing_status": _STATES.get(found["status"], "ended"),
        "request_counts": {"succeeded": counts["completed"], "errored": counts["failed"], **tally},
        "created_at": _time(found["created_at"]),
        "expires_at": _time(found["expires_at"]),
        "ended_at": _time(end) if ended else None,
        "cancel_initiated_at": _time(found.get("cancelling_at")),
        "archived_at": None,
        "results_url": str(request.base_url) + f"{ALL}/{found['id']}/results".lstrip("/") if ended else None,
    }


_ENDS = ("completed", "cancelled", "expired", "failed")


def _time(seconds: int | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
