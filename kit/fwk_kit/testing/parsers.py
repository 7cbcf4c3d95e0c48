"""What parsers of tool calls and of thinking must do."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest

from fwk.interfaces.parser import Parsed, ParserContext, StreamParser, ToolParser
from fwk.plugins import Registered
from fwk.types import GrammarRequest
from fwk_kit.testing.base import PluginSuite

Told = tuple[str, str, list[tuple[str, str]]]

PLAIN = ("Hello.", "", '1 < 2 > 0, {"a": [1, 2]} and </b>\n\n', "Grüße 🙂", "\\ \" ' `x`", "a" * 3000)
"""Text that is neither a call nor a thought."""

WORDS = [
    "<",
    ">",
    "{",
    "}",
    "[",
    "]",
    '"',
    "\n",
    " ",
    "/",
    "name",
    "arguments",
    "think",
    "tool_call",
    "é",
    "x",
    ":",
    "\\",
]


def told(pieces: Sequence[Parsed]) -> Told:
    """Content, thinking, and name and arguments of each call; a call's name comes once, and first."""
    calls: list[list[str]] = []
    for delta in (delta for piece in pieces for delta in piece.tool_calls):
        if delta.name is not None:
            assert delta.index == len(calls), "calls are counted from 0, in order"
            calls.append([delta.name, ""])
        assert delta.index == len(calls) - 1, "a piece of arguments before its call's name"
        calls[-1][1] += delta.arguments
    content = "".join(piece.content for piece in pieces)
    return content, "".join(piece.reasoning for piece in pieces), [(name, text) for name, text in calls]


LONG = 12_000
NUM_TRIES = 8
"""Of measuring both lengths, until the longer takes no more than what is linear."""

QUICK_SECONDS = 0.1
"""CPU time in which that many characters, one by one, are no reason to look closer."""


