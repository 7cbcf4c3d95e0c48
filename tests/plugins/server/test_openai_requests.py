"""What is refused, and how: always 400 in OpenAI's shape with the field's name, never a 500, never silence."""

import json
import math

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field

from fwk.interfaces.dialect import DialectContext
from fwk.server.app import install_error_handlers
from fwk.types import Service, tenant_of
from fwk_server.openai import OpenAIOptions
from fwk_server.openai.dialect import OpenAIDialect

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}

MALFORMED = {
    "empty": b"",
    "spaces": b"   ",
    "newline": b"\n",
    "null": b"null",
    "true": b"true",
    "number": b"42",
    "string": b'"prompt"',
    "array": b'[{"prompt": "Hi"}]',
    "empty array": b"[]",
    "word": b"prompt",
    "form": b"prompt=Hi&n=1",
    "open brace": b"{",
    "open key": b'{"prompt',
    "no value": b'{"prompt":',
    "open string": b'{"prompt": "Hi',
    "no closing brace": b'{"prompt": "Hi"',
    "two closing braces": b'{"prompt": "Hi"}}',
    "two objects": b'{"prompt": "Hi"}{"prompt": "Hi"}',
    "text behind": b'{"prompt": "Hi"} x',
    "trailing comma": b'{"prompt": "Hi",}',
    "leading comma": b'{,"prompt": "Hi"}',
    "missing comma": b'{"prompt": "Hi" "n": 1}',
    "missing colon": b'{"prompt" "Hi"}',
    "single quotes": b"{'prompt': 'Hi'}",
    "bare key": b'{prompt: "Hi"}',
    "number key": b'{1: "Hi"}',
    "comment": b'{"prompt": "Hi" /* n */}',
    "line comment": b'{"prompt": "Hi"} // n',
    "python None": b'{"prompt": None}',
    "python True": b'{"prompt": "Hi", "stream": True}',
    "undefined": b'{"prompt": undefined}',
    "NaN": b'{"prompt": NaN}',
    "Infinity": b'{"prompt": "Hi", "n": Infinity}',
    "minus Infinity": b'{"prompt": "Hi", "n": -Infinity}',
    "nested NaN": b'{"prompt": "Hi", "logit_bias": {"1": NaN}}',
    "1e400": b'{"prompt": "Hi", "n": 1e400}',
    "400 digits": b'{"prompt": "Hi", "n": ' + b"9" * 400 + b"}",
    "million digits": b'{"prompt": "Hi", "n": ' + b"9" * 1_000_000 + b"}",
    "leading zero": b'{"prompt": "Hi", "n": 01}',
    "plus": b'{"prompt": "Hi", "n": +1}',
    "hex": b'{"prompt": "Hi", "n": 0x1}',
    "lonely dot": b'{"prompt": "Hi", "n": 1.}',
    "leading dot": b'{"prompt": "Hi", "temperature": .5}',
    "lonely minus": b'{"prompt": "Hi", "n": -}',
    "lonely exponent": b'{"prompt": "Hi", "n": 1e}',
    "high surrogate": b'{"prompt": "\\ud800"}',
    "low surrogate": b'{"prompt": "\\udc00"}',
    "swapped surrogates": b'{"prompt": "\\udc00\\ud800"}',
    "surrogate in key": b'{"prompt": "Hi", "\\ud800": 1}',
    "short escape": b'{"prompt": "\\u12"}',
    "unknown escape": b'{"prompt": "\\x41"}',
    "raw NUL": b'{"prompt": "a\x00b"}',
    "NUL behind": b'{"prompt": "Hi"}\x00',
    "raw newline": b'{"prompt": "a\nb"}',
    "raw tab": b'{"prompt": "a\tb"}',
    "latin-1": '{"prompt": "é"}'.encode("latin-1"),
    "utf-16": '{"prompt": "Hi"}'.encode("utf-16"),
    "utf-32": '{"prompt": "Hi"}'.encode("utf-32"),
    "byte order mark": b'\xef\xbb\xbf{"prompt": "Hi"}',
    "overlong utf-8": b'{"prompt": "\xc0\xaf"}',
    "surrogate in utf-8": b'{"prompt": "\xed\xa0\x80"}',
    "cut utf-8": b'{"prompt": "\xe2\x82"}',
    "stray byte": b'{"prompt": "\xff"}',
    "gzip": b"\x1f\x8b\x08\x00" + bytes(20),
    "key twice": b'{"prompt": "Hi", "prompt": "Ho"}',
    "nested key twice": b'{"prompt": "Hi", "stream_options": {"include_usage": true, "include_usage": false}}',
    "escaped key twice": b'{"prompt": "Hi", "pr\\u006fmpt": "Ho"}',
    "deep arrays": b'{"prompt": "Hi", "x": ' + b"[" * 200 + b"]" * 200 + b"}",
    "deep objects": b'{"prompt": "Hi", "x": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}",
    "very deep": b"[" * 100_000,
    "very deep and closed": b'{"x":' * 50_000 + b"1" + b"}" * 50_000,
}


