"""Which parser a chat template or another server's name leads to, and values that are hard to read."""

# ruff: noqa: RUF001 (some marks are made of full-width bars)

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from fwk.errors import PluginError
from fwk.interfaces.parser import Parsed, ParserContext, ToolParser
from fwk.plugins import discover, load_object
from fwk.server.parsers import select_parser
from fwk_kit.testing.parsers import told
from fwk_parsers._common.python_calls import read_python_call
from fwk_parsers._common.typed import typed
from fwk_parsers.harmony.channels import HarmonyChannels
from fwk_parsers.harmony.tools import HarmonyTools
from fwk_parsers.hermes.parser import HermesParser

# What is telling in each family's published chat template, alongside what it shares with others.
TEMPLATES = {
    "Qwen 3": (
        '<tool_call>\\n{"name": <function-name>, "arguments": {}}\\n</tool_call> \'</think>\'',
        "hermes",
        "qwen3",
    ),
    "Qwen3-Coder": (
        "<tool_call>\\n<function=f>\\n<parameter=x>\\n</parameter></function></tool_call>",
        "qwen3-coder",
        None,
    ),
    "Step 3.5": ("<tool_call>\\n<function=f>\\n<parameter=x>\\n</tool_call> '</think>'", "qwen3-coder", "qwen3"),
    "Seed-OSS": ("<seed:tool_call>\\n<function=f>\\n<parameter=x>", "seed-oss", None),
    "GLM 4.6": (
        "<tool_call>{n}\\n<arg_key>{k}</arg_key>\\n<arg_value>{v}</tool_call> '</think>'",
        "glm-4.5",
        "glm-4.5",
    ),
    "Llama 3.2": (
        '{"name": function name, "parameters": dictionary of argument name and its value}',
        "llama3-json",
        None,
    ),
    "Llama 4": ("Use exact format: [func_name1(param1=value1), func_name2(...)]", "pythonic", None),
    "LFM2": ("'<|tool_call_start|>[' ']<|tool_call_end|>'", "lfm2", None),
    "OLMo 3": ("wrapped in <function_calls></function_calls> XML tags", "olmo", None),
    "Mistral Small": ("'[AVAILABLE_TOOLS]' '[TOOL_CALLS]'", "mistral", None),
    "Magistral": ("'[TOOL_CALLS]' '[ARGS]' '[THINK]' '[/THINK]'", "mistral", "mistral"),
    "DeepSeek R1": (
        "<｜Assistant｜><think>\\n '</think>' <｜tool▁calls▁begin｜>function<｜tool▁sep｜>f\\n```json\\n",
        "deepseek-v3",
        "qwen3",
    ),
    "DeepSeek V3.1": (
        "thinking <｜Assistant｜></think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "deepseek-v3.1",
        "deepseek-v3.1",
    ),
    "DeepSeek V3.2": ("thinking '｜DSML｜' <｜Assistant｜> '</think>'", "deepseek-v3.2", "deepseek-v3.1"),
    "Kimi K2": ("<|tool_calls_section_begin|><|tool_call_begin|>", "kimi-k2", None),
    "Kimi K2 Thinking": ("<|tool_calls_section_begin|> <think></think>", "kimi-k2", "kimi-k2"),
    "gpt-oss": ("<|start|>assistant<|channel|>commentary json<|message|>", "gpt-oss", "gpt-oss"),
    "Phi-4-mini": ("'<|tool|>' + tools + '<|/tool|>' <|tool_call|>", "phi-4", None),
    "Granite 3.3": ("<|start_of_role|> <|tool_call|> <think></think> <response></response>", "granite", "granite-3.3"),
    "Granite 4": ('<|start_of_role|> <tool_call>\\n{"name": f, "arguments": a}\\n</tool_call>', "hermes", None),
    "InternLM 2.5": ("<|im_start|>system name=<|plugin|>", "internlm", None),
    "MiniMax-M1": ('<beginning_of_sentence> <tool_calls></tool_calls> "arguments"', "minimax", None),
    "MiniMax-M2": ("<minimax:tool_call> <invoke name= '</think>'", "minimax-m2", "minimax"),
    "Hunyuan": (
        '<tool_calls>[{"name": "f", "arguments": {}}]</tool_calls> \'<think>\\n\\n</think>\\n\'',
        "hunyuan",
        "qwen3",
    ),
    "Nemotron": ('<TOOLCALL>[{"name": f, "arguments": a}]</TOOLCALL>', "nemotron", None),
    "plain": ("{{ messages }}", "json", None),
}


