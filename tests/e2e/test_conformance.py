"""What a real server answers, held against the types of OpenAI's and Anthropic's own clients, in strict mode.

The clients themselves read leniently: they take any JSON for any type. Here a missing field, a wrong type or a value
that is not among the published ones fails.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from tests.helpers.http import NO_TLS
from tests.helpers.lazy import lazy
from tests.helpers.rig import until
from tests.helpers.servers import Start

openai_batch = lazy("openai.types.batch")
chat = lazy("openai.types.chat")
claude = lazy("anthropic.types")
openai_types = lazy("openai.types")
responses = lazy("openai.types.responses")
shared = lazy("openai.types.shared")

TEMPLATE = (
    "{% if tools %}<tool_call>{\"name\": ..., \"arguments\": ...}</tool_call>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]<think>"
)  # fmt: skip
PARAMETERS = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
FUNCTION = {"name": "switch", "description": "Turns it on or off.", "parameters": PARAMETERS, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
NAMED = {"type": "function", "function": {"name": "switch"}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "light", "schema": PARAMETERS, "strict": True}}
USER = [{"role": "user", "content": "Hi"}]
PARTS = [
    {"role": "developer", "content": [{"type": "text", "text": "Be kind."}]},
    {"role": "user", "name": "Ada", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": " there"}]},
]
TURNS = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"id": "call_1", "type": "function", "function": {"name": "switch", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "done"}]},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    {"role": "user", "content": "Continue."},
]
THINKS = {"thinking_token_budget": 4}

CHAT: dict[str, dict[str, Any]] = {
    "plain": {},
    "none said": {
        name: None for name in ("stop", "tools", "tool_choice", "response_format", "logit_bias", "n", "seed")
    },
    "parts": {"messages": PARTS},
    "turns": {"messages": TURNS, "tools": [TOOL]},
    "several": {"n": 3, "seed": 1},
    "stop": {"stop": ["a", "b", "c", "d"], "max_completion_tokens": 60, "max_tokens": None},
    "scores": {"logprobs": True, "top_logprobs": 3},
    "scores alone": {"logprobs": True},
    "thinks": THINKS,
    "thinks, scores": {**THINKS, "logprobs": True, "top_logprobs": 1},
    "tools": {"tools": [TOOL], **THINKS},
    "no tools": {"tools": [TOOL], "tool_choice": "none", **THINKS},
    "a call": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 300},
    "a named call": {"tools": [TOOL], "tool_choice": NAMED, "max_tokens": 300, "parallel_tool_calls": False},
    "a cut call": {"tools": [TOOL], "tool_choice": "required", "max_tokens": 30},
    "an old call": {"functions": [FUNCTION], "function_call": {"name": "switch"}, "max_tokens": 300},
    "allowed": {
        "tools": [TOOL],
        "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
        "max_tokens": 300,
    },
    "object": {"response_format": FORMAT, "max_tokens": 300},
    "text": {"response_format": {"type": "text"}, **THINKS},
    "hints": {
        "store": True,
        "metadata": {"a": "b"},
        "user": "u",
        "safety_identifier": "s",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "reasoning_effort": "low",
        "verbosity": "low",
        "prediction": {"type": "content", "content": "Hi"},
        "modalities": ["text"],
        "logit_bias": {"65": -100},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    },
}
COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "several": {"prompt": ["Hi", "Ho"], "n": 2},
    "ids": {"prompt": [72, 105]},
    "lists of ids": {"prompt": [[72, 105], [72]]},
    "best": {"best_of": 3, "n": 2},
    "scores": {"logprobs": 2},
    "no scores": {"logprobs": 0},
    "echo": {"echo": True},
    "stop": {"stop": "a", "max_tokens": 60},
    "default length": {"max_tokens": None, "stop": None},
}
RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "items": {
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "Be kind."}]},
            {"type": "message", "role": "user", "content": "Hi"},
            {"type": "function_call", "call_id": "c", "name": "switch", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "done"},
        ],
        "instructions": "Speak.",
    },
    "tools": {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required", "max_output_tokens": 300},
    "named": {
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": {"type": "function", "name": "switch"},
        "parallel_tool_calls": False,
        "max_output_tokens": 300,
    },
    "object": {"text": {"format": {"name": "light", "type": "json_schema", "schema": PARAMETERS, "strict": True}}},
    "thinks": {"reasoning": {"effort": "low", "summary": "auto"}, "include": ["reasoning.encrypted_content"]},
    "does not": {"reasoning": {"effort": "none"}, "truncation": "disabled"},
    "scores": {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    "hints": {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u", "prompt_cache_key": "k"},
}
CLAUDE_TOOL = {"name": "switch", "description": "Turns it on or off.", "input_schema": PARAMETERS}
MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "system": {"system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]},
    "thinks": {"thinking": {"type": "enabled", "budget_tokens": 4}},
    "adapts": {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}},
    "object": {
        "output_config": {"format": {"type": "json_schema", "schema": PARAMETERS}},
        "thinking": {"type": "enabled", "budget_tokens": 4},
        "max_tokens": 300,
    },
    "tools": {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "auto"}},
    "a call": {"tools": [CLAUDE_TOOL], "tool_choice": {"type": "any"}, "max_tokens": 300},
    "a named call": {
        "tools": [CLAUDE_TOOL],
        "tool_choice": {"type": "tool", "name": "switch", "disable_parallel_tool_use": True},
        "max_tokens": 300,
    },
    "stop": {"stop_sequences": ["a", "b", "c"], "max_tokens": 60, "thinking": {"type": "disabled"}},
    "hints": {"metadata": {"user_id": "u"}, "service_tier": "auto"},
}
WRONG: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/chat/completions", {}, 400),
    ("/v1/chat/completions", {"messages": []}, 400),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "Hi"}]}, 400),
    ("/v1/chat/completions", {"messages": USER, "model": "another"}, 404),
    ("/v1/chat/completions", {"messages": USER, "temperature": -1}, 400),
    ("/v1/chat/completions", {"messages": USER, "top_logprobs": 2}, 400),
    ("/v1/chat/completions", {"messages": USER, "logprobs": True, "top_logprobs": 99}, 400),
    ("/v1/chat/completions", {"messages": USER, "stream_options": {"include_usage": True}}, 400),
    ("/v1/chat/completions", {"messages": USER, "tool_choice": "required"}, 400),
    ("/v1/chat/completions", {"messages": USER, "reasoning_effort": "a bit"}, 400),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 100_000}, 400),
    ("/v1/completions", {"prompt": "Hi", "n": 3, "best_of": 2}, 400),
    ("/v1/completions", {"prompt": "Hi " * 3000}, 400),
    ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_none"}, 404),
    ("/v1/responses", {"input": "Hi", "tools": [{"type": 7}]}, 400),
    ("/v1/embeddings", {"input": "Hi"}, 400),
    ("/v1/batches", {"input_file_id": "none", "endpoint": "/v1/completions", "completion_window": "24h"}, 404),
]


@pytest.fixture(scope="module")
def http(spawn: Start, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model that says random bytes, and a template that opens its thinking and has tools."""
    template: Path = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    flags = ("--chat-template", str(template), "--reasoning-parser", "qwen3", "--tool-call-parser", "hermes")
    server = spawn(*flags, "--constrained-json-disable-any-whitespace", "true")
    with httpx.Client(base_url=server.url, timeout=60, verify=NO_TLS) as client:
        yield client
    server.check_invariants()


