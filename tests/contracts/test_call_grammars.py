"""What the grammar of a format's calls allows, its parser reads back as calls whose arguments keep to the schema.

Every tool parser, with its marks as special tokens and as plain text, over random schemas. Arguments are judged by
``jsonschema``. The texts are random walks through the grammar's masks.
"""

# ruff: noqa: RUF001 (some marks are made of full-width bars)

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.lazy import lazy
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fwk.errors import InvalidRequest
from fwk.interfaces.grammar import Grammar, GrammarContext
from fwk.interfaces.parser import ParserContext, ToolParser
from fwk.plugins import load_object
from fwk_grammar.llguidance.backend import LLGuidanceBackend
from fwk_kit.testing.base import installed
from fwk_kit.testing.parsers import told
from fwk_tokenizer.vocabulary import byte_of_char

xgrammar = lazy("fwk_grammar.xgrammar.backend")

PLUGINS = installed()
PARSERS = {item.name: load_object(item) for item in PLUGINS.family("tool_parsers")}
EOS, VOCAB = 256, 288
SAY = {"name": "say", "parameters": {"type": "object", "properties": {}}}
WEATHER = {
    "name": "weather.now",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "unit": {"enum": ["C", "F"]},
            "zip": {"type": ["string", "null"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["days", "unit"],
    },
}
SPECIAL = ("<|", "<｜tool", "◁", "[TOOL")
"""Marks that begin so are special tokens of the models that write them."""


@cache
def backend(kind: Any, special: tuple[str, ...]) -> Any:
    """A grammar backend over bytes and special tokens."""
    vocab = {char: byte for char, byte in byte_of_char().items()} | {text: EOS + i for i, text in enumerate(special)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens(list(special))
    pieces = [bytes([i]) for i in range(256)] + [text.encode() for text in special]
    pieces += [b""] * (VOCAB - len(pieces))
    return kind(GrammarContext(tokenizer, pieces, frozenset(range(EOS, EOS + len(special))), (EOS,), None))


def special_of(parser: type[Any], has_special: bool) -> tuple[str, ...]:
    """The special tokens of a model of the format: an end, its marks if they are ones, a mark of thinking."""
    names = ("opens", "starts", "fillers", "closes")
    marks = {mark for name in names for mark in getattr(parser, name, ())} | {"<|tool_call_argument_begin|>"}
    marks = {mark for mark in marks if mark.startswith(SPECIAL)} | ({"｜DSML｜"} if "V32" in parser.__name__ else set())
    return ("<end>", "<think>", *sorted(marks)) if has_special else ("<end>", "<think>")


def allowed(grammar: Grammar) -> list[int]:
    row = np.zeros(VOCAB // 32, np.int32)
    grammar.fill_mask(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:VOCAB]).tolist()


def walk(grammar: Grammar, pieces: list[bytes], rng: random.Random, length: int = 1500) -> str | None:
    """A random output, with a taste for what closes; None when it does not come to an end."""
    out = b""
    for _ in range(length):
        tokens = allowed(grammar)
        if not tokens or (EOS in tokens and (tokens == [EOS] or rng.random() < 0.5)):
            return out.decode(errors="replace")
        tokens = [token for token in tokens if token != EOS]
        plain = [token for token in tokens if 32 <= token < 127 or token > EOS] or tokens
        closing = [token for token in plain if token > EOS or chr(token) in '"}]<>)/']
        token = rng.choice(closing if closing and rng.random() < 0.4 else plain)
        assert grammar.accept(token)
        out += pieces[token]
    return None


def read(parser: type[ToolParser], tools: list[dict[str, Any]], text: str) -> tuple[str, list[tuple[str, str]]]:
    reader = parser(ParserContext(tools, "<|start|>assistant"))
    content, _, calls = told([reader.feed(text), reader.finish()])
    return content, calls


def check(tools: list[dict[str, Any]], calls: list[tuple[str, str]], text: str) -> None:
    schemas = {tool["name"]: tool.get("parameters", {}) for tool in tools}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])
        assert text


@pytest.mark.gate(24)
@pytest.mark.parametrize("is_x", [False, True], ids=["llguidance", "xgrammar"])
@pytest.mark.parametrize("has_special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", sorted(PARSERS))
def test_forced_calls_are_read_back(name: str, has_special: bool, is_x: bool) -> None:
    parser, tools = PARSERS[name], [WEATHER, SAY]
    special = special_of(parser, has_special)
    compiler = backend(xgrammar.XGrammarBackend if is_x else LLGuidanceBackend, special)
    ended = 0
    for is_many in (False, True):
        request = parser(ParserContext(tools)).grammar(is_many)
        assert request is not None, f"{name} has no grammar"
        grammar = compiler.compile(request)
        for seed in range(6):
            text = walk(grammar.fork(), compiler.context.token_bytes, random.Random(seed))
            if text is None:
                continue
            content, calls = read(parser, tools, text)
            assert calls, text
            assert is_many or len(calls) == 1, text
            assert not content.strip(), text
            check(tools, calls, text)
            ended += 1
    assert ended, "no walk came to an end"


