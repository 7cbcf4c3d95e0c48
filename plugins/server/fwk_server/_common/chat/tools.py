"""The tools of a chat request: which may be called, which must, and how a template without tools shows them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk.interfaces.parser import ParserContext, ToolParser
from fwk.types import GrammarRequest
from fwk_server._common.body import shown, want
from fwk_server._common.chat.constraints import NO_GRAMMAR, Constraint, read_constraint
from fwk_server._common.chat.messages import has_calls
from fwk_server._common.chat.models import MAX_TOOLS
from fwk_server._common.chat.schemas import check_schema
from fwk_server._common.chat.system_messages import placed
from fwk_server._common.chat.whole_arguments import WholeArgumentsParser

CHOICES = ("none", "auto", "required")

NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_ANSWER = "Answer with it in plain text."
_NO_TOOL_PARSER = (
    "this server reads no tool calls (--tool-call-parser none): leave tools out, or set tool_choice to 'none' or "
    "'required'"
)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools that may be called."""

    tools: list[dict[str, Any]]  # as the client sent them; templates read this shape
    constraint: Constraint | None  # when a call must be made
    is_parallel: bool
    is_forced: bool = False  # the output is calls by grammar, so a parser that has one reads it
    is_legacy: bool = False  # asked for as ``functions``, and answered so
    free: GrammarRequest | None = None  # text and calls, of which those of strict tools keep to their schemas
    forced: list[dict[str, Any]] | None = None  # the functions that may be called, where these are not all
    is_whole: bool = False  # the output is the arguments of one call, and no more

    @property
    def functions(self) -> list[dict[str, Any]]:
        """What the parser of the output knows."""
        return [tool["function"] for tool in self.tools] if self.forced is None else self.forced

    def parser(self, frontend: Frontend, tail: str = "") -> ToolParser | None:
        """A new parser of the output, behind a prompt that ends with ``tail``."""
        if self.is_whole:
            return WholeArgumentsParser(ParserContext(self.functions, tail))
        return frontend.tool_parser(self.functions, tail, self.is_forced)


def tools_and_constraint(raw: Mapping[str, Any], frontend: Frontend) -> tuple[ToolUse | None, Constraint | None]:
    """What may be called, and what the output must look like: as the request says, or a call if one must be made."""
    tools = read_tools(raw, frontend)
    constraint = read_constraint(raw, frontend.grammar_kinds)
    if constraint is not None and tools is not None:
        tools = with_answer(tools, constraint, frontend)
    return tools, tools.constraint if tools is not None else constraint


def read_tools(raw: Mapping[str, Any], frontend: Frontend) -> ToolUse | None:
    """The tools that may be called, if any."""
    raw, is_legacy = _modern(raw)
    try:
        return _read(raw, is_legacy, frontend)
    except InvalidRequest as error:
        if not is_legacy or error.param is None:
            raise
        old = error.param.replace("tool_choice", "function_call").replace("tools", "functions")
        raise InvalidRequest(str(error), old) from None


def _read(raw: Mapping[str, Any], is_legacy: bool, frontend: Frontend) -> ToolUse | None:
    listed = raw.get("tools")
    listed = [] if listed is None else want(listed, list, "an array", "tools")
    tools, names = _tools(listed)
    choice, wanted = _choice(raw.get("tool_choice"), names)
    if choice == "none":
        return None
    if not tools:
        if choice == "auto":
            return None
        raise InvalidRequest("tool_choice asks for a call, but there are no tools", "tool_choice")
    for name in wanted:
        if name not in names:
            raise InvalidRequest(f"tool_choice names {shown(name)}, which is not among the tools", "tool_choice")
    tools = [tool for tool in tools if tool["function"]["name"] in wanted] if choice == "allowed" else tools
    is_parallel = raw.get("parallel_tool_calls") is not False and not is_legacy
    if choice in ("auto", "allowed"):
        parser = frontend.tool_parser([tool["function"] for tool in tools])
        if parser is None:
            raise InvalidRequest(_NO_TOOL_PARSER, "tools")
        return ToolUse(tools, None, is_parallel, is_legacy=is_legacy, free=_strict(tools, parser, frontend))
    functions = [tool["function"] for tool in tools if tool["function"]["name"] in wanted]
    use = ToolUse(tools, None, is_parallel, is_forced=True, is_legacy=is_legacy, forced=functions)
    is_many = raw.get("parallel_tool_calls") is True and choice == "required" and not is_legacy
    whole = _whole(functions, frontend) if not is_many else None
    if whole is not None:
        return replace(use, constraint=(whole, "tools"), is_whole=True)
    return replace(use, constraint=_forced(functions, is_many, frontend))


