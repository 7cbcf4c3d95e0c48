"""Every format of tool calls and of thinking keeps its contract, on texts as the models write them."""

# ruff: noqa: RUF001 (some marks are made of full-width bars)

from __future__ import annotations

from fwk_kit.testing import ReasoningParserSuite, ToolParserSuite

ADD = ("add", '{"a": 1, "b": [2, {"c": "}"}]}')
ARGUMENTS = ADD[1]
SAY = ("say", '{"text": "Grüße, \\"<b>\\""}')

WEATHER = {
    "name": "add",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "zip": {"type": ["string", "null"]},
            "more": {"type": "object"},
        },
    },
}
TYPED = ("add", '{"city": "01", "days": 3, "exact": true, "zip": "12", "more": {"x": [1, "2"]}}')


def called(*calls: tuple[str, str], text: str = "") -> tuple[str, str, list[tuple[str, str]]]:
    """What is read of a sample: its text, no thoughts, and its calls."""
    return text, "", list(calls)


class TestLlama3(ToolParserSuite):
    plugin = "llama3-json"
    samples = {
        f'{{"name": "add", "parameters": {ARGUMENTS}}}': called(ADD),
        f'<|python_tag|>{{"name": "add", "parameters": {ARGUMENTS}}}; {{"name": "say", "parameters": {{}}}}': called(
            ADD, ("say", "{}")
        ),
        f'<|python_start|>{{"name": "add", "parameters": {ARGUMENTS}}}<|python_end|>': called(ADD),
        '{"type": "function", "name": "say", "parameters": {"text": "a"}}': called(("say", '{"text": "a"}')),
    }


class TestPythonic(ToolParserSuite):
    plugin = "pythonic"
    samples = {
        '[add(a=1, b=[2, {"c": "}"}])]': called(ADD),
        "[add(a=-1.5, b=None, c=True), say()]": called(("add", '{"a": -1.5, "b": null, "c": true}'), ("say", "{}")),
        "<|python_start|>[say(text='it\\'s )(', more=('a', 'b'))]<|python_end|>": called(
            ("say", '{"text": "it\'s )(", "more": ["a", "b"]}')
        ),
        "Let me see.\n<|python_start|>[say(text='x\\n')]<|python_end|>": called(
            ("say", '{"text": "x\\n"}'), text="Let me see."
        ),
    }


class TestLfm2(ToolParserSuite):
    plugin = "lfm2"
    samples = {
        '<|tool_call_start|>[add(a=1, b=[2, {"c": "}"}])]<|tool_call_end|>Adding.': called(ADD, text="Adding."),
        '<|tool_call_start|>[say(text="a"), say(text="b")]<|tool_call_end|>': called(
            ("say", '{"text": "a"}'), ("say", '{"text": "b"}')
        ),
    }


class TestOlmo(ToolParserSuite):
    plugin = "olmo"
    samples = {
        '<function_calls>\nadd(a=1, b=[2, {"c": "}"}])\n</function_calls>': called(ADD),
        "I will.\n<function_calls>\nadd(a=null, b=true)\nsay(text='x')\n</function_calls>": called(
            ("add", '{"a": null, "b": true}'), ("say", '{"text": "x"}'), text="I will."
        ),
    }


class TestPhi4(ToolParserSuite):
    plugin = "phi-4"
    samples = {
        f'<|tool_call|>[{{"name": "add", "arguments": {ARGUMENTS}}}]<|/tool_call|>': called(ADD),
        f'<|tool_call|>{{"name": "add", "arguments": {ARGUMENTS}}}<|/tool_call|><|tool_call|>{{"name": "say"}}': called(
            ADD, ("say", "{}")
        ),
        f'functools[{{"name": "add", "arguments": {ARGUMENTS}}}]': called(ADD),
    }


class TestGranite(ToolParserSuite):
    plugin = "granite"
    samples = {
        f'<|tool_call|>[{{"name": "add", "arguments": {ARGUMENTS}}}]': called(ADD),
        f'<tool_call>[{{"arguments": {ARGUMENTS}, "name": "add"}}, {{"name": "say", "arguments": {{}}}}]': called(
            ADD, ("say", "{}")
        ),
    }


class TestGranite20b(ToolParserSuite):
    plugin = "granite-20b"
    samples = {
        f'<function_call> {{"name": "add", "arguments": {ARGUMENTS}}}': called(ADD),
        f'<function_call> {{"name": "add", "arguments": {ARGUMENTS}}}\n<function_call> {{"name": "say"}}': called(
            ADD, ("say", "{}")
        ),
    }


class TestInternLM(ToolParserSuite):
    plugin = "internlm"
    samples = {
        f'I add.<|action_start|><|plugin|>\n{{"name": "add", "parameters": {ARGUMENTS}}}<|action_end|>\n': called(
            ADD, text="I add."
        ),
        '<|action_start|><|plugin|>{"name": "say", "arguments": {"text": "Grüße, \\"<b>\\""}}<|action_end|>': called(
            SAY
        ),
    }