@pytest.mark.gate(12)
@pytest.mark.parametrize("has_special", [True, False], ids=["special", "text"])
@pytest.mark.parametrize("name", sorted(set(PARSERS) - {"gpt-oss"}))
def test_strict_calls_among_text_are_read_back(name: str, has_special: bool) -> None:
    """Any text may be said; a call that begins in it is valid if its tool is strict."""
    parser, tools = PARSERS[name], [WEATHER, SAY]
    special = special_of(parser, has_special)
    compiler = backend(LLGuidanceBackend, special)
    request = parser(ParserContext(tools)).free_grammar({tool["name"] for tool in tools})
    assert request is not None
    assert request.kind == "free_calls"
    grammar, source = compiler.compile(request), json.loads(request.source)
    encode = lambda text: compiler.context.tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    for text in ("Hello.", "a < b > c { } and </b>\n\n", "Grüße 🙂", "import functools", "<think>Hm.", "- [x](y)"):
        one = grammar.fork()
        assert all(map(one.accept, encode(text))), f"{text!r} may not be said"
        assert EOS in allowed(one), f"{text!r} may not be all"
    trigger = source["free"].get("trigger")
    beginning = trigger or source["begin"] + source["calls"][0][0]["text"]
    ended = 0
    for seed in range(8):
        text = f"Let me see.\n{beginning}" if trigger and seed % 2 else beginning
        one = grammar.fork()
        assert all(map(one.accept, encode(text))), text
        rest = walk(one, compiler.context.token_bytes, random.Random(seed))
        if rest is None:
            continue
        _, calls = read(parser, tools, text + rest)
        assert calls, text + rest
        check(tools, calls, text)
        ended += 1
    assert ended, "no walk came to an end"


@pytest.mark.parametrize("head", ["<|channel|>commentary ", " "])
@pytest.mark.parametrize("has_special", [True, False], ids=["special", "text"])
def test_strict_calls_among_the_messages_of_harmony(head: str, has_special: bool) -> None:
    """The recipient stands behind the channel, or before it."""
    parser, tools = PARSERS["gpt-oss"], [WEATHER, SAY]
    compiler = backend(LLGuidanceBackend, special_of(parser, has_special))
    grammar = compiler.compile(parser(ParserContext(tools)).free_grammar({"weather.now", "say"}))
    encode = lambda text: compiler.context.tokenizer.encode(text, add_special_tokens=False).ids  # noqa: E731
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    one = grammar.fork()
    assert all(map(one.accept, encode(f"{thought}<|channel|>final<|message|>Yes.")))
    assert EOS in allowed(one)
    ended = 0
    for seed in range(8):
        one, text = grammar.fork(), f"{thought}{head}to=functions."
        assert all(map(one.accept, encode(text)))
        rest = walk(one, compiler.context.token_bytes, random.Random(seed))
        if rest is None:
            continue
        _, calls = read(parser, tools, text.removeprefix(thought) + rest)
        assert calls, text + rest
        check(tools, calls, text)
        ended += 1
    assert ended, "no walk came to an end"


@pytest.mark.parametrize("name", sorted(set(PARSERS) - {"gpt-oss"}))
def test_other_tools_may_be_called_in_any_way(name: str) -> None:
    """Calls of tools that are not strict need not keep to a schema."""
    parser = PARSERS[name]
    compiler = backend(LLGuidanceBackend, special_of(parser, True))
    request = parser(ParserContext([WEATHER, SAY])).free_grammar({"say"})
    assert request is not None
    grammar = compiler.compile(request)
    text = parser(ParserContext([WEATHER, SAY])).write_call("weather.now", {"none": "of these"})
    ids = compiler.context.tokenizer.encode(text, add_special_tokens=False).ids
    assert all(map(grammar.accept, ids)), text


SCALARS = st.one_of(
    st.just({"type": "string"}),
    st.just({"type": "integer"}),
    st.just({"type": "boolean"}),
    st.just({"type": ["string", "null"]}),
    st.just({"type": ["integer", "null"]}),
    st.lists(st.sampled_from(["a", "b c", "<d>", "é"]), min_size=1, unique=True).map(lambda words: {"enum": words}),
    st.just({"enum": [1, "one", None]}),
    st.just({"anyOf": [{"type": "string"}, {"type": "integer"}]}),
    st.integers(0, 9).map(lambda number: {"const": number}),
    st.just({"type": "integer", "minimum": 0, "maximum": 40}),
    st.just({"type": "string", "maxLength": 5}),
    st.just({"$ref": "#/$defs/point"}),
)
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        inner.map(lambda schema: {"type": "array", "items": schema, "maxItems": 2}),
        st.dictionaries(st.sampled_from(["x", "y"]), inner, min_size=1).map(
            lambda properties: {"type": "object", "properties": properties, "required": list(properties)}
        ),
    ),
    max_leaves=3,
)
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


@st.composite
def tools_of_schemas(draw: Any) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(["a", "b", "some_name"]), SCHEMAS, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    parameters = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"name": "f", "parameters": {**parameters, "$defs": {"point": POINT}}}


@settings(max_examples=60, deadline=None)
@given(tool=tools_of_schemas(), name=st.sampled_from(sorted(PARSERS)), seed=st.integers(0, 1000), is_x=st.booleans())
def test_random_schemas_are_kept(tool: dict[str, Any], name: str, seed: int, is_x: bool) -> None:
    """Or the format says that it cannot, and the plain JSON of the fallback takes over."""
    parser, tools = PARSERS[name], [tool, SAY]
    compiler = backend(xgrammar.XGrammarBackend if is_x else LLGuidanceBackend, special_of(parser, bool(seed % 2)))
    request = parser(ParserContext(tools)).grammar(seed % 3 == 0)
    if request is None:
        return
    try:
        grammar = compiler.compile(request)
    except InvalidRequest as error:
        if not is_x or "does not enforce" not in str(error):
            raise
        return
    text = walk(grammar, compiler.context.token_bytes, random.Random(seed))
    if text is not None:
        content, calls = read(parser, tools, text)
        assert calls, text
        assert not content.strip(), text
        check(tools, calls, text)
