"""Parsers that turn a model's text into tool calls, or split thinking from the answer."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from fwk.interfaces.declaration import Declaration
from fwk.types import GrammarRequest


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call: ``name`` comes once, before the first piece of ``arguments``.

    - ``index``: of the call in the answer, from 0.
    """

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a piece of text turned out to be.

    - ``content``: text of the answer.
    - ``reasoning``: text of the thinking.
    - ``tool_calls``: pieces of calls, in order.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list["ToolCallDelta"])

    def __add__(self, other: Parsed) -> Parsed:
        """This piece and the next."""
        calls = [*self.tool_calls, *other.tool_calls]
        return Parsed(self.content + other.content, self.reasoning + other.reasoning, calls)


@dataclass(frozen=True, slots=True)
class ParserContext:
    """What a parser is built with: one parser object per sequence.

    tools: the functions that may be called, each with ``name`` and perhaps ``parameters`` (a JSON schema); empty: any.
    prompt_tail: how the prompt ends, special tokens spelled out; a template may have opened the thinking already.

    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    prompt_tail: str = ""
    options: Any = None


@dataclass(frozen=True, slots=True)
class ThinkingMarks:
    """How a model's thinking begins and ends, for ending it in the model's place.

    opens: the mark it begins with; empty: the prompt has opened it. closes: the marks that end it.
    end: what is written to end it, up to where the answer begins.
    """

    opens: str
    closes: tuple[str, ...]
    end: str


class StreamParser(ABC):
    """Fed with text as it comes. Feeding everything at once gives the same as feeding it by character.

    - ``reads_special``: whether its marks may be special tokens: the output is then decoded with them.
    """

    reads_special: ClassVar[bool] = False

    def __init__(self, context: ParserContext) -> None:
        self.context = context

    @abstractmethod
    def feed(self, text: str) -> Parsed:
        """Parse more text; what is undecided is held back."""

    @abstractmethod
    def finish(self) -> Parsed:
        """The text has ended: give out what was held back."""

    def thinking_marks(self) -> ThinkingMarks | None:
        """Asked of a new reasoning parser: how the thinking can be ended. None: it cannot."""
        return None


class ToolParser(StreamParser):
    """Finds tool calls. Text that is not a call of a known tool stays content; white space alongside calls may go."""

    @abstractmethod
    def grammar(self, is_many: bool) -> GrammarRequest | None:
        """One call of any of the context's tools, or with ``is_many`` one or more, and nothing else.

        None for a format that no grammar of ours describes: the server's fallback parser then forces calls.
        """

    def free_grammar(self, strict: Collection[str]) -> GrammarRequest | None:
        """Any text with calls in it, of which those of the tools named in ``strict`` keep to their schemas.

        None where no grammar of ours can say so: such calls are then what the model makes of them.
        """
        return None

    def instructions(self) -> str:
        """For a chat template that shows the model no tools: what to tell it instead. Empty: this parser cannot."""
        return ""

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """An earlier call as the model would have written it, for a chat template that shows no calls."""
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class ToolParserSpec(Declaration):
    """Declares a tool-call parser (``--tool-call-parser``); ``load`` names a ``ToolParser``.

    template_marks: for ``auto``: what is found in chat templates of models that speak this format; empty: never.
    also_called: other servers' names of it. Like its own name, each is also found when written with other case and
        without or with other ``-``, ``_`` and ``.``.
    is_fallback: ``auto`` takes it for templates that no other parser reads. It has a grammar, and instructions for
        templates that show the model no tools.
    """

    family: ClassVar[str] = "tool_parsers"

    template_marks: tuple[str, ...] = ()
    also_called: tuple[str, ...] = ()
    is_fallback: bool = False


@dataclass(frozen=True, kw_only=True)
class ReasoningParserSpec(Declaration):
    """Declares a reasoning parser (``--reasoning-parser``); ``load`` names a ``StreamParser``.

    template_marks, also_called: as those of ``ToolParserSpec``.
    """

    family: ClassVar[str] = "reasoning_parsers"

    template_marks: tuple[str, ...] = ()
    also_called: tuple[str, ...] = ()