@pytest.mark.parametrize("name", MALFORMED)
async def test_malformed_bodies(api, frontend, name):
    for path in (CHAT, COMPLETIONS, "/tokenize", "/detokenize"):
        error = await api.refused(path, MALFORMED[name])
        assert len(error["message"]) < 400
    assert frontend.items == []


@pytest.mark.parametrize("name", ["key twice", "Infinity", "1e400"])
async def test_malformed_fields_are_named_where_they_can_be(api, name):
    error = await api.refused(COMPLETIONS, MALFORMED[name])
    assert error["param"] in ("prompt", "n")


async def test_nul_in_text_is_text(api, frontend):
    await api.complete(prompt="a\x00b", add_special_tokens=False)
    assert frontend.items[0].prompt_token_ids == [97, 0, 98]


async def test_other_content_types_are_refused(api):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        error = await api.refused(CHAT, BODIES[CHAT], 415, headers={"content-type": kind})
        assert "application/json" in error["message"]
    assert (await api.post(CHAT, BODIES[CHAT], headers={"content-type": "application/json; charset=utf-8"})).is_success


# field: (lowest, highest), of integers. Both routes unless a path is given.
INTEGERS = {
    "n": (1, 128),
    "max_tokens": (1, 2**31 - 1),
    "min_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "prompt_logprobs": (0, 20),
    "priority": (-(2**31), 2**31 - 1),
    "max_completion_tokens": (1, 2**31 - 1),
    "top_logprobs": (0, 20),
    "logprobs": (0, 20),
}
NUMBERS = {
    "temperature": (0, 100),
    "top_p": (1e-9, 1),
    "min_p": (0, 1),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
BEYOND = [-(2**63) - 1, -(2**63), 2**63, 2**64, 2**200, "nan", "inf", "-inf", "1", True, [], {}]


def _body(path, name, value):
    body = dict(BODIES[path]) | {name: value}
    if name == "top_logprobs":
        body["logprobs"] = True
    if name in ("min_tokens",) and isinstance(value, int) and value > 16:
        body["max_tokens"] = 2**31 - 1
    if name == "n":
        body["max_tokens"] = 1
    return body


def _paths(name):
    return {"max_completion_tokens": [CHAT], "top_logprobs": [CHAT], "logprobs": [COMPLETIONS]}.get(
        name, [CHAT, COMPLETIONS]
    )


def _encode(body):
    """JSON with the words Python writes for what JSON has not."""
    special = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
    return json.dumps({k: special.get(v, v) if isinstance(v, str) else v for k, v in body.items()}).encode()


@pytest.mark.parametrize("name", INTEGERS)
async def test_integers_at_and_past_their_limits(api, name):
    low, high = INTEGERS[name]
    for path in _paths(name):
        for value in (low, high, low + 1, high - 1, None):
            reply = await api.post(path, _encode(_body(path, name, value)))
            assert reply.status_code == 200, f"{name}={value}: {reply.text[:300]}"
        for value in (low - 1, high + 1, 1.5, -0.5, 1e300, *BEYOND):
            if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
                continue
            error = await api.refused(path, _encode(_body(path, name, value)))
            assert error["param"] == name, f"{name}={value}: {error}"
            assert name in error["message"]


@pytest.mark.parametrize("name", NUMBERS)
async def test_numbers_at_and_past_their_limits(api, name):
    low, high = NUMBERS[name]
    for path in _paths(name):
        for value in (low, high, (low + high) / 2, None):
            reply = await api.post(path, _encode(_body(path, name, value)))
            assert reply.status_code == 200, f"{name}={value}: {reply.text[:300]}"
        for value in (low - 1, high + 1e-3, low - 1e-3, -1e308, 1e308, *BEYOND):
            error = await api.refused(path, _encode(_body(path, name, value)))
            assert error["param"] == name, f"{name}={value}: {error}"


async def test_patterns_may_stop_a_text(api, frontend):
    await api.complete(stop_regex="a+b")
    assert frontend.items[-1].sampling.stop_regex == ["a+b"]
    await api.chat(stop_regex=["a+b", "c"])
    assert frontend.items[-1].sampling.stop_regex == ["a+b", "c"]
    assert (await api.refused(COMPLETIONS, {"prompt": "Hi", "stop_regex": [3]}))["param"] == "stop_regex[0]"


async def test_a_text_that_repeats_itself_may_end(api, frontend):
    await api.chat(repetition_detection={"max_pattern_size": 20, "min_count": 4})
    found = frontend.items[-1].sampling.repetition_detection
    assert (found.max_pattern_size, found.min_pattern_size, found.min_count) == (20, 1, 4)
    for wrong in ({"max_pattern_size": 20}, {"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, 3):
        error = await api.refused(COMPLETIONS, {"prompt": "Hi", "repetition_detection": wrong})
        assert error["param"].startswith("repetition_detection")


async def test_best_of_is_n_at_least(api):
    assert (await api.complete(best_of=1))["choices"]
    assert len((await api.complete(best_of=3, n=3))["choices"]) == 3
    for best_of in (0, 1, 129, -1, 2**63):
        error = await api.refused(COMPLETIONS, {"prompt": "Hi", "n": 2, "best_of": best_of})
        assert error["param"] == "best_of"


REFUSED = [
    # both routes
    ({"stream": 1}, "stream"),
    ({"stream": "true"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": 1}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"model": 5}, "model"),
    ({"stop": 5}, "stop"),
    ({"stop": ["a", 5]}, "stop[1]"),
    ({"stop": [""]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1025}, "stop"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [1, 2.0]}, "stop_token_ids[1]"),
    ({"stop_token_ids": [258]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**63]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [258]}, "allowed_token_ids"),
    ({"allowed_token_ids": {"1": 1}}, "allowed_token_ids"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": [1]}, "bad_words[0]"),
    ({"bad_words": [""]}, "bad_words"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"01": 1}}, "logit_bias"),
    ({"logit_bias": {"1.0": 1}}, "logit_bias"),
    ({"logit_bias": {"258": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 30: 1}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias"),
    ({"logit_bias": {"1": True}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"cache_salt": ""}, "cache_salt"),
    ({"cache_salt": "s" * 257}, "cache_salt"),
    ({"request_id": "a\r\nb"}, "request_id"),
    ({"request_id": "a\nb"}, "request_id"),
    ({"request_id": "a\n"}, "request_id"),
    ({"request_id": "r" * 257}, "request_id"),
    ({"request_id": "r" * 1_000_000}, "request_id"),
    ({"rid": "\x00"}, "rid"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"regex": "a+"}, "regex"),
    ({"use_beam_search": 3}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 4096}, "truncate_prompt_tokens"),
    ({"n_predict": 3, "max_tokens": 3}, "n_predict"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"return_hidden_states": True, "best_of": 2}, "return_hidden_states"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"mirostat": 2}, "mirostat"),
    ({"dry_multiplier": 0.8}, "dry_multiplier"),
    ({"xtc_probability": 0.5}, "xtc_probability"),
    ({"top_n_sigma": 1.0}, "top_n_sigma"),
    ({"samplers": ["top_k"]}, "samplers"),
    ({"logits_processors": ["x"]}, "logits_processors"),
    ({"data_parallel_rank": 1}, "data_parallel_rank"),
    ({"detokenize": False}, "detokenize"),
    ({"cache_prompt": False}, "cache_prompt"),
    ({"adapter_id": "a"}, "adapter_id"),
    ({"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
    ({"lora_path": "x"}, "lora_path"),
]
REFUSED_CHAT = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": {"role": "user"}}, "messages"),
    ({"messages": ["Hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": 1, "content": "Hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [{"type": "poem", "text": ""}]}]}, "messages[0].content[0].type"),
    (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content[0]",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "messages[0].content[0]"),
    ({"messages": [{"role": "user", "content": "Hi", "name": 5}]}, "messages[0].name"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].function"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
        "messages[0].tool_calls[0].function.arguments",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": ["f"], "tool_choice": "none"}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"audio": {"voice": "alloy"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"web_search_options": {"a": 1}}, "web_search_options"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]
REFUSED_COMPLETIONS = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": True}, "prompt"),
    ({"prompt": {}}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [None]}, "prompt[0]"),
    ({"prompt": [True]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": [1, True]}, "prompt[1]"),
    ({"prompt": [1, 2.0]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], "a"]}, "prompt[1]"),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**63]}, "prompt"),
    ({"prompt": [[1], [258]]}, "prompt[1]"),
    ({"prompt": [1] * 4096}, "prompt"),
    ({"prompt": "", "add_special_tokens": False}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 100, "n": 128}, "n"),
    ({"suffix": "end"}, "suffix"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"logprobs": True}, "logprobs"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED + REFUSED_CHAT)
