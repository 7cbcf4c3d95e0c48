"""The routes."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fwk.errors import ConfigError, EngineDead, FwkError, InvalidRequest, NotServed
from fwk.interfaces.dialect import DialectContext
from fwk.interfaces.lifecycle import Stage
from fwk_http.replies import ByteStream
from fwk_server._common import body
from fwk_server._common.batches import PATIENCE
from fwk_server._common.body import shown
from fwk_server._common.caller import Caller, caller_of
from fwk_server._common.chat.dialect import ChatDialect, Running, told
from fwk_server._common.chat.items import read_items
from fwk_server._common.documented import EVENTS
from fwk_server._common.logprobs import TokenTexts
from fwk_server._common.once import Once
from fwk_server._common.paging import PAGE, DeletedReply, page
from fwk_server._common.records import Key, Records
from fwk_server._common.replies import json_response, off_loop
from fwk_server._common.replies import reply as replied
from fwk_server._common.store import ObjectStore, UnknownObject
from fwk_server.openai_responses import ResponsesOptions
from fwk_server.openai_responses.compact import CompactBody, compact_fields, compacted
from fwk_server.openai_responses.conversations import BODIES, Conversations
from fwk_server.openai_responses.job import OPENED, Job
from fwk_server.openai_responses.replies import (
    CompactedReply,
    ErrorReply,
    ItemsReply,
    ResponseReply,
    TokensReply,
    ToolServersReply,
)
from fwk_server.openai_responses.reply import Writer
from fwk_server.openai_responses.request import MAX_ID, ResponsesBody, chat_fields, check_compaction, read
from fwk_server.openai_responses.rounds import approved, events
from fwk_server.openai_responses.server_tools import listed, read_server_tools
from fwk_server.openai_responses.tool_servers import ToolServers

if TYPE_CHECKING:
    from fastapi import FastAPI

_ONE = "/v1/responses/{response_id}"
_BACKGROUND = "background"
"""The records of what is under way."""
_NAMES = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format"}
"""Fields of chat requests, and what they are called here."""
_MAX_DIGITS = 12
_ID = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "maxLength": MAX_ID}}
_FOLLOWING = [
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
]


_IN_PROMPT = ("input", "instructions", "tools", "previous_response_id", "conversation")
"""Fields that say something to the model."""


class ResponsesDialect(ChatDialect):
    """OpenAI's Responses API over the served model."""

    requests = {
        "/v1/responses": ResponsesBody,
        "/v1/responses/input_tokens": ResponsesBody,
        "/v1/responses/compact": CompactBody,
        **BODIES,
    }

    def __init__(self, context: DialectContext) -> None:
        super().__init__(context)
        options = context.options
        options = options if options is not None else ResponsesOptions()
        self._records = Records(options.files_dir, "openai-responses", self.frontend)
        self._store = ObjectStore(options.responses_store_bytes, self._records, "object")
        self._conversations = Conversations(self._store, self._item, self.frontend)
        self._is_strict = options.strict_requests
        self._once = Once()
        self._max_background = options.max_background_responses
        self._servers = ToolServers(options.tool_server, options.tool_server_tokens, options.tool_server_timeout)
        self._background: dict[Key, Job] = {}
        self._resuming: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._tokens = TokenTexts(context.frontend.text)
        if self._servers.by_label:
            if importlib.util.find_spec("mcp") is None:
                raise ConfigError("--tool-server needs the package mcp: pip install 'fwk[mcp]'")
            context.lifecycle.on(Stage.SETUP, self._servers.connect)
            context.lifecycle.background(self._servers.keep_fresh)
        context.lifecycle.on(Stage.CLOSE, self._close)
        self._records.serve(context.lifecycle, self._load)

    def routes(self, app: FastAPI) -> None:
        self.route(app, "/v1/responses", self.create, reply=ResponseReply, error=ErrorReply, stream=EVENTS)
        add = partial(self.route, app, error=ErrorReply)
        add("/v1/responses/input_tokens", self.input_tokens, reply=TokensReply)
        add("/v1/responses/compact", self.compact, reply=CompactedReply)
        add(_ONE, self.retrieve, reply=ResponseReply, method="GET", parameters=[_ID, *_FOLLOWING], stream=EVENTS)
        add(_ONE, self.delete, reply=DeletedReply, method="DELETE", parameters=[_ID])
        add(f"{_ONE}/cancel", self.cancel, reply=ResponseReply, parameters=[_ID])
        add(f"{_ONE}/input_items", self.input_items, reply=ItemsReply, method="GET", parameters=[_ID, *PAGE])
        add("/v1/tool_servers", self.tool_servers, reply=ToolServersReply, method="GET")
        self._conversations.add_routes(app, self)

    async def create(self, request: Request) -> Response:
        """Answer a conversation."""
        data, caller = await body.read(request), caller_of(request)
        asked, job = await off_loop(request, self.frontend, self._job, data, caller)
        if asked.background:
            started = await self._start(job, data)
            return _stream(job.follow(0)) if asked.stream else json_response(started)
        if asked.stream:
            return ByteStream(self._events(job), lambda error: job.writer.fail(told(error)[1]), media_type=EVENTS)
        return await replied(request, self._whole(job))

    def _job(self, data: bytes, caller: Caller) -> tuple[ResponsesBody, Job]:
        """Read, render and check a body. Runs off the event loop."""
        asked, raw = read(body.parse(data), self._once, is_strict=self._is_strict)
        tenant = caller.service.tenant
        is_stored = asked.store is not False and self._store.max_bytes > 0
        if asked.background and not is_stored:
            raise InvalidRequest("background needs store: the response is fetched from there", "background")
        inputs, context = self._context(asked, tenant)
        tools = read_server_tools(asked.tools, self._servers)
        calls = approved(inputs, context, tools)
        running = self.prepared(chat_fields(asked, raw, context, tools), caller)
        check_compaction(asked, len(running.call.item.prompt_token_ids))
        writer = Writer(asked, raw, running, is_stored, self._tokens, tools)
        return asked, Job(
            writer,
            running,
            (tenant, writer.id) if is_stored else None,
            inputs,
            context,
            asked,
            raw,
            caller,
            tools,
            calls,
            [] if asked.background and asked.stream else None,
        )

    def _context(
        self, asked: ResponsesBody | CompactBody, tenant: str
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The items of the input, and those with all that was said before. Raises ``InvalidRequest``."""
        inputs = read_items(asked.input or [], lambda name: self._item((tenant, name)))
        before: list[dict[str, Any]] = []
        conversation = asked.conversation_id if isinstance(asked, ResponsesBody) else None
        if asked.previous_response_id is not None:
            if conversation is not None:
                raise InvalidRequest("previous_response_id and conversation both say what was before", "conversation")
            entry = self._get((tenant, asked.previous_response_id), "previous_response_id")
            before = [*entry["context"], *entry["response"]["output"]]
        elif conversation is not None:
            before = self._conversations.items((tenant, conversation))
        if not inputs and not before:
            raise InvalidRequest("input must not be empty" if asked.input is not None else "input is missing", "input")
        return inputs, [*before, *inputs]

    def _get(self, key: Key, param: str = "response_id") -> dict[str, Any]:
        return self._store.get(key, "response", param)

    def _item(self, key: Key) -> dict[str, Any]:
        """The item that an input refers to."""
        entry = self._store.holding(key)
        if entry is not None:
            items = entry["items"] if "items" in entry else [*entry["input"], *entry["response"]["output"]]
            for item in items:
                if item["id"] == key[1]:
                    return item
        raise UnknownObject("item", key[1], "input")

    async def input_tokens(self, request: Request) -> Response:
        """Count the tokens of a request's prompt."""
        data, caller = await body.read(request), caller_of(request)
        counted = await off_loop(request, self.frontend, self._count, data, caller)
        return json_response({"object": "response.input_tokens", "input_tokens": counted})

    def _count(self, data: bytes, caller: Caller) -> int:
        if not any(body.parse(data).get(name) for name in _IN_PROMPT):
            return 0  # as OpenAI's schema has it, nothing has to be given
        _, job = self._job(data, caller)
        return len(job.running.call.item.prompt_token_ids)

    async def compact(self, request: Request) -> Response:
        """Say a conversation in short."""
        data, caller = await body.read(request), caller_of(request)
        running, context = await off_loop(request, self.frontend, self._compaction, data, caller)
        return await replied(request, compacted(running, context))

    def _compaction(self, data: bytes, caller: Caller) -> tuple[Running, list[dict[str, Any]]]:
        asked = body.validate(CompactBody, body.parse(data))
        _, context = self._context(asked, caller.service.tenant)
        return self.prepared(compact_fields(asked, context), caller), context

    async def tool_servers(self, request: Request) -> Response:
        """List the tool servers that requests may name, with their tools. Where they are is the operator's alone."""
        servers = self._servers.by_label.values()
        data = [{"object": "tool_server", "label": one.label, "tools": listed(one.tools)} for one in servers]
        return json_response({"object": "list", "data": data})

    def _lines(self, job: Job, *, is_whole: bool = False) -> AsyncGenerator[bytes, None]:
        return events(job, self.frontend, self.prepared, is_whole=is_whole)

    def prepared(self, fields: Mapping[str, Any], caller: Caller) -> Running:
        """A call of OpenAI's chat fields; what is wrong with one is told with its name here."""
        try:
            return super().prepared(fields, caller)
        except InvalidRequest as error:
            head = (error.param or "").partition("[")[0].partition(".")[0]
            if head not in _NAMES:
                raise
            name = _NAMES[head]
            message = str(error)
            raise InvalidRequest(
                name + message.removeprefix(head) if message.startswith(head) else message, name
            ) from None

    async def _whole(self, job: Job) -> dict[str, Any]:
        async with aclosing(self._lines(job, is_whole=True)) as lines:
            async for _ in lines:
                pass
        await self._keep(job)
        return job.writer.response

    async def _events(self, job: Job) -> AsyncGenerator[bytes, None]:
        """The events. The first ones wait for the engine: what it refuses is an ordinary HTTP error."""
        async with aclosing(self._lines(job)) as lines:
            async for line in lines:
                if job.writer.has_ended:
                    await self._keep(job)  # before the client hears of it
                yield line

    async def _keep(self, job: Job) -> None:
        output = job.writer.response["output"]
        if job.key is not None:
            self._store.put(job.key, job.entry, [item["id"] for item in (*job.inputs, *output)])
        conversation = job.asked.conversation_id
        if conversation is not None:
            self._conversations.extend((job.caller.service.tenant, conversation), [*job.inputs, *output])
        await self._store.flush()

    async def _start(self, job: Job, data: bytes) -> dict[str, Any]:
        """Have a response made in the background, of this body: the response as it is now."""
        self._records.check_open()
        if len(self._background) >= self._max_background:
            raise NotServed(f"{self._max_background} responses are in the background already: try again later", 429)
        assert job.key is not None
        self._background[job.key] = job
        told_now = dict(job.writer.response)
        head = orjson.dumps({"entry": job.entry, "caller": job.caller.record()})
        self._records.put(_BACKGROUND, job.key, head + b"\n" + data)
        try:
            await self._records.flush()
        except NotServed:
            del self._background[job.key]
            raise
        job.task = asyncio.create_task(self._run(job, job.key))
        return told_now

    def _load(self) -> None:
        """Take over what an earlier server kept, and make what it had in the background."""
        self._store.load()
        for key, record in self._records.all(_BACKGROUND):
            head, _, data = record.partition(b"\n")
            task = asyncio.create_task(self._resume(key, orjson.loads(head), data))
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)

    async def _resume(self, key: Key, head: Mapping[str, Any], data: bytes) -> None:
        entry = head["entry"]
        try:
            _, job = await self.frontend.run_blocking(self._job, data, Caller.of_record(key[0], head["caller"]))
        except (FwkError, HTTPException) as error:  # what it refers to is not there any more, say
            failed = {"code": "server_error", "message": str(getattr(error, "detail", error))}
            entry["response"] |= {"status": "failed", "error": failed}
            self._store.put(key, entry, [item["id"] for item in entry["input"]])
            self._records.delete(_BACKGROUND, key)
            return
        job.writer.response |= {name: entry["response"][name] for name in ("id", "created_at")}
        job.key, job.inputs = key, entry["input"]
        self._background[key] = job
        job.task = asyncio.create_task(self._run(job, key))

    async def _anew(self, job: Job, key: Key) -> Job:
        """The same response, of which nothing is made yet, in the place of one whose engine has died."""
        _, fresh = await self.frontend.run_blocking(self._job, orjson.dumps(job.raw), job.caller)
        fresh.writer.response |= {name: job.writer.response[name] for name in ("id", "created_at")}
        fresh.key, fresh.inputs, fresh.task = key, job.inputs, job.task
        if key in self._background:  # it was not deleted meanwhile
            self._background[key] = fresh
        return fresh

    async def _run(self, job: Job, key: Key) -> None:
        try:
            has_died = False
            for seconds in (*PATIENCE, None):
                try:
                    job = await self._anew(job, key) if has_died else job
                    async with aclosing(self._lines(job)) as lines:
                        async for line in lines:
                            job.tell(line)
                    break
                except EngineDead as error:  # no client has read any of it, unless its events are kept
                    if seconds is None or job.events is not None:
                        job.tell(job.writer.fail(told(error)[1]))
                        break
                    has_died = True
                    await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            job.writer.cancel()
            raise
        except Exception as error:
            job.tell(job.writer.fail(told(error)[1]))
        finally:
            job.end()
            if not self._is_closing and self._background.pop(key, None) is not None:  # not deleted meanwhile
                await self._keep(job)
                self._records.delete(_BACKGROUND, key)

    async def retrieve(self, request: Request) -> Response:
        """Tell of a stored response, or of one in the background; with ``stream=true`` its events again."""
        key = _key(request)
        if request.query_params.get("stream") != "true":
            return json_response(self._entry(key)["response"])
        start = _start_of(request.query_params.get("starting_after"))
        job = self._background.get(key)
        stored: list[str] | None = None if job is not None else self._get(key).get("events")
        if stored is None and (job is None or job.events is None):
            raise InvalidRequest(
                "stream: the events of this response are not kept: only those of responses that were made with both "
                "background and stream are",
                "stream",
            )
        return _stream(job.follow(start) if job is not None else _again((stored or [])[start:]))

    async def delete(self, request: Request) -> Response:
        """Forget a response; one in the background ends."""
        key = _key(request)
        job = self._background.pop(key, None)
        if job is not None:
            self._records.delete(_BACKGROUND, key)
            await job.stop()
        else:
            self._get(key)
            self._store.delete(key)
        await self._store.flush()
        return json_response({"id": key[1], "object": "response", "deleted": True})

    async def cancel(self, request: Request) -> Response:
        """End a response in the background; one that has ended is told as it is."""
        key = _key(request)
        response = self._entry(key)["response"]
        if not response["background"]:
            raise InvalidRequest("only responses in the background can be cancelled", "response_id")
        job = self._background.get(key)
        if job is not None:
            await job.stop()
            if job.key in self._background:  # it had not begun
                job.writer.cancel()
                await self._keep(self._background.pop(key))
                self._records.delete(_BACKGROUND, key)
            response = job.writer.response
        return json_response(response)

    async def input_items(self, request: Request) -> Response:
        """List the items of a request, its last first."""
        items: list[dict[str, Any]] = self._entry(_key(request))["input"]
        return json_response(page(request, items, "desc"))

    def _entry(self, key: Key) -> dict[str, Any]:
        job = self._background.get(key)
        return job.entry if job is not None else self._get(key)

    async def _close(self) -> None:
        self._is_closing = self._records.is_lasting  # what is under way goes on with the next server
        for task in list(self._resuming):
            task.cancel()
        for job in list(self._background.values()):
            if job.task is not None:
                await job.stop()
        self._records.close()


def _stream(events: AsyncGenerator[bytes, None]) -> ByteStream:
    """Events that are sent whether or not somebody reads them: what fails is an event among them."""
    return ByteStream(events, lambda _: b"", media_type=EVENTS)


async def _again(events: list[str]) -> AsyncGenerator[bytes, None]:
    yield OPENED + "".join(events).encode()


def _start_of(after: str | None) -> int:
    """The number of the first event to tell."""
    if after is None:
        return 0
    if not (after.isascii() and after.isdecimal() and len(after) <= _MAX_DIGITS):
        raise InvalidRequest(f"starting_after must be the number of an event, not {shown(after)}", "starting_after")
    return int(after) + 1


def _key(request: Request) -> Key:
    """Where a response would be: responses of one key are not there for another."""
    return caller_of(request).service.tenant, request.path_params["response_id"]
