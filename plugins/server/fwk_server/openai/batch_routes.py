"""The routes of files and batches."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO, Literal

from pydantic import ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk_server._common import body
from fwk_server._common.batches import Batch, BatchRunner
from fwk_server._common.body import shown
from fwk_server._common.caller import caller_of
from fwk_server._common.documented import BYTES, Reply, documented, json_body
from fwk_server._common.fields import RequestFields
from fwk_server._common.files import FileStore, UnknownFile
from fwk_server._common.paging import DeletedReply, ListReply
from fwk_server._common.replies import Endpoint, closed_on_disconnect, json_response, read_as
from fwk_server._common.upload import Upload
from fwk_server.openai.bodies import ErrorBody

if TYPE_CHECKING:
    from fastapi import FastAPI

MAX_LISTED = 10_000
UPLOAD: dict[str, Any] = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                },
                "required": ["file", "purpose"],
            }
        }
    },
}


_Key = Annotated[str, Field(max_length=64)]
_Value = Annotated[str, Field(max_length=512)]


class BatchBody(RequestFields):
    """``POST /v1/batches``."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: Annotated[str, Field(max_length=128)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[_Key, _Value], Field(max_length=16)] | None = None


class FileReply(Reply):
    """A file."""

    id: str
    bytes: int
    filename: str
    purpose: str


class BatchReply(Reply):
    """A batch."""

    id: str
    status: str
    input_file_id: str


class UnknownBatch(HTTPException):
    """No such batch is there for this caller."""

    param = "batch_id"

    def __init__(self, name: str) -> None:
        super().__init__(404, f"there is no batch {shown(name)}")


class BatchRoutes:
    """What the routes do. Files and batches of one key are not there for another."""

    def __init__(self, frontend: Frontend, store: FileStore, runner: BatchRunner) -> None:
        self._frontend = frontend
        self._store = store
        self._runner = runner

    def add(self, app: FastAPI) -> None:
        """Add them."""
        one_file, one_batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
        file_id, batch_id = [_in_path("file_id")], [_in_path("batch_id")]
        add = partial(_add, app)
        add("POST", "/v1/files", self.upload, FileReply, requestBody=UPLOAD)
        add("GET", "/v1/files", self.list_files, ListReply, parameters=[*_PAGE, *_FILES])
        add("GET", one_file, self.retrieve_file, FileReply, parameters=file_id)
        add("DELETE", one_file, self.delete_file, DeletedReply, parameters=file_id)
        add("GET", f"{one_file}/content", self.file_content, None, stream=BYTES, parameters=file_id)
        add("POST", "/v1/batches", self.create, BatchReply, requestBody=json_body(BatchBody))
        add("GET", "/v1/batches", self.list_batches, ListReply, parameters=_PAGE)
        add("GET", one_batch, self.retrieve, BatchReply, parameters=batch_id)
        nothing = {"required": False, "content": {"application/json": {"schema": body.NOT_READ}}}
        add("POST", f"{one_batch}/cancel", self.cancel, BatchReply, parameters=batch_id, requestBody=nothing)

    async def upload(self, request: Request) -> Response:
        """Keep a file for a batch."""
        upload = Upload(self._store)
        try:
            await upload.read(request, self._frontend.run_blocking)
            purpose = upload.fields.pop("purpose", None)
            if upload.filename is None:
                raise InvalidRequest("file is missing", "file")
            if purpose != "batch":
                raise InvalidRequest(f"purpose must be batch, not {shown(purpose)}", "purpose")
            if unknown := next(iter(upload.fields), None):
                raise InvalidRequest(f"{shown(unknown)} is not supported, only file and purpose", unknown[:256])
            await self._frontend.run_blocking(upload.finish)
        except BaseException:
            upload.discard()
            raise
        tenant = caller_of(request).service.tenant
        stored = self._store.add(upload.path, upload.filename, purpose, tenant)
        await self._store.records.flush()
        return json_response(stored.body)

    async def list_files(self, request: Request) -> Response:
        """List the files: those of a purpose, if one is given, in the order of their upload or the reverse."""
        query = request.query_params
        purpose, order = query.get("purpose"), query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"order must be asc or desc, not {shown(order)}", "order")
        files = [file.body for file in self._store.of(caller_of(request).service.tenant)]
        return _page(
            request, [file for file in files if purpose in (None, file["purpose"])], is_ascending=order == "asc"
        )

    async def retrieve_file(self, request: Request) -> Response:
        """Tell of a file."""
        return json_response(self._file(request).body)

    async def delete_file(self, request: Request) -> Response:
        """Delete a file."""
        file = self._file(request)
        self._store.delete(file)
        return json_response({"id": file.id, "object": "file", "deleted": True})

    async def file_content(self, request: Request) -> Response:
        """A file's content."""
        stored = self._file(request)
        try:
            source = stored.path.open("rb")
        except FileNotFoundError:
            raise UnknownFile(stored.id, "file_id") from None
        return StreamingResponse(_pieces(source), media_type=BYTES, headers={"content-length": str(stored.size)})

    def _file(self, request: Request) -> Any:
        return self._store.get(request.path_params["file_id"], caller_of(request).service.tenant)

    async def create(self, request: Request) -> Response:
        """Run the requests of a file."""
        asked, _ = await read_as(BatchBody, request, self._frontend)
        caller = caller_of(request)
        file = self._store.get(asked.input_file_id, caller.service.tenant, "input_file_id")
        batch = await self._runner.start(asked.endpoint, file, caller, asked.metadata)
        return json_response(batch.body)

    async def list_batches(self, request: Request) -> Response:
        """List the batches."""
        tenant = caller_of(request).service.tenant
        return _page(request, [batch.body for batch in self._runner.known() if batch.tenant == tenant])

    async def retrieve(self, request: Request) -> Response:
        """Tell of a batch."""
        return json_response(self._batch(request).body)

    async def cancel(self, request: Request) -> Response:
        """End a batch."""
        batch = self._batch(request)
        await self._runner.cancel(batch)
        return json_response(batch.body)

    def _batch(self, request: Request) -> Batch:
        name = request.path_params["batch_id"]
        batch = self._runner.get(name)
        if batch is None or batch.tenant != caller_of(request).service.tenant:
            raise UnknownBatch(name)
        return batch


