"""Tool calls between marks, anywhere in the text: what the formats of most models have in common."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from enum import Enum, auto
from functools import cached_property
from typing import Any, ClassVar, Protocol

from fwk.interfaces.parser import Parsed, ParserContext, ToolCallDelta, ToolParser
from fwk.types import GrammarRequest
from fwk_parsers._common import HeldSpace, SteppingParser, held_len, joined
from fwk_parsers._common.call_grammar import Call, each, request
from fwk_parsers._common.example import example_call
from fwk_parsers._common.scan import Scan

MAX_HEADER = 512
"""Characters of a call within which its name and the beginning of its arguments are recognised."""


class At(Enum):
    """Where in the text a parser is."""

    TEXT = auto()
    BETWEEN = auto()  # in a section of calls, but in no call
    BLOCK = auto()  # in a call that will be known at its end
    HEADER = auto()  # in a call whose arguments are given out as they come, before these
    ARGUMENTS = auto()


class Block(Protocol):
    """Finds the end of a call that is read as a whole."""

    def run(self, text: str) -> tuple[int, bool]:
        """How many characters of ``text`` belong to the call for sure, and whether it ends with them.

        What is left comes again, with more behind it.
        """
        ...


class MarkedCalls(SteppingParser, ToolParser):
    """A section of calls opens with a mark, has calls and fillers in it, and ends with another mark or none.

    What turns out to be no call of a known tool is content, with its opening mark; whatever follows is looked at again.
    A section whose closing mark is missing counts.
    """

    opens: ClassVar[tuple[str, ...]] = ()
    """What begins a section."""
    starts: ClassVar[tuple[str, ...]] = ()
    """What a call in a section begins with."""
    can_start_alone: ClassVar[bool] = False
    """Whether a call's beginning opens a section, too."""
    is_open_first: ClassVar[bool] = False
    """Whether the answer begins in a section that nothing opened."""
    fillers: ClassVar[tuple[str, ...]] = ()
    """Marks in a section that say nothing."""
    closes: ClassVar[tuple[str, ...]] = ()
    """What ends a section."""
    separators: ClassVar[str] = ""
    """Characters between calls, besides white space."""

    _at: At

    def __init__(self, context: ParserContext) -> None:
        super().__init__(context)
        self._tools = {tool["name"]: tool for tool in context.tools}
        self._at = At.BETWEEN if self.is_open_first else At.TEXT
        self._text = ""  # undecided
        self._space = HeldSpace()  # before the section under way
        self._lead: list[str] = []  # of the section, as long as it has no call: the opening mark, what was skipped
        self._pieces: list[str] = []  # of the call under way that will be known at its end
        self._block: Block | None = None
        self._scan = Scan()
        self._num_calls = 0
        self._has_call = False  # in the section under way
        self._is_after_call = False  # nothing but white space has come since a call

    @cached_property
    def _opening(self) -> re.Pattern[str]:
        marks = (*self.opens, *(self.starts if self.can_start_alone else ()))
        return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")

    def _begins(self, rest: str) -> bool | None:
        """Whether a call begins here; None while it may. Decides after a bounded number of characters."""
        if any(rest.startswith(start) for start in self.starts):
            return True
        return None if any(start.startswith(rest) for start in self.starts) else False

    @abstractmethod
    def _start(self, rest: str) -> Block | None:
        """A call begins with ``rest``. What finds its end, or None when it is of the kind that has a header."""

    def _read(self, text: str) -> tuple[str, str] | None:
        """Name and arguments of a whole call, arguments as JSON; None when it is none."""
        raise NotImplementedError

    def _header(self, text: str) -> tuple[int, str] | bool:
        """Length of a call's header, up to the brace of its arguments, and the name in it.

        False: it is none. True: not known yet. Asked again with more, so it must not depend on how much has come.
        """
        raise NotImplementedError

    is_many_allowed: ClassVar[bool] = True
    """Whether several calls may stand in one answer of this format."""

    def grammar(self, is_many: bool) -> GrammarRequest | None:
        calls = each(self.context.tools, self._call_parts)
        return None if not calls else request(calls, is_many and self.is_many_allowed, self._frame())

    def free_grammar(self, strict: Collection[str]) -> GrammarRequest | None:
        def parts(tool: Mapping[str, Any]) -> Call:
            return self._call_parts(tool) if tool["name"] in strict else self._any_call_parts(tool)

        calls = each(self.context.tools, parts)
        return None if not calls else request(calls, self.is_many_allowed, self._frame(), self._free())

    @abstractmethod
    def _call_parts(self, tool: Mapping[str, Any]) -> Call:
        """A call of a tool, in pieces of a grammar. Raises ``UnwritableSchema`` where there is none."""

    def _any_call_parts(self, tool: Mapping[str, Any]) -> Call:
        """The same with any arguments."""
        return self._call_parts({"name": tool["name"], "parameters": {"type": "object"}})

    def _frame(self) -> dict[str, str]:
        """What stands around and between the calls: ``begin``, ``separator`` and ``end``."""
        close = self.closes[0] if self.closes else ""
        return {"begin": self.opens[0] if self.opens else "", "separator": "", "end": close}

    def _free(self) -> dict[str, Any]:
        """What a section begins with, and what no text may hold, for it would begin one otherwise."""
        trigger = self.opens[0] if self.opens else self.starts[0]
        others = [mark for mark in self._marks if mark != trigger and mark[0] in "<["]
        return {"trigger": trigger, "never": others}

    def instructions(self) -> str:
        functions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.context.tools)
        example = self.write_call(*example_call(self.context.tools))
        return (
            f"You may call these functions, given as JSON schemas:\n{functions}\n\n"
            f"To call one, write its name and arguments like this, and nothing behind it, each parameter with what it "
            f"is in the question:\n{example}\n\n"
            "You will then be given its result. Answer in plain text when no function is needed."
        )

    @abstractmethod
    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str: ...

    def finish(self) -> Parsed:
        text, self._text = self._text, ""
        if self._at is At.ARGUMENTS:
            return Parsed()  # the arguments have been given out
        if self._at is At.TEXT:
            space = self._space.take()
            return Parsed(content=text if self._is_after_call and not text else space + text)
        marks = (*self.fillers, *self.closes, "")
        if self._at is At.BETWEEN and self._has_call and any(mark.startswith(text) for mark in marks):
            return Parsed()
        return joined([self._no_call(text), Parsed(content=self._space.take())])

    def _step(self) -> Parsed:
        match self._at:
            case At.TEXT:
                return self._in_text()
            case At.BETWEEN:
                return self._between()
            case At.BLOCK:
                return self._in_block()
            case At.HEADER:
                return self._in_header()
            case At.ARGUMENTS:
                return self._in_arguments()

    def _in_text(self) -> Parsed:
        found = self._opening.search(self._text)
        if found is None:
            held = max((held_len(self._text, mark) for mark in self._marks), default=0)
            length = len(self._text) - held
            body, self._text = self._space.add(self._text[:length]), self._text[length:]
        else:
            mark = found.group() if found.group() in self.opens else ""  # a call's own beginning is looked at again
            body = self._space.add(self._text[: found.start()])
            self._text = self._text[found.start() + len(mark) :]
            self._at, self._lead, self._has_call = At.BETWEEN, [mark], False
        if body:
            self._is_after_call = False
        return Parsed(content=body)

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        return (*self.opens, *(self.starts if self.can_start_alone else ()))

    def _between(self) -> Parsed:
        """Skip what says nothing, up to a call or the end of the section."""
        text, place = self._text, 0
        while True:
            start, place = place, place + len(text[place:]) - len(text[place:].lstrip())
            self._lead.append(text[start:place])
            rest = text[place:]
            if not rest:
                break
            filler = _first(self.fillers, rest)
            if _first(self.opens, rest) is not None:
                self._text = rest
                return self._close("")
            if (close := _first(self.closes, rest)) is not None:
                self._text = rest[len(close) :]
                return self._close(close)
            begins = self._begins(rest)
            if begins:
                self._text = rest
                self._block = self._start(rest)
                self._at = At.HEADER if self._block is None else At.BLOCK
                return Parsed()
            marks = (*self.fillers, *self.opens, *self.closes)
            if filler is None and (begins is None or any(mark.startswith(rest) for mark in marks)):
                break
            length = len(filler) if filler is not None else int(rest[0] in self.separators)
            if not length:
                self._text = rest
                return self._no_call("")
            self._lead.append(rest[:length])
            place += length
        self._text = text[place:]
        return Parsed()

    def _close(self, mark: str) -> Parsed:
        if not self._has_call:
            return self._no_call(mark)
        self._at, self._lead, self._is_after_call = At.TEXT, [], True
        return Parsed()

    def _in_block(self) -> Parsed:
        assert self._block is not None
        length, is_end = self._block.run(self._text)
        self._pieces.append(self._text[:length])
        self._text = self._text[length:]
        if not is_end:
            return Parsed()
        text = "".join(self._pieces)
        call = self._read(text)
        if call is None or not self._knows(call[0]):
            return self._no_call("")
        self._pieces = []
        self._at = At.BETWEEN
        return self._call(*call)

    def _in_header(self) -> Parsed:
        found = self._header(self._text[:MAX_HEADER])
        if found is True and len(self._text) < MAX_HEADER:
            return Parsed()
        if isinstance(found, bool) or not self._knows(found[1]):
            mark = _first(self.starts, self._text) or ""
            self._text = self._text[len(mark) :]
            return self._no_call(mark)
        self._text = self._text[found[0] :]
        self._at, self._scan = At.ARGUMENTS, Scan()
        return self._call(found[1])

    def _in_arguments(self) -> Parsed:
        found = self._scan.run(self._text)
        arguments, self._text = self._text[: self._scan.position], self._text[self._scan.position :]
        self._scan.position = 0
        if found is not None:
            self._at = At.BETWEEN
        deltas = [ToolCallDelta(self._num_calls - 1, arguments=arguments)] if arguments else []
        return Parsed(tool_calls=deltas)

    def _knows(self, name: str) -> bool:
        return name in self._tools or not self._tools

    def _call(self, name: str, arguments: str = "") -> Parsed:
        self._num_calls += 1
        self._space.take()
        self._lead, self._has_call, self._is_after_call = [], True, True
        return Parsed(tool_calls=[ToolCallDelta(self._num_calls - 1, name, arguments)])

    def _no_call(self, text: str) -> Parsed:
        """It was no call: all of it up to ``text`` is content, and what comes now is looked at again."""
        content = "".join([*self._lead, *self._pieces, text])
        body = self._space.add(content)
        self._at, self._lead, self._pieces = At.TEXT, [], []
        if body:
            self._is_after_call = False
        return Parsed(content=body)