class TestMiniMax(ToolParserSuite):
    plugin = "minimax"
    samples = {
        f'<tool_calls>\n{{"name": "add", "arguments": {ARGUMENTS}}}\n{{"name": "say"}}\n</tool_calls>': called(
            ADD, ("say", "{}")
        ),
        'Well.\n\n<tool_calls>\n{"name": "say", "arguments": {}}\n</tool_calls>\nDone.': called(
            ("say", "{}"), text="Well.\nDone."
        ),
    }


class TestHunyuan(ToolParserSuite):
    plugin = "hunyuan"
    samples = {
        f'<tool_calls>[{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "say"}}]</tool_calls>': called(
            ADD, ("say", "{}")
        ),
        '<tool_calls>[{"name": "say", "arguments": {}}]</tool_calls>': called(("say", "{}")),
    }


class TestNemotron(ToolParserSuite):
    plugin = "nemotron"
    samples = {
        f'<TOOLCALL>[{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "say"}}]</TOOLCALL>': called(
            ADD, ("say", "{}")
        ),
    }


class TestMistral(ToolParserSuite):
    plugin = "mistral"
    samples = {
        f'[TOOL_CALLS][{{"name": "add", "arguments": {ARGUMENTS}}}, {{"name": "say", "arguments": {{}}}}]': called(
            ADD, ("say", "{}")
        ),
        f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}, "id": "9Ae3bDc2F"}}]': called(ADD),
        f"I add.[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]say[ARGS]{{}}": called(ADD, ("say", "{}"), text="I add."),
        f"[TOOL_CALLS]add[CALL_ID]9Ae3bDc2F[ARGS]{ARGUMENTS}": called(ADD),
        f"[TOOL_CALLS]add{ARGUMENTS}[TOOL_CALLS]say{{}}": called(ADD, ("say", "{}")),
    }


class TestDeepSeekV3(ToolParserSuite):
    plugin = "deepseek-v3"
    samples = {
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>": called(ADD),
        "I add.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>": called(ADD, ("say", "{}"), text="I add."),
    }


class TestDeepSeekV31(ToolParserSuite):
    plugin = "deepseek-v3.1"
    samples = {
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>": called(ADD),
        f"Yes.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>say<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>": called(
            ADD, ("say", "{}"), text="Yes."
        ),
    }


class TestDeepSeekV32(ToolParserSuite):
    plugin = "deepseek-v3.2"
    samples = {
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">1'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="b" string="false">[2, {"c": "}"}]</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>": called(ADD),
        'Wait.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="say">\n<｜DSML｜parameter name="text" string="true">'
        '12</｜DSML｜parameter>\n</｜DSML｜invoke>\n<｜DSML｜invoke name="add">\n</｜DSML｜invoke>\n'
        "</｜DSML｜function_calls>": called(("say", '{"text": "12"}'), ("add", "{}"), text="Wait."),
    }


class TestKimiK2(ToolParserSuite):
    plugin = "kimi-k2"
    samples = {
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>": called(ADD),
        "I do both.<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|>\n<|tool_call_begin|>say:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>": called(ADD, ("say", "{}"), text="I do both."),
    }


class TestGptOss(ToolParserSuite):
    plugin = "gpt-oss"
    prompt_tail = "<|start|>assistant"
    samples = {
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>": called(ADD),
        f" to=functions.add<|channel|>commentary json<|message|>{ARGUMENTS}": called(ADD),
        "<|channel|>commentary to=functions.say <|constrain|>json<|message|>{}<|call|><|start|>assistant"
        f"<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>": called(
            ("say", "{}"), ADD
        ),
        "<|channel|>final<|message|>Hello.": ("<|channel|>final<|message|>Hello.", "", []),
    }


class TestQwen3Coder(ToolParserSuite):
    plugin = "qwen3-coder"
    tools = (WEATHER, {"name": "say"})
    samples = {
        "<tool_call>\n<function=add>\n<parameter=city>\n01\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=zip>\n12\n</parameter>\n"
        '<parameter=more>\n{"x": [1, "2"]}\n</parameter>\n</function>\n</tool_call>': called(TYPED),
        "I say it.\n\n<tool_call>\n<function=say>\n<parameter=text>\nif a < b:\n    c()\n\n</parameter>\n</function>\n"
        "</tool_call>\n<tool_call>\n<function=say>\n</function>\n</tool_call>": called(
            ("say", '{"text": "if a < b:\\n    c()\\n"}'), ("say", "{}"), text="I say it."
        ),
        "<function=say>\n<parameter=text>\na\n<parameter=more>\nb\n</function>\n</tool_call>": called(
            ("say", '{"text": "a", "more": "b"}')
        ),
    }