def _whole(functions: list[dict[str, Any]], frontend: Frontend) -> GrammarRequest | None:
    """The arguments of the one function, where the chat template shows no tools; None where a call says which it is."""
    if len(functions) != 1 or frontend.text.shows_tools:
        return None
    grammar = WholeArgumentsParser(ParserContext(functions)).grammar(False)
    return grammar if grammar.kind in frontend.grammar_kinds else None


def _tools(listed: list[Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The tools, checked, and their names."""
    tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(listed)]
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest(f"there are {len(tools)} tools; at most {MAX_TOOLS} are allowed", "tools")
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("two tools have the same name", "tools")
    return tools, names


def _strict(tools: list[dict[str, Any]], parser: ToolParser, frontend: Frontend) -> GrammarRequest | None:
    """The grammar of an answer whose calls of strict tools are valid; None where none is, or none can say so."""
    strict = {tool["function"]["name"] for tool in tools if tool["function"].get("strict") is True}
    grammar = parser.free_grammar(strict) if strict else None
    return grammar if grammar is not None and grammar.kind in frontend.grammar_kinds else None


def _choice(choice: Any, names: list[str]) -> tuple[str, list[str]]:
    """``none``, ``auto``, ``required``, ``named`` or ``allowed`` (auto among some), and the functions it is about."""
    if choice is None or choice in CHOICES:
        return choice or "auto", names
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed = want(choice.get("allowed_tools"), dict, "an object", "tool_choice.allowed_tools")
        listed = want(allowed.get("tools"), list, "an array", "tool_choice.allowed_tools.tools")
        wanted = [_named(tool, "tool_choice.allowed_tools.tools") for tool in listed]
        return ("required" if allowed.get("mode") == "required" else "allowed"), wanted
    if not isinstance(choice, dict):
        raise InvalidRequest(
            f"tool_choice must be one of {', '.join(CHOICES)}, or name a function, not {shown(choice)}", "tool_choice"
        )
    return "named", [_named(choice, "tool_choice")]


def with_answer(use: ToolUse, constraint: Constraint, frontend: Frontend) -> ToolUse:
    """Calls, or else an answer that keeps to ``constraint``: both in one grammar. Raises ``InvalidRequest``."""
    grammar, name = constraint
    if use.is_forced:
        raise InvalidRequest(f"{name} leaves no room for the call that tool_choice asks for: leave one out", name)
    if grammar.kind not in ("json_schema", "json_object"):
        raise InvalidRequest(f"{name} leaves no room for a tool call: leave tools out", name)
    calls, _ = _forced(use.functions, False, frontend)
    source = json.loads(calls.source)
    schema = _parsed(grammar.source, name) if grammar.kind == "json_schema" else {"type": "object"}
    if calls.kind == "calls":
        source["answer"] = schema
    else:
        source["tags"].append({"begin": "", "schema": schema, "end": ""})
    return replace(use, constraint=(GrammarRequest(calls.kind, json.dumps(source)), name), is_forced=True)


def _parsed(source: str, name: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        raise InvalidRequest(f"{name} is not a JSON schema", name) from None


def _forced(functions: list[dict[str, Any]], is_many: bool, frontend: Frontend) -> Constraint:
    """The grammar that lets nothing but calls of these functions through."""
    parser = frontend.tool_parser(functions, is_forced=True)
    grammar = parser.grammar(is_many) if parser is not None else None
    if grammar is None or grammar.kind not in frontend.grammar_kinds:
        raise InvalidRequest(f"tool_choice: {NO_GRAMMAR}: only 'auto' and 'none' can be kept", "tool_choice")
    return grammar, "tools"


def _named(choice: Any, at: str) -> str:
    """The function an object names."""
    function = want(want(choice, dict, "an object", at).get("function"), dict, "an object", f"{at}.function")
    if choice.get("type") != "function":
        raise InvalidRequest(f"{at}.type must be 'function'", f"{at}.type")
    return want(function.get("name"), str, "a string", f"{at}.function.name")


def _tool(tool: Any, at: str) -> dict[str, Any]:
    want(tool, dict, "an object", at)
    if tool.get("type", "function") != "function":
        raise InvalidRequest(f"{at}.type must be 'function', not {shown(tool['type'])}", f"{at}.type")
    tool = _nested(tool)
    function = want(tool.get("function"), dict, "an object", f"{at}.function")
    where = f"{at}.function.name"
    name = want(function.get("name"), str, "a string", where)
    if not NAME.fullmatch(name):
        raise InvalidRequest(f"{where} must have 1 to 64 letters, digits or _ . -, not {shown(name)}", where)
    if function.get("parameters") is not None:
        want(function["parameters"], dict, "a JSON schema", f"{at}.function.parameters")
        check_schema(function["parameters"], f"{at}.function.parameters")
    return tool


def _nested(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as Responses or Anthropic's Messages write it, which editors send to chat completions, as chat's own."""
    if "function" in tool or "name" not in tool:
        return tool
    names = {"name": "name", "description": "description", "parameters": "parameters", "strict": "strict"}
    names |= {"input_schema": "parameters"}
    function = {new: tool[old] for old, new in names.items() if tool.get(old) is not None}
    return {"type": "function", "function": function}


def _modern(raw: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """OpenAI's first names of tools, ``functions`` and ``function_call``, as today's; and whether they were used."""
    functions, choice = raw.get("functions"), raw.get("function_call")
    if not functions and choice in (None, "none", "auto"):
        return raw, False
    if raw.get("tools"):
        raise InvalidRequest("functions is OpenAI's old name of tools: give one of them", "functions")
    want(functions or [], list, "an array", "functions")
    tools = [{"type": "function", "function": function} for function in functions or []]
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    return {**raw, "tools": tools, "tool_choice": choice}, True


def with_tools(
    messages: list[dict[str, Any]], use: ToolUse | None, frontend: Frontend
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """What the chat template is given: messages and tools, or all in the messages where it shows the model no tools.

    System messages are where it takes them.
    """
    if not frontend.text.shows_tools and (use is not None or has_calls(messages)):
        return placed(tools_in_text(messages, use, frontend), frontend.text), None
    return placed(messages, frontend.text), use.tools if use is not None else None


def tools_in_text(messages: Sequence[dict[str, Any]], use: ToolUse | None, frontend: Frontend) -> list[dict[str, Any]]:
    """The messages for chat templates that show the model neither tools nor calls.

    Instructions are in the system message, calls and results written out. Results at the end, where no call is forced,
    stand in the user's message without the calls that they answer, which small models would repeat.
    """
    parser = use.parser(frontend) if use is not None else frontend.tool_parser([], is_forced=True)
    if parser is None or (use is not None and not parser.instructions()):
        raise InvalidRequest(
            "the model's chat template shows it no tools, and the server's tool parser has no instructions for it: "
            "start the server with --tool-call-parser auto or with a --chat-template that has tools",
            "tools",
        )
    start = len(messages)
    if use is None or not use.is_forced:
        while start and (messages[start - 1]["role"] == "tool" or messages[start - 1].get("tool_calls")):
            start -= 1
    if start < len(messages) and messages[-1]["role"] == "tool":
        plain = _with_results(_written(messages[:start], parser), messages[start:])
    else:
        plain = _written(messages, parser)
    if use is None:
        return plain
    if plain[0]["role"] == "system":
        first = {**plain[0], "content": f"{plain[0]['content']}\n\n{parser.instructions()}"}
        return [first, *plain[1:]]
    return [{"role": "system", "content": parser.instructions()}, *plain]


def _with_results(plain: list[dict[str, Any]], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages, and the results of the calls behind them as something to answer with."""
    calls: dict[Any, str] = {}
    results: list[str] = []
    for message in messages:
        if message["role"] == "tool":
            name = calls.get(message.get("tool_call_id")) or message.get("name") or "the function"
            results.append(f"Result of {name}: {message['content']}")
            continue
        for call in message["tool_calls"]:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            given = ", ".join(f"{key}: {value}" for key, value in arguments.items())
            calls[call["id"]] = f"{name} ({given})" if given else name
        if message["content"]:
            plain.append({"role": message["role"], "content": message["content"]})
    text = "\n".join([*results, _ANSWER])
    if plain and plain[-1]["role"] == "user" and isinstance(plain[-1]["content"], str):
        return [*plain[:-1], {**plain[-1], "content": f"{plain[-1]['content']}\n\n{text}"}]
    return [*plain, {"role": "user", "content": text}]


def _written(messages: Sequence[Mapping[str, Any]], parser: ToolParser) -> list[dict[str, Any]]:
    """Calls as the model would have written them, results as what the user says."""
    names: dict[Any, str] = {}
    plain: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            name = message.get("name") or names.get(message.get("tool_call_id"), "the function")
            plain.append({"role": "user", "content": f"Result of {name}: {message['content']}"})
            continue
        calls = message.get("tool_calls")
        if not calls:
            plain.append(dict(message))
            continue
        names |= {call["id"]: call["function"]["name"] for call in calls}
        written = [parser.write_call(call["function"]["name"], call["function"]["arguments"]) for call in calls]
        content = "\n".join([*([message["content"]] if message["content"] else []), *written])
        plain.append({"role": message["role"], "content": content})
    return plain
