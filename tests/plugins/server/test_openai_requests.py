"""What is refused, and how: always 400 in OpenAI's shape with the field's name, never a 500, never silence."""

import json
import math
from itertools import product

import httpx
import orjson
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field
from tests.helpers.wrong_requests import MALFORMED, Wrong, of_both, of_chat, of_completions

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import DialectContext
from fwk.server.app import install_error_handlers
from fwk.types import Service, tenant_of
from fwk_kit.testing.fake_frontend import VOCAB_SIZE
from fwk_server.openai import OpenAIOptions
from fwk_server.openai.dialect import OpenAIDialect

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BODIES = {CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETIONS: {"prompt": "Hi"}}


async def test_malformed_bodies(api, frontend):
    for name, path in product(MALFORMED, (CHAT, COMPLETIONS, "/tokenize", "/detokenize")):
        error = await api.refused(path, MALFORMED[name])
        assert len(error["message"]) < 400, (name, path)
    assert frontend.items == []


async def test_malformed_fields_are_named_where_they_can_be(api):
    for name in ("key twice", "Infinity", "1e400"):
        assert (await api.refused(COMPLETIONS, MALFORMED[name]))["param"] in ("prompt", "n"), name


def test_members_are_counted_before_they_are_read(monkeypatch):
    from fwk_server._common import body

    monkeypatch.setattr(body.json, "loads", lambda *_, **__: None)
    most = body.MAX_MEMBERS
    for end in ('"', '" \n', '\\\\"'):  # the last is of a name that ends in a backslash
        for nested in ('{"a": %s}', '{"a": [%s]}'):
            right, wrong = (
                nested % ("{" + ",".join(f'"{i}{end}:1' for i in range(n)) + "}") for n in (most - 1, most + 1)
            )
            body.parse(right.encode())
            with pytest.raises(InvalidRequest, match=f"more than {most} members of objects"):
                body.parse(wrong.encode())
    with pytest.raises(InvalidRequest, match="members"):
        body.parse(b"{" + b",".join([b'"a":1'] * (most + 1)) + b"}")
    for text in ('"b":1,', '\\":', ":", "[", '\\"[{'):
        body.parse(orjson.dumps({"a": text * (most + 1)}))
    for nested in ("[]", "{}", "[" * 100 + "]" * 100):
        with pytest.raises(InvalidRequest, match="lists and objects"):
            body.parse(f'{{"a": [{",".join([nested] * (most + 1))}]}}'.encode())


async def test_few_unknown_names_are_compared_with_known_ones(api, frontend, monkeypatch):
    from fwk_server._common.chat import other_names

    compared: list[str] = []
    monkeypatch.setattr(other_names, "get_close_matches", lambda name, *_: compared.append(name) or [])
    await api.complete(**{f"{i}{'x' * 300}": i for i in range(1000)})
    assert len(compared) == other_names.MAX_COMPARED
    assert max(map(len, compared)) == other_names.MAX_NAME


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


async def test_integers_at_and_past_their_limits(api):
    for name, (low, high), path in [(field, INTEGERS[field], path) for field in INTEGERS for path in _paths(field)]:
        for value in (low, high, low + 1, high - 1, None):
            reply = await api.post(path, _encode(_body(path, name, value)))
            assert reply.status_code == 200, f"{name}={value}: {reply.text[:300]}"
        for value in (low - 1, high + 1, 1.5, -0.5, 1e300, *BEYOND):
            if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
                continue
            error = await api.refused(path, _encode(_body(path, name, value)))
            assert error["param"] == name, f"{name}={value}: {error}"
            assert name in error["message"]


async def test_numbers_at_and_past_their_limits(api):
    for name, (low, high), path in [(field, NUMBERS[field], path) for field in NUMBERS for path in _paths(field)]:
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


