"""Tools, thinking and constrained output in the OpenAI dialect, against a scripted model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fwk.errors import InvalidRequest
from fwk.interfaces.parser import ParserContext
from fwk_parsers.hermes.parser import HermesParser
from fwk_parsers.json.parser import JsonParser
from fwk_parsers.think.parser import ThinkParser
from fwk_parsers.xml_parameters.parser import QwenCoderParser

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
KINDS = frozenset(
    {"json_object", "json_schema", "regex", "choice", "ebnf", "tagged", "structural_tag", "calls", "free_calls"}
)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = (
    'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln 🙂"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = ['{"city": "Köln 🙂"}', "{}"]


@pytest.fixture
def able(frontend):
    """The frontend with a grammar backend and parsers, and grammars from the first token on; its model says TEXT."""
    frontend.grammar_kinds = KINDS
    frontend.grammar_in_reasoning = True
    frontend.tool_parser = lambda tools, tail="", is_forced=False: HermesParser(ParserContext(tools, tail))
    frontend.reasoning_parser = lambda tail="": ThinkParser(ParserContext((), tail))
    return frontend


@pytest.fixture
def says(able, fake):
    def says(text: str, finish: str = "stop") -> None:
        able.script = lambda item: fake.interleaved(
            *(fake.deltas_of(item, text, index=i, finish=finish) for i in range(item.n))
        )

    return says


def calls_of(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]


async def test_calls_are_in_the_message(api, able, says):
    says(TEXT)
    reply = await api.chat(tools=TOOLS, n=2)
    for choice in reply["choices"]:
        message = choice["message"]
        assert (message["content"], choice["finish_reason"]) == ("Let me look.", "tool_calls")
        assert calls_of(message) == [("get_weather", ARGUMENTS[0]), ("get_time", ARGUMENTS[1])]
    ids = [call["id"] for choice in reply["choices"] for call in choice["message"]["tool_calls"]]
    assert len(set(ids)) == 4
    assert able.text.seen.tools == TOOLS
    assert able.items[0].sampling.grammar is None


async def test_tools_as_other_apis_write_them(api, able, says):
    """Editors send Responses' and Anthropic's shapes to chat completions."""
    says(TEXT)
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    named = [{("input_schema" if key == "parameters" else key): value for key, value in tool.items()} for tool in flat]
    for tools in (flat, named):
        assert len(calls_of((await api.chat(tools=tools))["choices"][0]["message"])) == 2
        assert able.text.seen.tools == TOOLS


async def test_content_is_null_when_there_are_only_calls(api, says):
    says(TEXT.partition("\n")[2])
    message = (await api.chat(tools=TOOLS))["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2


async def test_text_without_a_call_is_the_answer(api, says):
    says("No <tool_call>{}</tool_call> here ")
    choice = (await api.chat(tools=TOOLS))["choices"][0]
    assert choice["message"]["content"] == "No <tool_call>{}</tool_call> here "
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"
    says(TEXT)
    choice = (await api.chat(tools=TOOLS, tool_choice="none"))["choices"][0]
    assert choice["message"]["content"] == TEXT


async def test_a_call_cut_short_ends_by_length(api, says):
    says(TEXT[:70], finish="length")
    choice = (await api.chat(tools=TOOLS))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS[0].startswith(calls_of(choice["message"])[0][1])


async def test_a_stream_has_id_type_and_name_once_and_then_arguments(api, says):
    says(TEXT)
    chunks = await api.chat_stream(tools=TOOLS, stream_options={"include_usage": True})
    content, calls, reasons = "", {}, []
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        content += choice["delta"].get("content") or ""
        reasons.append(choice["finish_reason"])
        for entry in choice["delta"].get("tool_calls", []):
            if entry["index"] not in calls:
                assert entry["id"].startswith("call_")
                assert entry["type"] == "function"
                calls[entry["index"]] = [entry["function"]["name"], ""]
            else:
                assert set(entry) == {"index", "function"}
                assert set(entry["function"]) == {"arguments"}
            calls[entry["index"]][1] += entry["function"]["arguments"]
    assert content == "Let me look."
    assert calls == {0: ["get_weather", ARGUMENTS[0]], 1: ["get_time", ARGUMENTS[1]]}
    assert reasons == [None] * (len(reasons) - 1) + ["tool_calls"]
    assert len(chunks) > 20
    assert chunks[-1]["usage"]["completion_tokens"] == len(TEXT.encode())


async def test_one_call_when_calls_may_not_be_parallel(api, says):
    says(TEXT)
    message = (await api.chat(tools=TOOLS, parallel_tool_calls=False))["choices"][0]["message"]
    assert calls_of(message) == [("get_weather", ARGUMENTS[0])]
    chunks = await api.chat_stream(tools=TOOLS, parallel_tool_calls=False)
    assert {e["index"] for c in chunks for e in c["choices"][0]["delta"].get("tool_calls", [])} == {0}


@pytest.mark.parametrize(
    ("body", "names", "is_many"),
    [
        ({"tool_choice": "required"}, ["get_weather", "get_time"], False),
        ({"tool_choice": "required", "parallel_tool_calls": True}, ["get_weather", "get_time"], True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, ["get_weather", "get_time"], False),
        ({"tool_choice": {"type": "function", "function": {"name": "get_time"}}}, ["get_time"], False),
    ],
)
async def test_a_call_that_must_be_made_is_a_grammar(api, able, says, body, names, is_many):
    says(TEXT)
    choice = (await api.chat(tools=TOOLS, **body))["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    grammar = able.items[0].sampling.grammar
    source = json.loads(grammar.source)
    assert (grammar.kind, source["is_many"], len(source["tags"])) == ("tagged", is_many, len(names))
    assert all(name in tag["begin"] for name, tag in zip(names, source["tags"], strict=True))
    assert able.text.seen.tools == TOOLS


async def test_the_sdk_reads_streamed_calls(sdk, says):
    says(TEXT)
    message = {"role": "user", "content": "Hi"}
    async with sdk.chat.completions.stream(model="tiny", messages=[message], tools=TOOLS) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert "tool_calls.function.arguments.done" in kinds
    calls = final.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == list(
        zip(["get_weather", "get_time"], ARGUMENTS, strict=True)
    )
    assert final.choices[0].finish_reason == "tool_calls"
    whole = await sdk.chat.completions.create(model="tiny", messages=[message], tools=TOOLS, tool_choice="required")
    assert [call.function.name for call in whole.choices[0].message.tool_calls] == ["get_weather", "get_time"]
    back = whole.choices[0].message.model_dump(exclude_none=True)
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "5"} for call in back["tool_calls"]]
    await sdk.chat.completions.create(model="tiny", messages=[message, back, *results], tools=TOOLS)


async def test_thinking_is_told_apart(api, able, says):
    says("<think>\nHm ü.\n</think>\n\nYes.")
    reply = await api.chat()
    assert reply["choices"][0]["message"]["reasoning_content"] == "Hm ü."
    assert reply["choices"][0]["message"]["content"] == "Yes."
    details = reply["usage"]["completion_tokens_details"]
    assert details == {"reasoning_tokens": len("<think>\nHm ü.\n</think>\n\n".encode())}
    chunks = await api.chat_stream(stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm ü."
    assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
    assert chunks[-1]["usage"]["completion_tokens_details"] == details
    silent = (await api.chat(include_reasoning=False))["choices"][0]["message"]
    assert silent["content"] == "Yes."
    assert "reasoning_content" not in silent
    deltas = [chunk["choices"][0]["delta"] for chunk in await api.chat_stream(include_reasoning=False)]
    assert not any("reasoning_content" in delta for delta in deltas)
    says("Yes.")
    reply = await api.chat()
    assert reply["choices"][0]["message"]["reasoning_content"] is None
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_calls_after_thinking(api, says):
    says(f"<think>a <tool_call> maybe</think>{TEXT}")
    message = (await api.chat(tools=TOOLS))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("a <tool_call> maybe", "Let me look.")
    assert len(calls_of(message)) == 2


async def test_a_template_may_open_the_thinking(api, able, says):
    able.text.render_chat = lambda messages, **_: "<bos>[assistant]<think>\n"
    says("Hm.</think>Yes.")
    assert (await api.chat())["choices"][0]["message"]["reasoning_content"] == "Hm."
    says('{"a": 1}')  # a constrained answer is all answer
    message = (await api.chat(response_format={"type": "json_object"}))["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'
    assert "reasoning_content" not in message


async def test_a_grammar_binds_the_answer_behind_the_thinking(api, able, says):
    able.grammar_in_reasoning, able.grammar_kinds = False, KINDS | {"delayed"}
    tool = {"type": "function", "function": {"name": "add"}}
    format_ = {"response_format": {"type": "json_object"}}
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    for body, kind, text in (
        (format_, "json_object", '{"a": 1}'),
        ({"tools": [tool], "tool_choice": "required"}, "tagged", call),
    ):
        says(f"<think>\nHm.\n</think>\n\n{text}")
        message = (await api.chat(**body))["choices"][0]["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["content"] == (text if kind == "json_object" else None)
        grammar = able.items[-1].sampling.grammar
        assert grammar.kind == "delayed"
        source = json.loads(grammar.source)
        assert ("add" in source.pop("source")) == (kind == "tagged")
        marks = {"opens": list(b"<think>"), "closes": [list(b"</think>")], "follows": []}
        assert source == {"kind": kind, **marks}
    for tail, opens in (("<think>\n", []), ("<think>\n\n</think>\n\n", None)):
        able.text.render_chat = lambda messages, tail=tail, **_: f"<bos>[assistant]{tail}"
        says("Hm.</think>\n{}" if opens == [] else "{}")
        message = (await api.chat(**format_))["choices"][0]["message"]
        assert message["content"] == "{}"
        grammar = able.items[-1].sampling.grammar
        assert (json.loads(grammar.source)["opens"] if grammar.kind == "delayed" else None) == opens


async def test_logprobs_and_ids_go_with_parsed_text(api, says):
    says(TEXT)
    chunks = await api.chat_stream(tools=TOOLS, logprobs=True, return_token_ids=True)
    assert sum(len(chunk["choices"][0].get("token_ids", [])) for chunk in chunks) == len(TEXT.encode())
    tokens = [entry for c in chunks for entry in (c["choices"][0]["logprobs"] or {}).get("content", [])]
    assert len(tokens) == len(TEXT.encode())


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


CONSTRAINTS = [
    ({"response_format": {"type": "json_object"}}, "json_object", ""),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA, "strict": True},
            }
        },
        "json_schema",
        SCHEMA,
    ),
    ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", SCHEMA),
    ({"structured_outputs": {"regex": "a+", "json": None}}, "regex", "a+"),
    ({"structured_outputs": {"choice": ["a", "é"]}}, "choice", ["a", "é"]),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "ebnf", 'root ::= "a"'),
    ({"structured_outputs": {"json_object": True}}, "json_object", ""),
    ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
    ({"guided_regex": "a+"}, "regex", "a+"),
    ({"guided_choice": ["a"]}, "choice", ["a"]),
    ({"guided_grammar": 'start: "a"'}, "ebnf", 'start: "a"'),
    ({"json_schema": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
    ({"regex": "a+"}, "regex", "a+"),
    ({"ebnf": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
]


async def test_every_name_of_a_constraint(api, able):
    for body, kind, source in CONSTRAINTS:
        await api.chat(**body)
        await api.complete(**body)
        for item in able.items[-2:]:
            grammar = item.sampling.grammar
            assert grammar.kind == kind, body
            assert (grammar.source if isinstance(source, str) else json.loads(grammar.source)) == source, body


async def test_a_wrong_grammar_is_a_400_with_the_name_the_client_gave(api, able):
    def check(item):
        raise InvalidRequest("the grammar cannot be compiled: unclosed group", "grammar")

    able.check = check
    for path, extra in ((CHAT, {"messages": [{"role": "user", "content": "Hi"}]}), (COMPLETIONS, {"prompt": "Hi"})):
        for body, param in (
            ({"guided_regex": "("}, "guided_regex"),
            ({"structured_outputs": {"regex": "("}, "stream": True}, "structured_outputs.regex"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        ):
            error = await api.refused(path, extra | body)
            assert error["param"] == param
            assert "unclosed group" in error["message"]
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "tool_choice": "required"}
    assert (await api.refused(CHAT, body))["param"] == "tools"
    assert able.num_blocking == 7  # never on the event loop


STRUCTURE = {"begin": "<f>", "schema": {"type": "null"}, "end": "</f>"}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "structural_tag", "structures": [STRUCTURE], "triggers": ["<"]}},
        {"structural_tag": json.dumps({"structures": [STRUCTURE], "triggers": ["<"]})},
        {"structured_outputs": {"structural_tag": {"structures": [STRUCTURE], "triggers": ["<"]}}},
        {"guided_structural_tag": {"structures": [STRUCTURE], "triggers": ["<"]}},
        {
            "response_format": {
                "type": "structural_tag",
                "format": {
                    "type": "triggered_tags",
                    "triggers": ["<"],
                    "tags": [
                        {
                            "begin": "<f>",
                            "content": {"type": "json_schema", "json_schema": {"type": "null"}},
                            "end": "</f>",
                        }
                    ],
                },
            }
        },
    ],
    ids=lambda body: next(iter(body)),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_json_may_be_asked_for_after_triggers(client, able, path, body):
    start = {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    reply = await client.post(path, json=start | body)
    assert reply.status_code == 200, reply.text
    grammar = able.items[-1].sampling.grammar
    assert grammar.kind == "structural_tag"
    assert json.loads(grammar.source) == {"structures": [STRUCTURE], "triggers": ["<"]}


WRONG = [
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice"),
    ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice[1]"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"nothing_such": "x"}}, "structured_outputs.nothing_such"),
    ({"structural_tag": {"triggers": ["<"]}}, "structural_tag.structures"),
    ({"structural_tag": {"triggers": ["<"], "structures": []}}, "structural_tag"),
    ({"structural_tag": {"triggers": [""], "structures": [STRUCTURE]}}, "structural_tag.triggers"),
    ({"structural_tag": {"triggers": ["@"], "structures": [STRUCTURE]}}, "structural_tag.structures[0].begin"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}}, "response_format"),
    ({"structured_outputs": {"regex": "a", "json": {"type": "object"}}}, "structured_outputs.json"),
    ({"structured_outputs": "x"}, "structured_outputs"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"regex": 5}, "regex"),
    ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
    ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
    ({"tools": TOOLS, "tool_choice": {"function": {"name": "get_time"}}}, "tool_choice.type"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"function": {"name": f"f{i}"}} for i in range(129)]}, "tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
]


async def test_what_cannot_be_is_refused_by_name(api, able):
    start = {"messages": [{"role": "user", "content": "Hi"}]}
    for body, param in WRONG:
        for stream in ({}, {"stream": True}):
            assert (await api.refused(CHAT, start | body | stream))["param"] == param, body
    assert not able.items
    assert (await api.post(CHAT, start | {"structured_outputs": []})).status_code == 200


async def test_a_call_cannot_be_forced_without_a_grammar_backend(api, able, says):
    able.grammar_kinds = frozenset({"regex"})
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS, "tool_choice": "required"}
    assert (await api.refused(CHAT, body))["param"] == "tool_choice"
    says(TEXT)
    assert (await api.chat(tools=TOOLS))["choices"][0]["finish_reason"] == "tool_calls"


CALL = '{"name": "get_weather", "arguments": {"city": "Bonn"}}'


@pytest.fixture
def toolless(frontend):
    """A server whose chat template shows no tools, and whose parser is the fallback."""
    frontend.grammar_kinds = KINDS
    frontend.text.shows_tools = False
    frontend.tool_parser = lambda tools, tail="", is_forced=False: JsonParser(ParserContext(tools, tail))
    return frontend


async def test_a_template_without_tools_gets_them_in_a_system_message(api, toolless, fake):
    toolless.script = lambda item: [[delta] for delta in fake.deltas_of(item, CALL)]
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        choice = (await api.chat(messages=[*system, {"role": "user", "content": "Hi"}], tools=TOOLS))["choices"][0]
        assert calls_of(choice["message"]) == [("get_weather", '{"city": "Bonn"}')]
        first = toolless.text.seen.messages[0]
        assert first["role"] == "system"
        assert first["content"].startswith("Be brief." if system else "You may call")
        assert '"get_weather"' in first["content"]
        assert '"get_time"' in first["content"]
        assert toolless.text.seen.tools is None


@pytest.mark.parametrize(
    "asked",
    [
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"tools": TOOLS[:1], "tool_choice": "required"},
    ],
)
async def test_one_forced_function_is_asked_for_its_arguments_there(api, toolless, fake, asked):
    """Nothing but the arguments is written: what small models repeat of a call's form never becomes one of them."""
    toolless.script = lambda item: [[delta] for delta in fake.deltas_of(item, '{"city": "Bonn"}')]
    choice = (await api.chat(**asked))["choices"][0]
    assert calls_of(choice["message"]) == [("get_weather", '{"city": "Bonn"}')]
    assert choice["finish_reason"] == "tool_calls"
    grammar = toolless.items[0].sampling.grammar
    assert grammar.kind == "json_schema"
    assert json.loads(grammar.source)["properties"] == TOOLS[0]["function"]["parameters"]["properties"]
    told = toolless.text.seen.messages[0]["content"]
    assert "city" in told
    assert "get_time" not in told
    chunks = await api.chat_stream(**asked)
    pieces = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])]
    assert [call["function"]["name"] for call in pieces if "name" in call["function"]] == ["get_weather"]
    assert "".join(call["function"]["arguments"] for call in pieces) == '{"city": "Bonn"}'
    await api.chat(**asked | {"tool_choice": "required", "tools": TOOLS})
    assert toolless.items[-1].sampling.grammar.kind == "tagged", "which of two is said in front"


