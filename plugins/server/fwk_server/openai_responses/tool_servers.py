"""Tool servers: programs that list tools and run them, spoken to by the Model Context Protocol (MCP).

Which there are is the operator's to say (``--tool-server``); requests choose among them by their labels.
Specification: https://modelcontextprotocol.io/specification. The protocol itself is the ``mcp`` package's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import orjson

from fwk.errors import ConfigError, InvalidRequest
from fwk_server._common.chat.items import object_of, plain_text
from fwk_server._common.chat.models import MAX_TOOLS
from fwk_server._common.chat.schemas import check_schema
from fwk_server._common.chat.tools import NAME
from fwk_server.openai_responses.tool_server_url import label_and_url

logger = logging.getLogger(__name__)

MAX_OUTPUT = 2**20
"""Characters of a call's result."""
REFRESH_SECONDS = 60.0
"""Between two times that a server is asked for its tools."""
_TIMED_OUT = -32001
_INVALID = -32602
_INTERNAL = -32603
_UNREACHABLE = 503


class ProtocolError(Exception):
    """What a server answers when it cannot do what was asked."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(message)


@asynccontextmanager
async def connected(url: str, token: str | None) -> AsyncGenerator[Any, None]:
    """A client of the server at ``url``."""
    from fwk_server.openai_responses.mcp_client import MCPError, client_of  # noqa: PLC0415 - an extra's package

    try:
        async with client_of(url, token) as client:
            yield client
    except BaseException as error:
        cause = cause_of(error)
        if isinstance(cause, MCPError):
            raise ProtocolError(cause.error.code, cause.error.message) from error
        raise


@dataclass(frozen=True, slots=True)
class ServerTool:
    """One tool, as its server describes it."""

    name: str
    description: str
    input_schema: dict[str, Any]
    annotations: dict[str, Any] | None

    @property
    def only_reads(self) -> bool:
        return bool(self.annotations and self.annotations.get("readOnlyHint"))


@dataclass(frozen=True, slots=True)
class ToolResult:
    """A call's text, or its error, in the words of OpenAI's ``mcp_call`` items."""

    output: str | None = None
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class ToolServer:
    """One server. Each call has a connection of its own: one that was restarted is met again."""

    label: str
    url: str
    token: str | None
    timeout: float
    tools: list[ServerTool] = field(default_factory=list[ServerTool])

    async def list(self) -> None:
        """Ask for the tools. Raises whatever goes wrong."""
        found: list[ServerTool] = []
        async with asyncio.timeout(self.timeout), connected(self.url, self.token) as client:
            page = await client.list_tools()
            while True:
                found += [tool for tool in map(self._tool, page.tools) if tool is not None]
                if page.next_cursor is None or len(found) > MAX_TOOLS:
                    break
                page = await client.list_tools(cursor=page.next_cursor)
        self.tools = found

    async def refresh(self) -> None:
        """Ask for the tools again; those known stay when the server does not answer."""
        try:
            await self.list()
        except Exception as error:
            logger.warning("tool server %s: its tools could not be listed again: %s", self.label, _reason(error))

    async def call(self, name: str, arguments: str) -> ToolResult:
        """Run a tool with ``arguments``, an object's JSON. Errors are part of the result."""
        given = object_of(arguments)
        if given is None:
            return _protocol_error(_INVALID, "the arguments are not a JSON object")
        try:
            async with asyncio.timeout(self.timeout), connected(self.url, self.token) as client:
                result = await client.call_tool(name, given)
        except TimeoutError:
            return _protocol_error(_TIMED_OUT, f"the tool did not answer within {self.timeout:g} seconds")
        except Exception as error:
            cause = cause_of(error)
            if isinstance(cause, ProtocolError):
                return _protocol_error(cause.code, str(cause))
            code = getattr(getattr(cause, "response", None), "status_code", _UNREACHABLE)
            logger.warning("tool server %s: %s could not be called: %s", self.label, name, _reason(error))
            return ToolResult(
                error={"type": "http_error", "code": code, "message": "the tool server cannot be reached"}
            )
        blocks = [block.model_dump(mode="json", by_alias=True, exclude_none=True) for block in result.content]
        output = plain_text(blocks)
        if not blocks and result.structured_content is not None:
            output = orjson.dumps(result.structured_content).decode()
        if len(output) > MAX_OUTPUT:
            return _protocol_error(_INTERNAL, f"the tool's output has {len(output)} characters, more than {MAX_OUTPUT}")
        if result.is_error:
            return ToolResult(error={"type": "mcp_tool_execution_error", "content": blocks})
        return ToolResult(output)

    def _tool(self, tool: Any) -> ServerTool | None:
        """A tool, unless the model's side cannot take it: that is logged."""
        try:
            if not NAME.fullmatch(tool.name):
                raise InvalidRequest("its name must have 1 to 64 letters, digits or _ . -")
            check_schema(tool.input_schema, "inputSchema")
        except InvalidRequest as error:
            logger.warning("tool server %s: the tool %.64r is left out: %s", self.label, tool.name, error)
            return None
        notes = tool.annotations
        annotations = notes.model_dump(mode="json", by_alias=True, exclude_none=True) if notes is not None else None
        return ServerTool(tool.name, tool.description or "", tool.input_schema, annotations)


class ToolServers:
    """The operator's servers, by label."""

    def __init__(self, given: Sequence[str] = (), tokens: str | None = None, timeout: float = 60.0) -> None:
        known = dict(pair.split("=", 1) for pair in tokens.split(",")) if tokens else {}
        self.by_label: dict[str, ToolServer] = {}
        for text in given:
            label, url = label_and_url(text)
            self.by_label[label] = ToolServer(label, url, known.pop(label, None), timeout)
        if known:
            raise ConfigError(f"--tool-server-tokens names {next(iter(known))!r}, which is no --tool-server")

    async def connect(self) -> None:
        """Ask every server for its tools. Raises ``ConfigError`` for one that does not answer."""
        for server in self.by_label.values():
            try:
                await server.list()
            except Exception as error:
                raise ConfigError(
                    f"--tool-server: {server.label} does not list its tools: {_reason(error)}. Start it before this "
                    "server, or leave it out"
                ) from error
            names = ", ".join(tool.name for tool in server.tools) or "none"
            logger.info("tool server %s: tools: %s", server.label, names)

    async def keep_fresh(self) -> None:
        """Ask for the tools again and again, for as long as the server runs."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            await asyncio.gather(*(server.refresh() for server in self.by_label.values()))


def _protocol_error(code: int, message: str) -> ToolResult:
    return ToolResult(error={"type": "mcp_protocol_error", "code": code, "message": message})


def cause_of(error: BaseException) -> BaseException:
    """What was raised first, out of the groups of tasks that failed by it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _reason(error: BaseException) -> str:
    cause = cause_of(error)
    return "it does not answer in time" if isinstance(cause, TimeoutError) else str(cause) or type(cause).__name__
