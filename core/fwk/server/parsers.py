"""The parsers of a server: chosen once, one object per sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fwk.config import Config
from fwk.interfaces.declaration import Facts
from fwk.interfaces.parser import ParserContext, ReasoningParserSpec, ToolParserSpec
from fwk.plugins import Candidate, PluginFactory, PluginSet, Registered, Selection, choose, load_object
from fwk.plugins.answers import named
from fwk.plugins.selection import AUTO, own_name, ranked


class ParserChoice:
    """The parser of one family that a server uses, or none."""

    def __init__(self, family: str, requested: str, factory: PluginFactory, template: str) -> None:
        self.selection = select_parser(family, requested, factory.plugins, template)
        item = self.selection.chosen
        self.name = item.name if item is not None else "none"
        self._class: Callable[[ParserContext], Any] | None = load_object(item) if item is not None else None
        self.is_none = item is None
        self._options = factory.options(item) if item is not None else None

    def make(self, tools: Any, prompt_tail: str) -> Any:
        """A parser for one sequence; None when there is none."""
        if self._class is None or self.selection.chosen is None:
            return None
        made = self._class(ParserContext(tools, prompt_tail, self._options))
        return named(self.selection.chosen, made, is_often=True)


class Parsers:
    """Both of them."""

    def __init__(self, config: Config, plugins: PluginSet, template: str) -> None:
        options, factory = config.server, PluginFactory(plugins, config.plugin_options)
        self.tool = ParserChoice("tool_parsers", options.tool_call_parser, factory, template)
        self.reasoning = ParserChoice("reasoning_parsers", options.reasoning_parser, factory, template)
        self.fallback = ParserChoice("tool_parsers", _fallback(plugins), factory, template)

    def use(self, family: str, choice: ParserChoice) -> None:
        """Parse the requests to come with another parser of a family."""
        if family == "tool_parsers":
            self.tool = choice
        else:
            self.reasoning = choice


def select_parser(family: str, requested: str, plugins: PluginSet, template: str) -> Selection:
    """The parser asked for; for ``auto`` the best of those that read what the chat template asks for, or none."""
    if requested == "none":
        return Selection(family, requested, None, [])
    if requested != AUTO:
        return choose(plugins, family, own_name(plugins, family, requested), Facts())
    candidates = [_judged(item, template) for item in ranked(plugins, family)]
    chosen = next((candidate.item for candidate in candidates if candidate.refusal is None), None)
    if chosen is None:
        chosen = next((candidate.item for candidate in candidates if _is_fallback(candidate.item)), None)
        candidates = [candidate for candidate in candidates if candidate.item is not chosen]
    return Selection(family, requested, chosen, candidates)


def _is_fallback(item: Registered) -> bool:
    return isinstance(item.declaration, ToolParserSpec) and item.declaration.is_fallback


def _fallback(plugins: PluginSet) -> str:
    """The parser that forces calls where the model's own cannot."""
    return next((item.name for item in ranked(plugins, "tool_parsers") if _is_fallback(item)), "none")


def tool_note(parsers: Parsers, shows_tools: bool) -> str | None:
    """How tools reach the model and calls come back, where the chat template does not say; None where it does."""
    name = parsers.tool.name
    if name == "none":
        return None
    if not shows_tools:
        return f"the chat template shows the model no tools: a system message describes them in format {name!r}"
    item = parsers.tool.selection.chosen
    if item is not None and _is_fallback(item) and parsers.tool.selection.requested == AUTO:
        return f"no installed tool parser knows the chat template's format of calls: {name!r} reads plain JSON calls"
    return None


def _judged(item: Registered, template: str) -> Candidate:
    """Whether the chat template speaks a parser's format."""
    assert isinstance(item.declaration, ToolParserSpec | ReasoningParserSpec)
    marks = item.declaration.template_marks
    if not marks:
        return Candidate(item, "is never taken by auto, for it has no template_marks", is_meant=False)
    if not all(mark in template for mark in marks):
        return Candidate(item, f"reads {' '.join(marks)}, which the chat template does not have", is_meant=False)
    return Candidate(item, item.declaration.refusal(Facts()))