@pytest.mark.gate(13)
@pytest.mark.parametrize("model", TEMPLATES)
def test_auto_goes_by_the_chat_template(model: str) -> None:
    template, tool, reasoning = TEMPLATES[model]
    plugins = discover()
    chosen = select_parser("tool_parsers", "auto", plugins, template).chosen
    assert chosen is not None
    assert chosen.name == tool
    chosen = select_parser("reasoning_parsers", "auto", plugins, template).chosen
    assert (chosen.name if chosen is not None else None) == reasoning


# The names of vLLM's and SGLang's documentation.
TOOL_NAMES = {
    "llama3_json": "llama3-json", "llama3": "llama3-json", "llama4_json": "llama3-json",
    "llama4_pythonic": "pythonic", "Pythonic": "pythonic",
    "deepseek_v3": "deepseek-v3", "deepseekv3": "deepseek-v3", "deepseek_v31": "deepseek-v3.1",
    "deepseekv31": "deepseek-v3.1", "deepseekv32": "deepseek-v3.2", "kimi_k2": "kimi-k2", "glm45": "glm-4.5",
    "glm47": "glm-4.5", "glm": "glm-4.5", "qwen3_coder": "qwen3-coder", "qwen3_xml": "qwen3-coder", "qwen": "hermes",
    "qwen25": "hermes", "hermes": "hermes", "openai": "gpt-oss", "gpt-oss": "gpt-oss", "phi4_mini_json": "phi-4",
    "granite": "granite", "granite-20b-fc": "granite-20b", "internlm": "internlm", "minimax": "minimax",
    "minimax_m2": "minimax-m2", "olmo3": "olmo", "hunyuan_a13b": "hunyuan", "jamba": "hunyuan",
    "seed_oss": "seed-oss", "step3p5": "qwen3-coder", "mistral": "mistral",
}  # fmt: skip
REASONING_NAMES = {
    "deepseek_r1": "deepseek-r1", "deepseek-v3": "deepseek-v3.1", "deepseek_v3": "deepseek-v3.1", "qwen3": "qwen3",
    "qwen3-thinking": "qwen3", "glm45": "glm-4.5", "kimi": "kimi", "kimi_k2": "kimi-k2", "gpt-oss": "gpt-oss",
    "openai_gptoss": "gpt-oss", "granite": "granite", "hunyuan_a13b": "hunyuan", "mistral": "mistral",
    "minimax": "minimax", "minimax_m2": "minimax", "step3": "step3", "olmo3": "qwen3",
}  # fmt: skip


def test_the_names_of_other_servers_are_known() -> None:
    plugins = discover()
    for family, names in (("tool_parsers", TOOL_NAMES), ("reasoning_parsers", REASONING_NAMES)):
        for name, ours in names.items():
            chosen = select_parser(family, name, plugins, "").chosen
            assert chosen is not None
            assert chosen.name == ours, name
        with pytest.raises(PluginError, match=r"'nonsense'; installed: .*qwen3"):
            select_parser(family, "nonsense", plugins, "")


def test_no_name_has_two_meanings() -> None:
    for family in ("tool_parsers", "reasoning_parsers"):
        seen: dict[str, str] = {}
        for item in discover().family(family):
            declaration: Any = item.declaration
            plain = {name.lower().translate({ord(char): None for char in "-_."})
                     for name in (item.name, *declaration.also_called)}  # fmt: skip
            for name in plain:
                assert seen.setdefault(name, item.name) == item.name


