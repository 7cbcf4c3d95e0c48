"""The tools of tool servers that one request may call: ``{"type": "mcp", "server_label": ...}`` among its tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown, want
from fwk_server.openai_responses.tool_servers import ServerTool, ToolServer, ToolServers

_READ = ("type", "server_label", "server_url", "server_description", "allowed_tools", "require_approval")
_CANNOT = {
    "authorization": "what a server asks of its clients is the operator's to give (--tool-server-tokens)",
    "headers": "what a server asks of its clients is the operator's to give (--tool-server-tokens)",
    "connector_id": "there are no connectors here",
    "tunnel_id": "there are no tunnels here",
    "defer_loading": "all tools are shown to the model at once",
    "allowed_callers": "tools are called by the model alone",
}


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that the model may call, and whether the client wants to be asked first."""

    server: ToolServer
    tool: ServerTool
    needs_approval: bool


@dataclass(slots=True)
class ServerTools:
    """By name, and by the label of their server; nothing for requests that ask for none."""

    by_name: dict[str, CallableTool] = field(default_factory=dict[str, CallableTool])
    by_label: dict[str, list[ServerTool]] = field(default_factory=dict[str, list[ServerTool]])

    def functions(self, label: str) -> list[dict[str, Any]]:
        """A server's tools, as OpenAI's chat fields have them."""
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema},
            }
            for tool in self.by_label[label]
        ]

    def chosen(self, choice: Mapping[str, Any], at: str) -> list[str]:
        """The tools that a ``tool_choice`` of type ``mcp`` names."""
        label = want(choice.get("server_label"), str, "a string", f"{at}.server_label")
        if label not in self.by_label:
            raise InvalidRequest(f"{at}.server_label names {shown(label)}, which is not among the tools", "tool_choice")
        names = [tool.name for tool in self.by_label[label]]
        name = choice.get("name")
        if name is None:
            return names
        if name not in names:
            raise InvalidRequest(f"{at}.name: {label} has no tool {shown(name)} for this request", "tool_choice")
        return [name]


def listed(tools: Sequence[ServerTool]) -> list[dict[str, Any]]:
    """Tools as OpenAI's items of type ``mcp_list_tools`` have them."""
    return [
        {
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.input_schema,
            "annotations": tool.annotations,
        }
        for tool in tools
    ]


def read_server_tools(tools: Sequence[Any] | None, servers: ToolServers) -> ServerTools:
    """What the entries of type ``mcp`` ask for. Raises ``InvalidRequest``."""
    found = ServerTools()
    for i, entry in enumerate(tools or ()):
        if not isinstance(entry, dict) or entry.get("type") != "mcp":
            continue
        at = f"tools[{i}]"
        server = _server(entry, at, servers)
        if server.label in found.by_label:
            raise InvalidRequest(f"{at}: {server.label} is among the tools twice", "tools")
        tools_of = _allowed(entry.get("allowed_tools"), server, f"{at}.allowed_tools")
        asking = _asking(entry.get("require_approval"), tools_of, server, f"{at}.require_approval")
        found.by_label[server.label] = tools_of
        for tool in tools_of:
            if tool.name in found.by_name:
                other = found.by_name[tool.name].server.label
                raise InvalidRequest(
                    f"{at}: {other} and {server.label} both have a tool {tool.name}: choose one by allowed_tools",
                    "tools",
                )
            found.by_name[tool.name] = CallableTool(server, tool, tool.name in asking)
    return found


def _server(entry: Mapping[str, Any], at: str, servers: ToolServers) -> ToolServer:
    for name, value in entry.items():
        if name in _CANNOT and value:
            raise InvalidRequest(f"{at}.{name} is not supported: {_CANNOT[name]}", "tools")
        if name not in _READ and name not in _CANNOT and value is not None:
            raise InvalidRequest(f"{at}.{name[:64]} is not supported, only {', '.join(_READ)}", "tools")
    label = want(entry.get("server_label"), str, "a string", f"{at}.server_label")
    server = servers.by_label.get(label)
    if server is None:
        known = ", ".join(servers.by_label)
        raise InvalidRequest(
            f"{at}.server_label: there is no tool server {shown(label)} here, "
            + (f"only {known}" if known else "nor any other: the operator names them by --tool-server"),
            "tools",
        )
    url = entry.get("server_url")
    if url is not None and url != server.url:
        raise InvalidRequest(
            f"{at}.server_url: only the operator's tool servers are called here, not URLs of requests: leave it out",
            "tools",
        )
    return server


def _allowed(value: Any, server: ToolServer, at: str) -> list[ServerTool]:
    if value is None:
        return list(server.tools)
    return _filtered({"tool_names": value} if isinstance(value, list) else value, server, at)


def _filtered(value: Any, server: ToolServer, at: str) -> list[ServerTool]:
    """The server's tools that a filter lets through."""
    want(value, dict, "an array of names, or an object", at)
    for name in value:
        if name not in ("tool_names", "read_only"):
            raise InvalidRequest(f"{at}.{str(name)[:64]} is not supported, only tool_names, read_only", "tools")
    names, reads = value.get("tool_names"), value.get("read_only")
    known = [tool.name for tool in server.tools]
    for name in want(names if names is not None else [], list, "an array of names", f"{at}.tool_names"):
        if name not in known:
            raise InvalidRequest(f"{at}: {server.label} has no tool {shown(name)}", "tools")
    if reads is not None:
        want(reads, bool, "a boolean", f"{at}.read_only")
    return [
        tool
        for tool in server.tools
        if (names is None or tool.name in names) and (reads is None or tool.only_reads == reads)
    ]


def _asking(value: Any, tools: Sequence[ServerTool], server: ToolServer, at: str) -> set[str]:
    """The names of the tools whose calls the client wants to approve: all, unless it says otherwise."""
    names = {tool.name for tool in tools}
    if value in (None, "always"):
        return names
    if value == "never":
        return set()
    if not isinstance(value, dict) or not value or set(value) - {"always", "never"}:
        raise InvalidRequest(f"{at} must be always, never, or an object of filters by these names", "tools")
    if value.get("never") is not None:
        never = {tool.name for tool in _filtered(value["never"], server, f"{at}.never")}
    else:
        never = names
    always = value.get("always")
    asked = {tool.name for tool in _filtered(always, server, f"{at}.always")} if always is not None else set[str]()
    return (names - never) | (names & asked)