class StreamParserSuite(PluginSuite):
    """However a text is cut, the same comes out. Shared by the two families of parsers.

    samples: texts of the model and what they mean: content, thinking, and (name, arguments as JSON) of each call.
    """

    tools: ClassVar[Sequence[Mapping[str, Any]]] = ({"name": "add", "parameters": {"type": "object"}}, {"name": "say"})
    samples: ClassVar[Mapping[str, Told]] = {}
    prompt_tail: ClassVar[str] = ""

    def parser(self, item: Registered) -> Any:
        """One for a new sequence."""
        return self.make(item, ParserContext(self.tools, self.prompt_tail, self.given(item)))

    def parse(self, item: Registered, pieces: Sequence[str]) -> Told:
        """Feed pieces to a new parser."""
        parser: StreamParser = self.parser(item)
        return told([*map(parser.feed, pieces), parser.finish()])

    def texts(self) -> list[str]:
        """The samples, plain text, and rubbish made of both."""
        rng = random.Random(5)
        noise = ["".join(rng.choice(WORDS) for _ in range(30)) for _ in range(20)]
        broken = [text[: rng.randint(0, len(text))] + rng.choice(noise) for text in self.samples]
        return [*self.samples, *PLAIN[:-1], *noise, *broken]

    def exercise(self, item: Registered) -> None:
        for text in PLAIN:
            self.parse(item, [text])

    def test_samples_mean_what_they_say(self, item: Registered) -> None:
        if not self.samples:
            pytest.skip("the suite has no samples: set samples")
        for text, (content, reasoning, calls) in self.samples.items():
            found = self.parse(item, [text])
            assert found[:2] == (content, reasoning), text
            assert [name for name, _ in found[2]] == [name for name, _ in calls], text
            for (_, mine), (_, wanted) in zip(found[2], calls, strict=True):
                assert json.loads(mine) == json.loads(wanted), text

    def test_pieces_make_no_difference(self, item: Registered) -> None:
        rng = random.Random(7)
        for text in self.texts():
            whole = self.parse(item, [text])
            cuts = sorted(rng.randint(0, len(text)) for _ in range(4))
            parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
            for pieces in (list(text), parts, ["", *text, ""]):
                assert self.parse(item, pieces) == whole, repr(text)

    def test_the_time_is_linear_in_the_text(self, item: Registered) -> None:
        """A sample again and again, and one that is cut off and continues with what ends nothing."""
        for sample in self.samples:
            cut = sample[: len(sample) * 2 // 3]
            texts = [sample * (LONG // len(sample)), *(cut + tail * LONG for tail in ("x", " ", "<", '"'))]
            for pieces in ([texts[0]], *map(list, texts)):
                if (seconds := self._seconds(item, pieces)) < QUICK_SECONDS:
                    continue
                short = "".join(pieces)[: LONG // 4]
                parts = [short] if len(pieces) == 1 else list(short)
                quarter = self._seconds(item, parts)
                for _ in range(NUM_TRIES):  # what else runs on the machine adds time, and takes none away
                    if seconds < 8 * quarter:  # linear: 4 times, quadratic: 16 times
                        break
                    seconds = min(seconds, self._seconds(item, pieces))
                    quarter = min(quarter, self._seconds(item, parts))
                found = f"{seconds:.1f} s for {len(pieces)} pieces that begin {cut!r}, {quarter:.2f} s for a quarter"
                assert seconds < 8 * quarter, found

    def _seconds(self, item: Registered, pieces: Sequence[str]) -> float:
        """CPU time of this thread; without the collector, whose rounds take what the rest of the process is large."""
        gc.disable()
        try:
            started = time.thread_time()
            self.parse(item, pieces)
            return time.thread_time() - started
        finally:
            gc.enable()

    def test_what_is_fed_comes_out_soon(self, item: Registered) -> None:
        """A long answer is not held back until its end."""
        parser: StreamParser = self.parser(item)
        out = [parser.feed("word " * 10) for _ in range(50)]
        shown = sum(len(piece.content) + len(piece.reasoning) for piece in out)
        assert shown > 2000, f"of 2500 characters {shown} came out before the end"

    def test_two_sequences_do_not_share(self, item: Registered) -> None:
        one, two = self.parser(item), self.parser(item)
        texts = [*self.samples, PLAIN[2]]
        out: tuple[list[Parsed], list[Parsed]] = ([], [])
        for a, b in zip(texts[0], texts[-1].ljust(len(texts[0]))[: len(texts[0])], strict=True):
            out[0].append(one.feed(a))
            out[1].append(two.feed(b))
        assert told([*out[0], one.finish()]) == self.parse(item, [texts[0]])


class ToolParserSuite(StreamParserSuite):
    """Calls of known tools are found; everything else stays what it was."""

    family = "tool_parsers"
    interface = ToolParser

    def test_plain_text_stays_content(self, item: Registered) -> None:
        for text in PLAIN:
            content, reasoning, calls = self.parse(item, [text])
            assert (content, reasoning, calls) == (text, "", []), repr(text)

    def test_unknown_tools_are_not_called(self, item: Registered) -> None:
        """A call of a tool that was not offered stays text."""
        for text, (_, _, calls) in self.samples.items():
            if calls:
                context = ParserContext([{"name": "another"}], self.prompt_tail, self.given(item))
                parser: ToolParser = self.make(item, context)
                found = told([parser.feed(text), parser.finish()])
                assert found[2] == [], text
                assert calls[0][0] in found[0], f"{text!r} was swallowed"

    def test_what_is_cut_off_is_not_lost(self, item: Registered) -> None:
        """Wherever a text ends or goes wrong, nothing is raised; without a call all of it is content."""
        rng = random.Random(11)
        for sample in self.samples:
            for end in range(0, len(sample), 1 + len(sample) // 64):
                for text in (sample[:end], sample[:end] + rng.choice(WORDS) + sample[end + 1 :]):
                    content, _, calls = self.parse(item, [text])
                    if not calls:
                        assert "".join(content.split()) == "".join(text.split()), repr(text)

    def test_its_grammar_is_one(self, item: Registered) -> None:
        for is_many in (False, True):
            grammar = self.parser(item).grammar(is_many)
            assert grammar is None or isinstance(grammar, GrammarRequest)


class ReasoningParserSuite(StreamParserSuite):
    """Nothing is lost between thinking and answer, and no call is invented."""

    family = "reasoning_parsers"
    interface = StreamParser

    def test_nothing_is_lost(self, item: Registered) -> None:
        for text in PLAIN:
            content, reasoning, calls = self.parse(item, [text])
            assert calls == []
            assert (reasoning + content).split() == text.split(), repr(text)