TOOLS = [{"name": "add", "parameters": {"type": "object"}}, {"name": "say"}]
NAMES = sorted(item.name for item in discover().family("tool_parsers"))


PIECES = [
    "</tool_call>", "<tool_call>", "</function>", "<function=f>", "<parameter=a>", "</parameter>", "\n",
    "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</invoke>", '<invoke name="f">',
    '<parameter name="a">', "</seed:tool_call>", "</minimax:tool_call>", "<｜DSML｜parameter",
    "</｜DSML｜parameter>", "</｜DSML｜invoke>", "12", "true", "null", "None", "1.0", '"', "'", "\\", "{", "}",
    "[", "]", "(", ")", ",", "=", "é", "🙂", " ", "a", "\t", "\u2028", "\x00", "<|call|>", "[TOOL_CALLS]",
    "[ARGS]", "```", "\r\n", "<", "<|tool_call_end|>", "*", "<|message|>", "</TOOLCALL>",
]  # fmt: skip
"""What texts are made of that are hard to tell from the marks around them."""

SCHEMA = {
    "type": "object",
    "$defs": {"text": {"type": "string"}},
    "properties": {
        "a": {"type": "string"},
        "b": {"$ref": "#/$defs/text"},
        "c": {"allOf": [{"$ref": "#/$defs/text"}]},
        "d": {"type": ["integer", "null"]},
        "e-f": {"anyOf": [{"type": "string"}, {"type": "number"}]},
        "g": {"enum": ["1", 2, "null", None]},
    },
}


def text_of(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.choice([0, 1, 1, 2, 3, 6])))