class TestSeedOss(ToolParserSuite):
    plugin = "seed-oss"
    samples = {
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n"
        '<parameter=b>[2, {"c": "}"}]</parameter>\n</function>\n</seed:tool_call>': called(ADD),
    }


class TestGlm45(ToolParserSuite):
    plugin = "glm-4.5"
    tools = (WEATHER, {"name": "say"})
    samples = {
        "<tool_call>add\n<arg_key>city</arg_key>\n<arg_value>01</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n<arg_key>zip</arg_key>\n"
        "<arg_value>12</arg_value>\n"
        '<arg_key>more</arg_key>\n<arg_value>{"x": [1, "2"]}</arg_value>\n</tool_call>': called(TYPED),
        "Both.\n<tool_call>say<arg_key>text</arg_key><arg_value>a\nb</arg_value></tool_call>"
        "<tool_call>say</tool_call>": called(("say", '{"text": "a\\nb"}'), ("say", "{}"), text="Both."),
    }


class TestMiniMaxM2(ToolParserSuite):
    plugin = "minimax-m2"
    samples = {
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
        '<parameter name="b">[2, {"c": "}"}]</parameter>\n</invoke>\n</minimax:tool_call>': called(ADD),
        'Both.\n<minimax:tool_call>\n<invoke name="say">\n<parameter name="text">a</parameter>\n</invoke>\n'
        "<invoke name=say>\n</invoke>\n</minimax:tool_call>\n": called(
            ("say", '{"text": "a"}'), ("say", "{}"), text="Both."
        ),
    }


class TestDeepSeekV31Thinking(ReasoningParserSuite):
    plugin = "deepseek-v3.1"
    prompt_tail = "<｜Assistant｜><think>"
    samples = {"hm</think>Yes.": ("Yes.", "hm", [])}


class TestGlm45Thinking(ReasoningParserSuite):
    plugin = "glm-4.5"
    samples = {
        "\n<think>hm</think>\nYes.": ("Yes.", "hm", []),
        "\n<think></think>\nYes.": ("Yes.", "", []),
    }


class TestKimiK2Thinking(ReasoningParserSuite):
    plugin = "kimi-k2"
    samples = {
        "<think>hm</think>Yes.": ("Yes.", "hm", []),
        "<think>hm<|tool_calls_section_begin|>x": ("<|tool_calls_section_begin|>x", "hm", []),
    }


class TestKimiThinking(ReasoningParserSuite):
    plugin = "kimi"
    samples = {"◁think▷hm\n◁/think▷Yes.": ("Yes.", "hm", [])}


class TestMiniMaxThinking(ReasoningParserSuite):
    plugin = "minimax"
    samples = {"hm\n</think>\n\nYes.": ("Yes.", "hm", []), "<think>hm</think>Yes.": ("Yes.", "hm", [])}


class TestStepThinking(ReasoningParserSuite):
    plugin = "step3"
    samples = {"hm\n</think>\nYes.": ("Yes.", "hm", [])}


class TestMistralThinking(ReasoningParserSuite):
    plugin = "mistral"
    samples = {
        "[THINK]hm[/THINK]Yes.": ("Yes.", "hm", []),
        "<think>\nhm\n</think>\nYes.": ("Yes.", "hm", []),
        "Yes.[THINK]": ("Yes.[THINK]", "", []),
    }


class TestGraniteThinking(ReasoningParserSuite):
    plugin = "granite"
    samples = {
        "Here is my thought process:\nhm\n\nHere is my response:\nYes.": ("Yes.", "hm", []),
        "Here's my thought process: hm Here's my response: Yes.": ("Yes.", "hm", []),
    }


class TestGranite33Thinking(ReasoningParserSuite):
    plugin = "granite-3.3"
    samples = {
        "<think>hm</think><response>Yes.</response>": ("Yes.", "hm", []),
        "<think>hm</think>Yes.": ("Yes.", "hm", []),
    }


class TestHunyuanThinking(ReasoningParserSuite):
    plugin = "hunyuan"
    samples = {
        "<think>\nhm\n</think>\n<answer>\nYes.\nAnd </answers>\n</answer>": ("Yes.\nAnd </answers>", "hm", []),
        "<think>hm</think>\nYes.\n": ("Yes.\n", "hm", []),
        "<think>hm</think><answer>cut": ("cut", "hm", []),
    }


class TestGptOssThinking(ReasoningParserSuite):
    plugin = "gpt-oss"
    prompt_tail = "<|start|>assistant"
    samples = {
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>": (
            "Yes.",
            "hm",
            [],
        ),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        "<|constrain|>json<|message|>{}<|call|>": (
            "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>",
            "hm",
            [],
        ),
        "<|channel|>commentary<|message|>First I look.<|end|>": ("First I look.", "", []),
    }
