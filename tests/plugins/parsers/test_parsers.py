"""Tool calls and thinking found in text, however it is cut into pieces."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fwk import GrammarRequest
from fwk.interfaces.parser import ParserContext, StreamParser
from fwk_kit.testing.parsers import Told, told
from fwk_parsers.hermes.parser import HermesParser
from fwk_parsers.think.parser import AlwaysThinks, ThinkParser

TOOLS = [{"name": "add", "parameters": {"type": "object"}}, {"name": "say"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n</tool_call>'


def hermes() -> HermesParser:
    return HermesParser(ParserContext(tools=TOOLS))


def parse(parser: StreamParser, pieces: list[str]) -> Told:
    return told([*map(parser.feed, pieces), parser.finish()])


def hermes_of(text: str) -> tuple[str, list[tuple[str, str]]]:
    content, _, calls = parse(hermes(), [text])
    return content, calls


ARGUMENTS = '{"a": 1, "b": [2, {"c": "}"}]}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello.\n", "Hello.\n", []),
        (CALL, "", [("add", ARGUMENTS)]),
        (f"I will add.\n\n{CALL}\n", "I will add.", [("add", ARGUMENTS)]),
        (f"{CALL}\n{CALL}", "", [("add", ARGUMENTS)] * 2),
        (f"{CALL}{CALL} Done.", " Done.", [("add", ARGUMENTS)] * 2),
        ('<tool_call>{"name":"say","arguments":{}}</tool_call>', "", [("say", "{}")]),
        ('<tool_call>{"name":"say","parameters":{"x":"</tool_call>"}}', "", [("say", '{"x":"</tool_call>"}')]),
        ('<tool_call>{"name":"say","arguments":{"x":"a\\"}b\\\\"}}</tool_call>', "", [("say", '{"x":"a\\"}b\\\\"}')]),
        ('<tool_call>{"arguments": {"x": "é"}, "name": "say"}</tool_call>', "", [("say", '{"x": "é"}')]),
        ('<tool_call>{"name": "say", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("say", '{"x": 1}')]),
        ('<tool_call>{"name": "say"}</tool_call>', "", [("say", "{}")]),
        ('<tool_call>{"name": "say", "arguments": {}, "id": "}"}</tool_call>!', "!", [("say", "{}")]),
        ('<tool_call>{"name": "say", "arguments": {"x": 1}', "", [("say", '{"x": 1}')]),  # no closing mark
        (
            '<tool_call>{"name": "say", "arguments": {"x": 1}</tool_call> Well',
            " Well",
            [("say", '{"x": 1}')],
        ),  # no brace
        ('<tool_call>{"name": "say", "arguments": {"x": 1} Well', "Well", [("say", '{"x": 1}')]),
        ('<tool_call>{"name": "say", "arguments": {"x": "cut o', "", [("say", '{"x": "cut o')]),  # by max_tokens
        ('<tool_call>{"name": "say", "arguments": {"x": <</tool_call>', "<</tool_call>", [("say", '{"x": ')]),
    ],
)
def test_calls_are_found_and_text_is_kept(text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert hermes_of(text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "a < b <tool",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>hello</tool_call>",
        "<tool_call>[1]</tool_call> x",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {"x": "</tool_call>"}}</tool_call>\n\n',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "say", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "say", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "say", "argu',
        '<tool_call>{name: "say"}</tool_call>',
        '<tool_call>{"name": "say" "arguments": {}}</tool_call>  ',
        "  <tool_call> {} </tool_call>",
        '<tool_call>{"a": <tool_call>{}</tool_call>',
        '<tool_call>{"name": "\\q", "arguments": {}}',
        '<tool_call>{"name": "say", "arguments": ' + "[" * 20_000 + "]" * 20_000 + "}",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert hermes_of(text) == (text, [])


def test_a_call_after_something_that_is_none_is_found() -> None:
    wrong = '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'
    assert hermes_of(f"{wrong}\n{CALL}") == (wrong, [("add", ARGUMENTS)])
    assert hermes_of(f'<tool_call>{{"a": {CALL}') == ('<tool_call>{"a":', [("add", ARGUMENTS)])


def test_arguments_are_given_out_as_they_come() -> None:
    parser = hermes()
    seen: list[tuple[str, Any]] = []
    for char in CALL:
        for delta in parser.feed(char).tool_calls:
            seen.append((delta.name, delta.arguments))
    assert seen[0] == ("add", "")
    assert [name for name, _ in seen[1:]] == [None] * len(ARGUMENTS)
    assert "".join(arguments for _, arguments in seen) == ARGUMENTS
    parser = hermes()
    assert parser.feed("Hello wor").content == "Hello wor"
    assert parser.feed("ld <tool").content == "ld"
    assert parser.feed("box>").content == " <toolbox>"


PARTS = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    '{"name": "add", "arguments": ',
    '{"name": "say", "arguments": ',
    '{"name"',
    '"arguments"',
    ': {"x": "y"}',
    "{",
    "}",
    "[",
    "]",
    '"',
    "\\",
    '\\"',
    "<",
    "<tool_",
    "call>",
    "text",
    ",",
    ":",
    CALL,
    '{"name":"no","arguments":{}}',
    "<think>",
    "</think>",
    "<th",
    "/think>",
    "é",
    "\u2003",
    '{"arguments": {}, "name": "say"}',
]


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join), st.lists(st.integers(0, 2000), max_size=8))
@example("<tool_call>\n" + " " * 600 + '{"name": "say", "arguments": {"a":1}}', [5, 520, 560])
@example('<tool_call>{"name": "' + "x" * 481 + '", "arguments": {}}</tool_call>', [505, 512, 513])
@example('<tool_call>{"name": "' + "\\u0073ay" + " " * 480 + '", "arguments": {}}</tool_call>', [505, 512, 513])
def test_pieces_do_not_matter(text: str, places: list[int]) -> None:
    for make in (
        hermes,
        lambda: HermesParser(ParserContext()),
        lambda: ThinkParser(ParserContext()),
        lambda: ThinkParser(ParserContext(prompt_tail="<|im_start|>assistant\n<think>\n")),
        lambda: AlwaysThinks(ParserContext()),
    ):
        at_once = parse(make(), [text])
        assert parse(make(), list(text)) == at_once
        assert parse(make(), cut(text, places)) == at_once
        whole = "".join([at_once[0], at_once[1], *(arguments for _, arguments in at_once[2])])
        if not at_once[2]:  # no call: nothing is gone but white space and the marks of thinking
            rest = text.replace("<think>", "", 1).replace("</think>", "", 1)
            assert len("".join(rest.split())) <= len("".join(whole.split()))
    if "<tool_call>" not in text:
        assert hermes_of(text) == (text, [])


def test_the_time_is_linear_in_the_text() -> None:
    for text in (
        "<tool_call>{" * 2_500,
        '<tool_call>{"name": "say", "arguments": {"x": "' + "y" * 30_000,
        '<tool_call>{"x": "' + "y" * 20_000,
        "<tool_call>" + " " * 20_000,
        " " * 20_000,
        "<think>" + " " * 20_000,
    ):
        for make in (hermes, lambda: ThinkParser(ParserContext())):
            started = time.process_time()
            parse(make(), list(text))
            assert time.process_time() - started < 1.5


@pytest.mark.parametrize(
    ("tail", "text", "content", "reasoning"),
    [
        ("", "<think>\nHm.\n</think>\n\nYes.", "Yes.", "Hm."),
        ("", "\n <think>a</think>b", "b", "a"),
        ("", "No thinking. <think>x</think>", "No thinking. <think>x</think>", ""),
        ("", "<think>never en<", "", "never en<"),
        ("", "<think>\n\n</think>\n\n{}\n", "{}\n", ""),
        ("", "  plain ", "  plain ", ""),
        ("", "<thi", "<thi", ""),
        ("", "<think>a</think>b</think>c", "b</think>c", "a"),
        ("<think>\n", "Hm.</think>Yes.", "Yes.", "Hm."),
        ("<think>\n", "<think>Hm.</think>Yes.", "Yes.", "Hm."),
        ("<think>\n", "Hm", "", "Hm"),
        ("<think>\n\n</think>\n\n", "Yes.", "Yes.", ""),
    ],
)
def test_thinking_is_split_from_the_answer(tail: str, text: str, content: str, reasoning: str) -> None:
    for pieces in ([text], list(text)):
        assert parse(ThinkParser(ParserContext(prompt_tail=tail)), pieces) == (content, reasoning, [])


def test_deepseek_r1_thinks_unless_the_prompt_ended_it() -> None:
    assert parse(AlwaysThinks(ParserContext()), ["Hm.</think>\nYes"]) == ("Yes", "Hm.", [])
    closed = AlwaysThinks(ParserContext(prompt_tail="<think>\n\n</think>\n\n"))
    assert parse(closed, ["Yes"]) == ("Yes", "", [])


def test_the_grammar_of_calls_is_what_the_parser_reads() -> None:
    tools = [{"name": 'f"x', "parameters": {"properties": {"a": {"type": "integer"}}}}, {"name": "g"}]
    parser = HermesParser(ParserContext(tools=tools))
    request = parser.grammar(is_many=True)
    assert isinstance(request, GrammarRequest)
    source = json.loads(request.source)
    assert (request.kind, source["is_many"]) == ("tagged", True)
    assert [tag["schema"]["type"] for tag in source["tags"]] == ["object", "object"]
    text = source["separator"].join(tag["begin"] + '{"a": 1}' + tag["end"] for tag in source["tags"])
    assert parse(parser, [text]) == ("", "", [('f"x', '{"a": 1}'), ("g", '{"a": 1}')])