async def test_earlier_calls_and_results_are_plain_messages_there(api, toolless):
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    written = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": CALL},
        {"role": "user", "content": "Result of get_weather: rain"},
    ]
    await api.chat(messages=[*turns, {"role": "assistant", "content": "Rain."}, {"role": "user", "content": "Thanks"}])
    assert toolless.text.seen.messages[:3] == written
    await api.chat(messages=turns, tools=TOOLS, tool_choice="required")
    assert toolless.text.seen.messages[1:] == written


async def test_a_result_at_the_end_is_something_to_answer_with_there(api, toolless):
    """The call in front of it is not written out: the default model repeated it 25 times of 25."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Bonn"}'}}
    other = {"id": "c2", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    ]
    for tools in ({}, {"tools": TOOLS}):
        await api.chat(messages=turns, **tools)
        [said] = toolless.text.seen.messages[bool(tools) :]
        assert said["role"] == "user"
        assert said["content"].startswith("Hi\n\nResult of get_weather (city: Bonn): rain\nResult of get_time: noon\n")
        assert "{" not in said["content"]


async def test_forced_calls_do_not_depend_on_a_parser(api, toolless):
    def parser(tools, tail="", is_forced=False):
        return JsonParser(ParserContext(tools, tail)) if is_forced else None

    toolless.tool_parser = parser
    toolless.text.shows_tools = True
    await api.chat(tools=TOOLS, tool_choice="required")
    await api.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "get_time"}})
    assert [len(json.loads(item.sampling.grammar.source)["tags"]) for item in toolless.items] == [2, 1]
    assert (await api.refused(CHAT, {"messages": MESSAGES, "tools": TOOLS}))["param"] == "tools"


async def test_tools_and_a_schema_are_one_grammar(api, able):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    await api.chat(tools=TOOLS, response_format=wanted)
    tags = json.loads(able.items[0].sampling.grammar.source)["tags"]
    assert [tag["begin"] for tag in tags][2:] == [""]
    assert tags[2]["schema"] == schema


async def test_allowed_tools_are_a_choice_of_them(api, able):
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [TIME]}}
    await api.chat(tools=TOOLS, tool_choice=some)
    assert len(json.loads(able.items[0].sampling.grammar.source)["tags"]) == 1
    some["allowed_tools"]["mode"] = "auto"
    await api.chat(tools=TOOLS, tool_choice=some)
    assert able.text.seen.tools == [TIME]


async def test_functions_of_old_are_answered_as_function_call(api, says):
    says(TEXT)
    functions = [tool["function"] for tool in TOOLS]
    choice = (await api.chat(functions=functions))["choices"][0]
    assert choice["message"]["function_call"] == {"name": "get_weather", "arguments": ARGUMENTS[0]}
    assert choice["finish_reason"] == "function_call"
    chunks = await api.chat_stream(functions=functions)
    news = [chunk["choices"][0]["delta"].get("function_call") for chunk in chunks]
    news = [each for each in news if each]
    assert news[0]["name"] == "get_weather"
    assert "".join(each["arguments"] for each in news) == ARGUMENTS[0]


TIME_CALL = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
ASKED = {"role": "assistant", "content": "", "tool_calls": [TIME_CALL]}
TIME_RESULT = {"role": "tool", "content": "noon", "tool_call_id": "c1"}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([*MESSAGES, TIME_RESULT], "messages[1]"),
        ([*MESSAGES, TIME_RESULT, ASKED], "messages[1]"),
        ([*MESSAGES, ASKED, TIME_RESULT | {"tool_call_id": "c2"}], "messages[2].tool_call_id"),
    ],
)
async def test_a_result_without_its_call_is_refused(api, able, messages, param):
    assert (await api.refused(CHAT, {"messages": messages}))["param"] == param


async def test_results_of_calls_are_taken(api, able, says):
    says("It is noon.")
    unnamed = {"role": "assistant", "content": "", "tool_calls": [{k: v for k, v in TIME_CALL.items() if k != "id"}]}
    for messages in ([*MESSAGES, ASKED, TIME_RESULT, TIME_RESULT], [*MESSAGES, unnamed, TIME_RESULT]):
        reply = await api.post(CHAT, {"messages": messages})
        assert reply.status_code == 200, reply.text


async def test_parameters_that_are_no_schema_are_refused(api, able, says):
    def body(parameters):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        return {"messages": MESSAGES, "tools": [tool]}

    for parameters, at in (
        ({"type": 5}, ".type"),
        ({"type": "banana"}, ".type"),
        ({"type": "object", "properties": {"city": "string"}}, ".properties.city"),
        ({"properties": ["city"]}, ".properties"),
        ({"type": "array", "items": 3}, ".items"),
        ({"required": "city"}, ".required"),
        ({"anyOf": {"type": "string"}}, ".anyOf"),
        ({"anyOf": [{"type": "nothing"}]}, ".anyOf[0].type"),
        ({"enum": "a"}, ".enum"),
    ):
        assert (await api.refused(CHAT, body(parameters)))["param"] == "tools[0].function.parameters" + at, parameters
    says("Hi.")
    empty = {"type": "object", "properties": []}  # is as good as left out
    assert (await api.post(CHAT, body(empty))).status_code == 200


@pytest.mark.parametrize("is_strict", [True, False])
async def test_calls_of_strict_tools_are_valid_under_auto(api, able, says, is_strict):
    """The answer is free, and what calls the tool keeps to its schema; without ``strict`` nothing is constrained."""
    says(f"<think>Hm.</think>{TEXT}")
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": is_strict}}
    message = (await api.chat(tools=[tool, TIME]))["choices"][0]["message"]
    assert calls_of(message) == [("get_weather", ARGUMENTS[0]), ("get_time", ARGUMENTS[1])]
    assert message["reasoning_content"] == "Hm."
    grammar = able.items[0].sampling.grammar
    if not is_strict:
        assert grammar is None
        return
    source = json.loads(grammar.source)
    schemas = [part["json"] for call in source["calls"] for part in call if "json" in part]
    assert grammar.kind == "free_calls"
    assert schemas == [WEATHER["function"]["parameters"], {"type": "object"}]


async def test_strict_tools_of_a_backend_without_free_calls(api, able, says):
    """The tool is taken, and its calls are what the model makes of them."""
    able.grammar_kinds = KINDS - {"free_calls"}
    says(TEXT)
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    message = (await api.chat(tools=[tool, TIME]))["choices"][0]["message"]
    assert len(message["tool_calls"]) == 2
    assert able.items[0].sampling.grammar is None


QWEN = "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>"


async def test_a_named_call_is_read_as_it_was_forced(api, able, says):
    """The other tools have no say in it: one of them has arguments that this format's grammar cannot describe."""

    def parser(tools, tail="", is_forced=False):
        own = QwenCoderParser(ParserContext(tools, tail))
        return own if not is_forced or own.grammar(True) is not None else JsonParser(ParserContext(tools, tail))

    able.tool_parser = parser
    says(QWEN)
    other = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
    named = {"type": "function", "function": {"name": "get_weather"}}
    message = (await api.chat(tools=[WEATHER, other], tool_choice=named))["choices"][0]["message"]
    assert calls_of(message) == [("get_weather", '{"city": "Bonn"}')]
    assert able.items[0].sampling.grammar.kind == "calls"


async def test_a_call_or_an_answer_by_schema_in_a_models_own_format(api, able, says):
    able.tool_parser = lambda tools, tail="", is_forced=False: QwenCoderParser(ParserContext(tools, tail))
    says('{"a": 1}')
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    message = (await api.chat(tools=[WEATHER], response_format=form))["choices"][0]["message"]
    assert message["content"] == '{"a": 1}'
    grammar = able.items[0].sampling.grammar
    assert (grammar.kind, json.loads(grammar.source)["answer"]) == ("calls", schema)