REFUSED: Wrong = [
    *of_both(VOCAB_SIZE),
    # what needs plugins that the scripted frontend has not, or is not there
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ({"response_format": "text"}, "response_format"),
    ({"structured_outputs": {"json": {}}}, "structured_outputs"),
    ({"guided_json": {"type": "object"}}, "guided_json"),
    ({"guided_regex": "a"}, "guided_regex"),
    ({"regex": "a+"}, "regex"),
    ({"use_beam_search": 3}, "use_beam_search"),
    ({"length_penalty": 0.5}, "length_penalty"),
    ({"prompt_embeds": "x"}, "prompt_embeds"),
    ({"return_hidden_states": True, "best_of": 2}, "return_hidden_states"),
    ({"typical_p": 0.5}, "typical_p"),
    ({"mirostat": 2}, "mirostat"),
    ({"dry_multiplier": 0.8}, "dry_multiplier"),
    ({"xtc_probability": 0.5}, "xtc_probability"),
    ({"top_n_sigma": 1.0}, "top_n_sigma"),
    ({"samplers": ["top_k"]}, "samplers"),
    ({"adapter_id": "a"}, "adapter_id"),
    ({"lora_path": "x"}, "lora_path"),
]
REFUSED_CHAT: Wrong = [
    *of_chat(),
    (
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[1].content[0]",
    ),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tools": "f"}, "tools"),
    ({"tools": ["f"], "tool_choice": "none"}, "tools[0]"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"__class__": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": []}, "chat_template_kwargs"),
    ({"documents": [{"text": "a"}]}, "documents"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
]


async def test_refused_chat_requests(api, frontend):
    for fields, param in REFUSED + REFUSED_CHAT:
        error = await api.refused(CHAT, BODIES[CHAT] | fields)
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
        assert len(error["message"]) < 400
        assert frontend.items == [], fields


async def test_refused_completion_requests(api, frontend):
    for fields, param in [*REFUSED, *of_completions(VOCAB_SIZE)]:
        error = await api.refused(COMPLETIONS, BODIES[COMPLETIONS] | fields)
        assert error["param"] == param, error
        assert frontend.items == [], fields


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
    first = await api.post(CHAT, BODIES[CHAT], headers={"x-request-id": "xyz"})
    assert "xyz" not in first.json()["id"]  # a header may come again, an id (hexadecimal) does not
    await api.post(CHAT, BODIES[CHAT] | {"request_id": "mine"}, headers={"x-request-id": "xyz"})
    await api.post(CHAT, BODIES[CHAT], headers={"x-request-id": "r" * 1_000})
    assert [item.label for item in frontend.items] == ["xyz", "mine", ""]


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


async def test_hints_that_are_wrong_are_refused(api):
    wrong = {"x-deadline": ["soon", "nan", "-1"], "x-priority": ["1.5", "30000000000"]}
    for name, value in [(name, value) for name, values in wrong.items() for value in values]:
        assert (await api.refused(CHAT, BODIES[CHAT], headers={name: value}))["param"] == name, value
    fields = {"session_id": ["s" * 300, 5], "service_tier": ["t" * 300], "deadline": [0, 1e6, "soon"]}
    for name, value in [(name, value) for name, values in fields.items() for value in values]:
        assert (await api.refused(CHAT, BODIES[CHAT] | {name: value}))["param"] == name, value


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_other_servers_names_mean_the_same(api, frontend, path):
    names = {"n_predict": 7, "min_new_tokens": 2, "repeat_penalty": 1.5, "truncate_prompt_tokens": 1}
    neutral = {"typical_p": 1.0, "mirostat": 0, "top_n_sigma": -1, "cache_prompt": True, "detokenize": True}
    assert (await api.post(path, BODIES[path] | names | neutral)).status_code == 200
    assert (await api.post(path, BODIES[path])).status_code == 200
    item, whole = frontend.items
    assert (item.sampling.max_tokens, item.sampling.min_tokens, item.sampling.repetition_penalty) == (7, 2, 1.5)
    assert item.prompt_token_ids == whole.prompt_token_ids[-1:] != whole.prompt_token_ids[:1]


async def test_a_limit_of_minus_one_is_none(api, frontend):
    for path, name in ((CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (COMPLETIONS, "max_tokens")):
        assert (await api.post(path, BODIES[path] | {name: -1})).status_code == 200
        item = frontend.items[-1]
        assert item.sampling.max_tokens in (None, frontend.card.max_model_len - len(item.prompt_token_ids)), name
        await api.refused(path, BODIES[path] | {name: -2})


async def test_items_of_the_other_api_are_read_where_there_are_no_messages(api, frontend):
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        call,
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
    ]
    limits = {"max_output_tokens": 3, "reasoning": {"effort": "low"}, "store": False, "include": []}
    assert (await api.post(CHAT, {"input": items, "instructions": "Be brief.", **limits})).status_code == 200
    assert frontend.items[-1].sampling.max_tokens == 3
    function = {"name": "f", "arguments": {}}
    wanted = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ]
    assert frontend.text.seen.messages == wanted
    for wrong in ({"input": 3}, {"input": [{"type": "item_reference", "id": "x"}]}, {"input": []}):
        await api.refused(CHAT, wrong)


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
        assert "model is missing" in (await client.post(CHAT, json=BODIES[CHAT] | known)).text
        assert (await client.post(CHAT, json=BODIES[CHAT] | known | {"model": "tiny"})).status_code == 200