def held(kind: Any, body: Any) -> Any:
    """``body``, if it is of the client's type."""
    adapter(kind).validate_json(json.dumps(body), strict=True)
    return body


@cache
def adapter(kind: Any) -> TypeAdapter[Any]:
    """Building one takes a second or two."""
    return TypeAdapter(kind)


def post(http: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; what ends OpenAI's older ones is left out."""
    reply = http.post(path, json=body | {"stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    for block in reply.text.removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] != "[DONE]":
            found.append(json.loads(lines["data"]))
            assert lines.get("event") == (found[-1].get("type") if "event" in lines else None)
    return found


@pytest.mark.gate(6)
@pytest.mark.parametrize("shape", CHAT)
def test_chat(http: httpx.Client, shape: str) -> None:
    body: dict[str, Any] = {"messages": USER, "max_tokens": 12, "seed": 3, **CHAT[shape]}
    whole = held(chat.ChatCompletion, post(http, "/v1/chat/completions", body))
    assert len(whole["choices"]) == (body.get("n") or 1)
    for choice in whole["choices"]:
        assert choice["message"].keys() >= {"role", "content", "refusal"}
        assert (choice["logprobs"] is not None) == bool(body.get("logprobs"))
    for asked in ({}, {"stream_options": {"include_usage": True}}):
        chunks = [held(chat.ChatCompletionChunk, c) for c in events(http, "/v1/chat/completions", body | asked)]
        ends = [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert len(ends) == len(whole["choices"])
        assert {chunk["choices"][0]["delta"].get("role") for chunk in chunks if chunk["choices"]} >= {"assistant"}
        assert bool(asked) == (chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0)
        assert len({chunk["id"] for chunk in chunks}) == 1
        if "seed" in body and body["seed"] is not None:  # the same text, streamed
            assert told(chunks) == [said(choice["message"]) for choice in whole["choices"]]


def said(message: dict[str, Any]) -> tuple[Any, ...]:
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    old = message.get("function_call")
    calls += [(old["name"], old["arguments"])] if old else []
    return message["content"] or "", message.get("reasoning_content") or "", calls


def told(chunks: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What the chunks add up to, as ``said`` tells it."""
    found: dict[int, tuple[list[str], list[str], list[list[str]]]] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        content, thoughts, calls = found.setdefault(choice["index"], ([], [], []))
        delta = choice["delta"]
        content.append(delta.get("content") or "")
        thoughts.append(delta.get("reasoning_content") or "")
        pieces = [(call["index"], call["function"]) for call in delta.get("tool_calls") or ()]
        pieces += [(0, delta["function_call"])] if delta.get("function_call") else []
        for index, function in pieces:
            if index == len(calls):
                calls.append([function["name"], ""])
            calls[index][1] += function.get("arguments") or ""
    return [
        ("".join(content), "".join(thoughts), [(name, text) for name, text in calls])
        for _, (content, thoughts, calls) in sorted(found.items())
    ]


@pytest.mark.parametrize("shape", COMPLETIONS)
def test_completions(http: httpx.Client, shape: str) -> None:
    body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 8, **COMPLETIONS[shape]}
    whole = held(openai_types.Completion, post(http, "/v1/completions", body))
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
    # A chunk is of the same type, but its finish_reason is null until the last.
    for chunk in events(http, "/v1/completions", body | {"stream_options": {"include_usage": True}}):
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        held(openai_types.Completion, chunk)


@pytest.mark.gate(4)
@pytest.mark.parametrize("shape", RESPONSES)
def test_responses(http: httpx.Client, shape: str) -> None:
    body: dict[str, Any] = {"input": "Hi", "max_output_tokens": 12, **RESPONSES[shape]}
    held(responses.Response, post(http, "/v1/responses", body))
    found = [held(responses.ResponseStreamEvent, event) for event in events(http, "/v1/responses", body)]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert found[0]["type"] == "response.created"
    assert found[-1]["type"] in ("response.completed", "response.incomplete")
    last = found[-1]["response"]
    scores = [e["logprobs"] for e in found if e["type"] == "response.output_text.done"]
    assert all(bool(score) == (shape == "scores") for score in scores)
    if body.get("store") is not False:
        assert held(responses.Response, http.get(f"/v1/responses/{last['id']}").json()) == last
        held(responses.ResponseItemList, http.get(f"/v1/responses/{last['id']}/input_items").json())


@pytest.mark.gate(4)
@pytest.mark.parametrize("shape", MESSAGES)
def test_messages(http: httpx.Client, shape: str) -> None:
    body: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "messages": USER, **MESSAGES[shape]}
    whole = held(claude.Message, post(http, "/v1/messages", body))
    found = [held(claude.RawMessageStreamEvent, event) for event in events(http, "/v1/messages", body)]
    held(claude.Message, found[0]["message"])
    kinds = [event["type"] for event in found]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")
    assert whole["content"]
    if "output_config" in body and "format" in body["output_config"]:
        assert isinstance(json.loads(whole["content"][-1]["text"])["on"], bool)
    counted = {key: value for key, value in body.items() if key in ("model", "messages", "system", "tools")}
    held(claude.MessageTokensCount, post(http, "/v1/messages/count_tokens", counted))


@pytest.mark.parametrize(("path", "body", "status"), WRONG)
def test_errors(http: httpx.Client, path: str, body: dict[str, Any], status: int) -> None:
    reply = http.post(path, json=body)
    assert reply.status_code == status, reply.text
    error = held(shared.ErrorObject, reply.json()["error"])
    assert error.keys() >= {"message", "type", "param", "code"}
    if body.get("model") == "another":
        assert error["code"] == "model_not_found"


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "tiny", "max_tokens": 4, "messages": []}, 400, "invalid_request_error"),
        ({"model": "tiny", "messages": USER}, 400, "invalid_request_error"),
        ({"model": "another", "max_tokens": 4, "messages": USER}, 404, "not_found_error"),
        ({"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "Hi " * 3000}]}, 400, ""),
    ],
)
def test_errors_of_messages(http: httpx.Client, body: dict[str, Any], status: int, kind: str) -> None:
    reply = http.post("/v1/messages", json=body)
    assert reply.status_code == status, reply.text
    error = held(claude.ErrorResponse, reply.json())
    assert error["error"]["type"] == (kind or "invalid_request_error")


def test_models(http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list"
    for model in listed["data"]:
        held(openai_types.Model, model)
    held(openai_types.Model, http.get("/v1/models/tiny").json())
    held(claude.ModelInfo, http.get("/v1/models/tiny", headers={"anthropic-version": "2023-06-01"}).json())
    missing = http.get("/v1/models/another")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    claudes = http.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert claudes.keys() >= {"data", "has_more", "first_id", "last_id"}
    for model in claudes["data"]:
        held(claude.ModelInfo, model)


def test_files_and_batches(http: httpx.Client) -> None:
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": {"messages": said}}
        for i, said in enumerate((USER, []))
    ]
    data = "\n".join(json.dumps(line) for line in lines).encode()
    made = http.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"}).json()
    held(openai_types.FileObject, made)
    for file in http.get("/v1/files").json()["data"]:
        held(openai_types.FileObject, file)
    asked = {"input_file_id": made["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    path = f"/v1/batches/{held(openai_batch.Batch, post(http, '/v1/batches', asked))['id']}"
    until(lambda: held(openai_batch.Batch, http.get(path).json())["status"] == "completed", 60, "the batch's end")
    batch = http.get(path).json()
    assert batch["request_counts"] == {"total": 2, "completed": 1, "failed": 1}
    [line] = http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
    held(chat.ChatCompletion, json.loads(line)["response"]["body"])
    [line] = http.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
    held(shared.ErrorObject, json.loads(line)["response"]["body"]["error"])
    for one in http.get("/v1/batches").json()["data"]:
        held(openai_batch.Batch, one)
    held(openai_types.FileDeleted, http.delete(f"/v1/files/{made['id']}").json())