async def test_refused_chat_requests(api, frontend, fields, param):
    error = await api.refused(CHAT, BODIES[CHAT] | fields)
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    assert frontend.items == []


@pytest.mark.parametrize(("fields", "param"), REFUSED + REFUSED_COMPLETIONS)
async def test_refused_completion_requests(api, frontend, fields, param):
    error = await api.refused(COMPLETIONS, BODIES[COMPLETIONS] | fields)
    assert error["param"] == param, error
    assert frontend.items == []


async def test_missing_fields_are_named(api):
    assert (await api.refused(CHAT, {}))["param"] == "messages"
    assert (await api.refused(COMPLETIONS, {}))["param"] == "prompt"
    assert (await api.refused("/tokenize", {}))["param"] == "prompt"
    assert (await api.refused("/detokenize", {}))["param"] == "tokens"


IGNORED = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "parallel_tool_calls": False,
    "safety_identifier": "x",
    "prompt_cache_key": "k",
    "prediction": {"type": "content", "content": "a"},
    "verbosity": "low",
    "response_format": {"type": "text"},
    "suffix": "",
    "modalities": ["text"],
    "length_penalty": 1,
    "spaces_between_special_tokens": True,
    "use_beam_search": False,
    "guided_json": None,
    "no_such_field": [1, {"a": None}],
}