def value_of(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(9 if depth < 3 else 6):
        case 0 | 1:
            return text_of(rng)
        case 2:
            return rng.choice([0, 1, -5, 10**20, 0.5, 230.0, -1e-7, 1e22])
        case 3:
            return rng.choice([True, False, None])
        case 4 | 5:
            return rng.choice(["5", "null", "true", "", "\n", "\nx\n", "[1]", '"q"', "{}"])
        case 6 | 7:
            return [value_of(rng, depth + 1) for _ in range(rng.randrange(4))]
        case _:
            return {name_of(rng): value_of(rng, depth + 1) for _ in range(rng.randrange(4))}


def name_of(rng: random.Random) -> str:
    return rng.choice(["a", "b", "c", "d", "e-f", "g", "h i", "", ">", "ü", text_of(rng)])


def is_same(left: Any, right: Any) -> bool:
    """Equal, in the same order, and no boolean for a number."""
    return left == right and re.sub(r"\.0\b", "", json.dumps(left)) == re.sub(r"\.0\b", "", json.dumps(right))


@pytest.mark.parametrize("name", NAMES)
def test_a_parser_reads_what_it_writes(name: str) -> None:
    """``write_call`` stands in prompts of templates that show no calls: the model will imitate it."""
    make: Any = load_object(discover().by_family["tool_parsers"][name])
    prompt = make(ParserContext(tools=TOOLS)).instructions()
    assert "add" in prompt
    assert not re.search("FUNCTION|ARGUMENT|VALUE", prompt), "no placeholder that a model could repeat"
    plain = make(ParserContext(tools=TOOLS)).write_call("add", {"a": 1, "b": "x\ny"})
    assert "u003c" not in plain
    for seed in range(40):
        rng = random.Random(seed)
        tool = rng.choice(["f", "f", "get-it", "a.b-2"])
        context = ParserContext([{"name": tool, "parameters": SCHEMA} if seed % 2 else {"name": tool}])
        arguments = {name_of(rng): value_of(rng) for _ in range(rng.randrange(4))}
        text = make(context).write_call(tool, arguments)
        cuts = sorted(rng.randint(0, len(text)) for _ in range(5))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for pieces in ([text], parts, text):
            parser: ToolParser = make(context)
            content, _, calls = told([*map(parser.feed, pieces), parser.finish()])
            assert content == "", (seed, text)
            assert [call for call, _ in calls] == [tool], (seed, text)
            assert is_same(json.loads(calls[0][1]), arguments), (seed, text, calls)


FRAMES = {
    "qwen3-coder": "<tool_call>\n<function=f>\n{}</function>\n</tool_call>",
    "seed-oss": "<seed:tool_call>\n<function=f>\n{}</function>\n</seed:tool_call>",
    "glm-4.5": "<tool_call>f\n{}</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="f">\n{}</invoke>\n</minimax:tool_call>',
}
ARGUMENT = {
    "qwen3-coder": "<parameter={0}>\n{1}\n</parameter>\n",
    "seed-oss": "<parameter={0}>{1}</parameter>\n",
    "glm-4.5": "<arg_key>{0}</arg_key>\n<arg_value>{1}</arg_value>\n",
    "minimax-m2": '<parameter name="{0}">{1}</parameter>\n',
}
WRITTEN: list[tuple[str, Any, Any]] = [
    ("\n\nx\n\n", {"type": "string"}, "\n\nx\n\n"),
    ("\n", {"type": "string"}, "\n"),
    ("a </tool_call> b", {"type": "string"}, "a </tool_call> b"),
    (
        "</function>\n</tool_call>\n<tool_call>\n<function=f>",
        {},
        "</function>\n</tool_call>\n<tool_call>\n<function=f>",
    ),
    ("</invoke></minimax:tool_call></seed:tool_call>", {}, "</invoke></minimax:tool_call></seed:tool_call>"),
    ("a </parameter> </arg_value> b", {"type": "string"}, "a </parameter> </arg_value> b"),
    ("230.0", {"type": "integer"}, 230),
    ("230.0", {"type": "number"}, 230.0),
    ("5", {"$ref": "#/$defs/text"}, "5"),
    ("5", {"allOf": [{"$ref": "#/$defs/text"}]}, "5"),
    ("", {"type": "integer"}, None),
    ("", {"type": "string"}, ""),
    ("{'x': [1, True]}", {"type": "object"}, {"x": [1, True]}),
]


@pytest.mark.parametrize("name", FRAMES)
def test_values_are_read_as_they_are_written(name: str) -> None:
    make: Any = load_object(discover().by_family["tool_parsers"][name])
    for written, schema, value in WRITTEN:
        parameters = {"type": "object", "properties": {"x": schema}, "$defs": {"text": {"type": "string"}}}
        argument = ARGUMENT[name].format("x", written)
        text = FRAMES[name].format(argument + ARGUMENT[name].format("y", "1"))
        for pieces in ([text], text):
            parser: ToolParser = make(ParserContext([{"name": "f", "parameters": parameters}]))
            content, _, calls = told([*map(parser.feed, pieces), parser.finish()])
            wanted = {"y": 1} if value is None else {"x": value, "y": 1}
            assert (content, [call for call, _ in calls]) == ("", ["f"]), text
            assert json.dumps(json.loads(calls[0][1])) == json.dumps(wanted), text  # an integer is no float


def test_no_arguments_may_be_written_as_null() -> None:
    for arguments in ("null", '""', '"null"', "{}"):
        text = f'<tool_call>\n{{"name": "say", "arguments": {arguments}}}\n</tool_call>'
        for pieces in ([text], text):
            parser = HermesParser(ParserContext(tools=TOOLS))
            assert told([*map(parser.feed, pieces), parser.finish()]) == ("", "", [("say", "{}")]), text


def test_harmony_calls_pass_through_the_reasoning_parser() -> None:
    text = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"
    )
    context = ParserContext(tools=TOOLS, prompt_tail="<|start|>assistant")
    for pieces in ([text], list(text)):
        channels, tools = HarmonyChannels(context), HarmonyTools(context)
        split = [*map(channels.feed, pieces), channels.finish()]
        found = [*(tools.feed(part.content) for part in split), tools.finish()]
        assert "".join(part.reasoning for part in split) == "hm"
        assert "".join(part.content for part in found) == "I look."
        assert [delta.name for part in found for delta in part.tool_calls if delta.name] == ["add"]


