"""Parsers that turn a model's text into tool calls, or split thinking from the answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fwk.interfaces.declaration import Declaration


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call: ``name`` comes once, before the first piece of ``arguments``."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list["ToolCallDelta"])


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser is built with: one parser object per sequence."""

    tools: Sequence[Mapping[str, Any]] = ()
    options: Any = None


class StreamParser(ABC):
    """Fed with text as it comes. Feeding everything at once gives the same as feeding it by character."""

    def __init__(self, context: ParserContext) -> None:
        self.context = context

    @abstractmethod
    def feed(self, text: str) -> Parsed:
        """Parse more text; what is undecided is held back."""

    @abstractmethod
    def finish(self) -> Parsed:
        """The text has ended: give out what was held back."""


@dataclass(frozen=True, kw_only=True)
class ToolParserSpec(Declaration):
    """Declares a tool-call parser (``--tool-call-parser``).

    template_marks: substrings of chat templates of models that speak this format, for ``auto``.
    """

    family: ClassVar[str] = "tool_parsers"

    template_marks: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ReasoningParserSpec(Declaration):
    """Declares a reasoning parser (``--reasoning-parser``)."""

    family: ClassVar[str] = "reasoning_parsers"

    template_marks: tuple[str, ...] = ()