async def test_harmless_and_unknown_fields_are_ignored(api):
    await api.chat(**IGNORED)
    await api.complete(**IGNORED)


async def test_null_is_not_given(api, frontend):
    names = """model stream stream_options n best_of max_tokens temperature top_p top_k seed stop logit_bias logprobs
        echo stop_token_ids allowed_token_ids bad_words priority request_id cache_salt prompt_logprobs tools"""
    nulls = dict.fromkeys(names.split())
    await api.chat(**nulls, top_logprobs=None, max_completion_tokens=None, tool_choice=None)
    await api.complete(**nulls, suffix=None)
    assert frontend.items[0].sampling.temperature == 1.0


async def test_every_field_reaches_the_engine(api, frontend):
    fields = {
        "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1, "repetition_penalty": 1.1,
        "presence_penalty": 0.2, "frequency_penalty": -0.3, "allowed_token_ids": [1, 2], "bad_words": ["x"], "seed": -7,
        "stop_token_ids": [3], "ignore_eos": True, "skip_special_tokens": False, "prompt_logprobs": 1,
        "max_tokens": 50, "stop": ["a", "b"],
    }  # fmt: skip
    others = {"logit_bias": {"5": -1, "6": 2.5}, "no_stop_trim": True, "logprobs": 2}
    await api.complete(**fields, **others, priority=3, cache_salt="salt", rid="mine")
    [item] = frontend.items
    for name, value in fields.items():
        assert getattr(item.sampling, name) == value, name
    assert item.sampling.logit_bias == {5: -1.0, 6: 2.5}
    assert item.sampling.include_stop_str_in_output
    assert item.sampling.logprobs == 2
    assert (item.priority, item.cache_salt, item.label) == (3, "salt", "mine")


async def test_the_models_defaults_hold_until_the_client_differs(api, frontend):
    frontend.default_sampling = {"temperature": 0.6, "top_p": 0.9, "unknown": 1}
    await api.chat(top_p=0.5)
    sampling = frontend.items[0].sampling
    assert (sampling.temperature, sampling.top_p) == (0.6, 0.5)


async def test_the_header_is_a_label_too(api, frontend):
    first = await api.post(CHAT, BODIES[CHAT], headers={"x-request-id": "abc"})
    assert "abc" not in first.json()["id"]  # a header may come again, a reply's id does not
    await api.post(CHAT, BODIES[CHAT] | {"request_id": "mine"}, headers={"x-request-id": "abc"})
    await api.post(CHAT, BODIES[CHAT], headers={"x-request-id": "r" * 1_000})
    assert [item.label for item in frontend.items] == ["abc", "mine", ""]