def test_harmony_goes_on_in_the_channel_the_prompt_began() -> None:
    for channel, wanted in (("analysis", Parsed(reasoning="Hm.")), ("final", Parsed(content="Hm."))):
        parser = HarmonyChannels(ParserContext(prompt_tail=f"<|start|>assistant<|channel|>{channel}<|message|>"))
        found = [parser.feed("Hm."), parser.finish()]
        assert found[0] + found[1] == wanted


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("12", {"type": "string"}, "12"),
        ("12", {"type": "integer"}, 12),
        ("twelve", {"type": "integer"}, "twelve"),
        ("1.5", {"type": "number"}, 1.5),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("null", {"type": ["string", "null"]}, None),
        ("null", {"type": "string"}, "null"),
        ("12", {"type": ["string", "null"]}, "12"),
        ("12", {"anyOf": [{"type": "string"}, {"type": "integer"}]}, 12),
        ("12", {"enum": ["12", 3]}, "12"),
        ("3", {"enum": ["12", 3]}, 3),
        ("3", {"type": "string", "nullable": True}, "3"),
        ("null", {"type": "string", "nullable": True}, None),
        ("5", {"oneOf": [{"$ref": "#"}]}, 5),
        ("[2.0]", {"type": "array", "items": {"type": "integer"}}, [2]),
        ("TRUE", {"type": "boolean"}, True),
        ("007", {"type": "integer"}, 7),
        ('"a"', {"anyOf": [{"type": "string"}, {"type": "null"}]}, '"a"'),
        ("1", {"enum": ["1", "2"]}, "1"),
        ('["a"]', {"type": "array"}, ["a"]),
        ("12", None, 12),
        ("01", None, "01"),
        ("NaN", None, "NaN"),
        ("1e999", None, "1e999"),
        ("9" * 5000, None, "9" * 5000),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
    ],
)
def test_values_get_their_type_from_the_schema(text: str, schema: Any, value: Any) -> None:
    assert typed(text, schema) == value
    assert type(typed(text, schema)) is type(value)


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("f()", {}),
        ("f(a=1, b=-2.5e3, c=1_000,)", {"a": 1, "b": -2500.0, "c": 1000}),
        ("f(a=True, b=false, c=None, d=null)", {"a": True, "b": False, "c": None, "d": None}),
        ("f( a = [1, (2, 'x'), {}], b={'k': {1: 'v'}} )", {"a": [1, [2, "x"], {}], "b": {"k": {"1": "v"}}}),
        (r"f(a='it\'s\n\x41\u00e9\q', b=r'\n')", {"a": "it's\nAé\\q", "b": "\\n"}),
        ("f(a='x' \"y\")", {"a": "xy"}),
        ("f(1)", None),
        ("f(a=g())", None),
        ("f(a=__import__)", None),
        ("f(a=1 + 1)", None),
        ("f(a=1)(b=2)", None),
        ("f(a=" + "[" * 500 + "]" * 500 + ")", None),
        ("f(a=1e999)", None),
        ("f(a='open)", None),
    ],
)
def test_python_calls_are_read_without_python(text: str, arguments: dict[str, Any] | None) -> None:
    found = read_python_call(text)
    assert (json.loads(found[1]) if found is not None else None) == arguments


def test_half_a_surrogate_pair_can_be_sent() -> None:
    """Arguments are sent as UTF-8, which has no such thing: they keep the escape."""
    parser = HermesParser(ParserContext())
    found = parser.feed('<tool_call>{"arguments": {"x": "\\ud83d"}, "name": "say"}</tool_call>')
    assert found.tool_calls[0].arguments.encode() == b'{"x": "\\ud83d"}'


def test_many_calls_in_one_piece_take_linear_time() -> None:
    """Each step adds to what was found: copying it all each time would make this quadratic."""
    text = '<tool_call>{"name": "say", "arguments": {}}</tool_call>' * 20_000
    started = time.process_time()
    found = HermesParser(ParserContext(tools=TOOLS)).feed(text)
    assert sum(delta.name is not None for delta in found.tool_calls) == 20_000
    assert time.process_time() - started < 5