def _first(marks: tuple[str, ...], text: str) -> str | None:
    return next((mark for mark in marks if text.startswith(mark)), None)


class JsonBlock:
    """An object in JSON."""

    def __init__(self) -> None:
        self._scan = Scan(allows_marks=True)

    def run(self, text: str) -> tuple[int, bool]:
        found = self._scan.run(text)
        length, self._scan.position = self._scan.position, 0
        return length, found is not None


class MarkBlock:
    """Everything up to a mark. ``ends``: part of the call; ``closes``: not."""

    def __init__(self, ends: tuple[str, ...], closes: tuple[str, ...] = ()) -> None:
        self._ends = ends
        self._marks = (*ends, *closes)
        self._pattern = re.compile("|".join(map(re.escape, self._marks)))

    def run(self, text: str) -> tuple[int, bool]:
        found = self._pattern.search(text)
        if found is not None:
            return (found.end() if found.group() in self._ends else found.start()), True
        return len(text) - max(held_len(text, mark) for mark in self._marks), False


def matched(pattern: re.Pattern[str], text: str, name: Callable[[str], str] = str) -> tuple[int, str] | bool:
    """For headers that end before the first brace: as ``MarkedCalls._header``."""
    brace = text.find("{")
    if brace < 0:
        return True
    found = pattern.fullmatch(text, 0, brace)
    return (brace, name(found.group("name"))) if found is not None else False