def _pieces(source: BinaryIO) -> Iterator[bytes]:
    with source:
        while data := source.read(2**18):
            yield data


def _in_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "maxLength": 128}}


_PAGE = [
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED}},
    {"name": "after", "in": "query", "schema": {"type": "string", "maxLength": 128}},
]
_FILES = [
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"], "default": "desc"}},
    {"name": "purpose", "in": "query", "schema": {"type": "string", "maxLength": 128}},
]


def _add(app: FastAPI, method: str, path: str, endpoint: Endpoint, reply: Any, stream: str = "", **extra: Any) -> None:
    app.add_api_route(
        path,
        closed_on_disconnect(endpoint),
        methods=[method],
        response_model=None,
        name=f"{endpoint.__name__}_{method}",
        description=endpoint.__doc__,
        responses=documented(reply, ErrorBody, works=method == "POST", stream=stream),
        response_class=Response if reply is None else JSONResponse,
        openapi_extra=extra,
    )


def _page(request: Request, items: list[dict[str, Any]], *, is_ascending: bool = False) -> Response:
    """Part of a list that is given with the oldest first; the newest comes first unless it is to ascend."""
    query = request.query_params
    limit, after = query.get("limit", "20"), query.get("after")
    if not re.fullmatch(r"[0-9]{1,5}", limit, re.ASCII) or not 1 <= int(limit) <= MAX_LISTED:
        raise InvalidRequest(f"limit must be an integer from 1 to {MAX_LISTED}, not {shown(limit)}", "limit")
    items = items if is_ascending else items[::-1]
    if after is not None:
        names = [item["id"] for item in items]
        if after not in names:
            raise InvalidRequest(f"after: there is no {shown(after)}", "after")
        items = items[names.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(page) < len(items)})