class _Dry(BaseModel):
    dry_multiplier: float = Field(0.0, ge=0)
    dry_base: float = 1.75


async def test_processors_get_their_own_fields(api, frontend):
    frontend.params = [_Dry]
    await api.chat(dry_multiplier=0.8)
    await api.chat(temperature=1)
    assert [item.sampling.extra for item in frontend.items] == [{"dry_multiplier": 0.8, "dry_base": 1.75}, {}]
    error = await api.refused(CHAT, BODIES[CHAT] | {"dry_multiplier": -1})
    assert error["param"] == "dry_multiplier"


async def test_an_unknown_model_is_not_found(api):
    for path, body in BODIES.items():
        error = await api.refused(path, body | {"model": "nope\r\nx: y"}, status=404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "\n" not in error["message"]
    assert (await api.chat(model="tiny"))["model"] == "tiny"


async def test_a_million_wrong_elements_are_one_error(api):
    error = await api.refused(COMPLETIONS, {"prompt": "Hi", "stop_token_ids": ["x"] * 300_000})
    assert error["param"] == "stop_token_ids[0]"


HINTS = {"x-session-id": "s", "x-service-tier": "flex", "x-deadline": "2.5", "x-priority": "-7"}


async def test_hints_for_the_scheduler_come_from_headers_or_the_body(api, frontend):
    key = {"authorization": "Bearer sk-1"}
    await api.post(CHAT, BODIES[CHAT], headers=HINTS | key)
    fields = {"session_id": "mine", "service_tier": "gold", "deadline": 1, "priority": 2}
    await api.post(COMPLETIONS, BODIES[COMPLETIONS] | fields, headers=HINTS)
    await api.post(CHAT, BODIES[CHAT] | {"prompt_cache_key": "k", "service_tier": "auto"})
    found = [(item.priority, item.service) for item in frontend.items]
    assert found == [
        (-7, Service(tenant_of("sk-1"), "s", "flex", 2.5)),
        (2, Service("", "mine", "gold", 1.0)),
        (0, Service("", "k", "", None)),
    ]
    assert "sk-1" not in repr(found)


@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-deadline": "soon"}, "x-deadline"),
        ({"x-deadline": "nan"}, "x-deadline"),
        ({"x-deadline": "-1"}, "x-deadline"),
        ({"x-priority": "1.5"}, "x-priority"),
        ({"x-priority": "30000000000"}, "x-priority"),
    ],
)
async def test_hints_that_are_wrong_are_refused(api, headers, param):
    assert (await api.refused(CHAT, BODIES[CHAT], headers=headers))["param"] == param


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("session_id", "s" * 300),
        ("session_id", 5),
        ("service_tier", "t" * 300),
        ("deadline", 0),
        ("deadline", 1e6),
        ("deadline", "soon"),
    ],
)
async def test_fields_that_are_wrong_are_refused(api, field, value):
    assert (await api.refused(CHAT, BODIES[CHAT] | {field: value}))["param"] == field


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_other_servers_names_mean_the_same(api, frontend, path):
    names = {"n_predict": 7, "min_new_tokens": 2, "repeat_penalty": 1.5, "truncate_prompt_tokens": 1}
    neutral = {"typical_p": 1.0, "mirostat": 0, "top_n_sigma": -1, "cache_prompt": True, "detokenize": True}
    assert (await api.post(path, BODIES[path] | names | neutral)).status_code == 200
    item = frontend.items[0]
    assert (item.sampling.max_tokens, item.sampling.min_tokens, item.sampling.repetition_penalty) == (7, 2, 1.5)
    assert len(item.prompt_token_ids) == 1


async def test_strict_requests_refuse_what_nobody_documents(frontend):
    dialect = OpenAIDialect(DialectContext(frontend, OpenAIOptions(strict_requests=True)))
    app = FastAPI()
    install_error_handlers(app)
    dialect.routes(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        reply = await client.post(CHAT, json=BODIES[CHAT] | {"max_token": 3})
        assert reply.status_code == 400
        assert "did you mean max_tokens?" in reply.json()["error"]["message"]
        known = {"user": "u", "metadata": {}, "typical_p": 1, "n_predict": 4, "logprobs": False, "seed": 1}
        assert (await client.post(CHAT, json=BODIES[CHAT] | known)).status_code == 200
