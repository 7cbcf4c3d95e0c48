"""The parsers of a server: chosen once, one object per sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fwk.config import Config
from fwk.interfaces.declaration import Facts
from fwk.interfaces.parser import ParserContext, ReasoningParserSpec, ToolParserSpec
from fwk.plugins import PluginSet, Registered, choose, load_object
from fwk.plugins.selection import plugin_options


class ParserChoice:
    """The parser of one family that a server uses, or none."""

    def __init__(self, family: str, requested: str, config: Config, plugins: PluginSet, template: str) -> None:
        item = _choose(family, requested, plugins, template)
        self.name = item.name if item is not None else "none"
        self._class: Callable[[ParserContext], Any] | None = load_object(item) if item is not None else None
        self._options = plugin_options(item, config.plugin_options) if item is not None else None

    def make(self, tools: Any, prompt_tail: str) -> Any:
        """A parser for one sequence; None when there is none."""
        return self._class(ParserContext(tools, prompt_tail, self._options)) if self._class is not None else None


class Parsers:
    """Both of them."""

    def __init__(self, config: Config, plugins: PluginSet, template: str) -> None:
        options = config.server
        self.tool = ParserChoice("tool_parsers", options.tool_call_parser, config, plugins, template)
        self.reasoning = ParserChoice("reasoning_parsers", options.reasoning_parser, config, plugins, template)

    def use(self, family: str, choice: ParserChoice) -> None:
        """Parse the requests to come with another parser of a family."""
        if family == "tool_parsers":
            self.tool = choice
        else:
            self.reasoning = choice


def _choose(family: str, requested: str, plugins: PluginSet, template: str) -> Registered | None:
    if requested == "none":
        return None
    if requested != "auto":
        return choose(plugins, family, requested, Facts()).chosen
    fitting = [item for item in plugins.family(family) if _fits(item, template)]
    return max(fitting, key=lambda item: (item.declaration.rank, item.name), default=None)


def _fits(item: Registered, template: str) -> bool:
    """Whether the chat template speaks a parser's format."""
    assert isinstance(item.declaration, ToolParserSpec | ReasoningParserSpec)
    marks = item.declaration.template_marks
    return bool(marks) and all(mark in template for mark in marks) and item.declaration.refusal(Facts()) is None
