"""Part of check 3: one step past every limit of docs/limits.md, field by field, at the real server."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from fwk.plugins import discover
from fwk_kit.cli.limits import Limit, dialects, limits_of
from tests.helpers.client import connect
from tests.helpers.rig import CONTEXT, VOCAB, Server
from tests.helpers.servers import Start

ADMIN_KEY = "sk-administrator"
FORMS = ("/v1/audio/transcriptions", "/v1/audio/translations")
"""Read as forms: tests/plugins/server/test_openai_audio.py."""

ROUTES = [(path, dialect) for _, dialect in dialects(discover()) for path in dialect.requests if path not in FORMS]
PAST = "one more"
MESSAGES = [{"role": "user", "content": "Hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 1},
    "/v1/chat/completions/render": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/completions/render": {"prompt": "Hi", "max_tokens": 1},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/batches": {"input_file_id": "x", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [65]},
    "/v1/load_lora_adapter": {"lora_name": "x", "lora_path": "x"},
    "/v1/unload_lora_adapter": {"lora_name": "x"},
    "/update_weights_from_disk": {"model_path": "x"},
    "/generate": {"inputs": "Hi", "parameters": {"max_new_tokens": 1}},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 1, "store": False},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/responses/compact": {"input": "Hi", "model": "tiny"},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {},
    "/v1/conversations/{conversation_id}/items": {"items": []},
    "/v1/chat/completions/{completion_id}": {"metadata": {}},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": {"messages": MESSAGES, "max_tokens": 1}}]},
    "/api/chat": {"messages": MESSAGES, "options": {"num_predict": 1}},
    "/completion": {"prompt": "Hi", "max_tokens": 1},
    "/infill": {"input_prefix": "Hi", "input_suffix": "there", "max_tokens": 1},
    "/apply-template": {"messages": [{"role": "user", "content": "Hi"}]},
    "/api/generate": {"prompt": "Hi", "options": {"num_predict": 1}},
    "/api/embed": {"input": "Hi"},
    "/api/embeddings": {"prompt": "Hi"},
    "/api/show": {},
    "/api/pull": {},
    "/v1/rerank": {"query": "Hi", "documents": ["Hi"]},
    "/v1/score": {"text_1": "Hi", "text_2": "Hi"},
    "/classify": {"input": "Hi"},
    "/pooling": {"input": "Hi"},
}
GOOD["/rerank"] = GOOD["/v2/rerank"] = GOOD["/v1/rerank"]
GOOD["/score"] = GOOD["/v1/score"]
GOOD["/load_lora_adapter"] = GOOD["/v1/load_lora_adapter"]
GOOD["/unload_lora_adapter"] = GOOD["/v1/unload_lora_adapter"]
GOOD["/completions"] = GOOD["/completion"]
GOOD["/generate_stream"] = GOOD["/"] = GOOD["/generate"]

LABELS = {"query": "Hi", "items": ["Hi"], "label_token_ids": [65]}
"""Scores of labels, which /v1/score takes in place of pairs."""

NEEDED = {"repetition_detection": {"max_pattern_size": 2, "min_count": 2}}
"""What an object of a request has to hold at the least."""

LONG = "A" * (CONTEXT + 1)
LONG_GRAMMAR = "a" * (256 * 1024 + 1)
TOOL = {"type": "function", "function": {"name": "f", "description": "d" * (CONTEXT + 1)}}
HERMES = {"tools": [TOOL | {"function": {"name": "f"}}]}

WORDS: dict[str, Any] = {
    "max_tokens": CONTEXT,
    "max_completion_tokens": CONTEXT,
    "max_output_tokens": CONTEXT,
    "instructions": LONG,
    "text": {"format": {"type": "json_schema", "name": "x", "schema": {"const": LONG_GRAMMAR}}},
    "parameters.max_new_tokens": CONTEXT,
    "min_tokens": 2,
    "allowed_token_ids": [65] * (VOCAB + 1),
    "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": LONG_GRAMMAR}}},
    "structured_outputs": {"regex": LONG_GRAMMAR},
    "guided_json": {"const": LONG_GRAMMAR},
    "json_schema": {"const": LONG_GRAMMAR},
    "guided_choice": [LONG_GRAMMAR],
    "guided_choice[x]": [LONG_GRAMMAR],
    "messages[x]": [{"role": "user", "content": LONG}],
    "tools[x]": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "g"}},
    "chat_template_kwargs": {"x": "x" * 65536},
    "prompt": LONG,
    "input": LONG,
    "inputs": LONG,
    "dimensions": 7,
    "parameters.truncate": CONTEXT,
    "parameters.typical_p": 1.5,
    "parameters.grammar": {"type": "json", "value": {"const": LONG_GRAMMAR}},
    "parameters.adapter_id": "x",
}
"""Values past limits that are words."""

TOLD_AS = {"tools[x]": "messages", "system": "messages", "instructions": "input"}
"""It is the rendered conversation that is too long."""


def past(limit: Limit) -> list[Any]:
    """What lies just past a limit; of an element of a list, the element."""
    values = [*past_bounds(limit), *past_sizes(limit)]
    if "vocabulary" in limit.most and limit.field.endswith("[x]"):
        values.append(VOCAB)
    if limit.field in WORDS and (not values or ";" in limit.most):
        values.append(WORDS[limit.field])
    if not values:
        values = [LONG_GRAMMAR if "grammar" in limit.most else LONG]
    return values


def past_bounds(limit: Limit) -> list[float]:
    out = r"( \(itself excluded\))?"
    found = re.match(rf"(-?[\d.]+){out} to (-?[\d.]+){out}", limit.most)
    if not found:
        return []
    low, high = (json.loads(text) for text in found.group(1, 3))
    return [high if found.group(4) else high + 1, low if found.group(2) else low - 1]


def past_sizes(limit: Limit) -> list[Any]:
    found = re.match(r"(\d+) (characters|elements|entries)", limit.most)
    if not found:
        return []
    count = int(found.group(1)) + 1
    if limit.field == "tools":
        return [[TOOL | {"function": {"name": f"f{i}"}} for i in range(count)]]
    if found.group(2) == "characters":
        return ["x" * count]
    if found.group(2) == "entries":
        return [{str(i): 0 for i in range(count)}]
    elements = {"messages": MESSAGES, "stop_token_ids": [65], "tokens": [65]}
    return [elements.get(limit.field, ["x"]) * count]


def placed(limit: Limit, value: Any) -> Any:
    """A value of an element, inside the list or object that holds it."""
    marks = re.findall(r"\[x\]|\.\*", limit.field)
    if limit.field in WORDS:
        return value
    if limit.kind == "list" and "context" in limit.most:
        value = [65] * (CONTEXT + 1)
    for mark in reversed(marks):
        value = [value] if mark == "[x]" else {"65": value}
    return value


def field_of(limit: Limit) -> str:
    return re.split(r"\[|\.\*", limit.field)[0]


def with_value(path: str, limit: Limit, value: Any) -> dict[str, Any]:
    """A good request but for one field, and what else it needs to be read at all."""
    body = json.loads(json.dumps(GOOD[path]))
    name = field_of(limit)
    if path == "/tokenize" and name in ("messages", "chat_template_kwargs", "tools", "tool_choice"):
        body = {"messages": MESSAGES}
    if path.endswith("/score") and name in LABELS:
        body = dict(LABELS)
        inner = placed(limit, value)
        if name == "query" and isinstance(inner, list):
            body["items"] = [[65]]  # both are texts, or both are token ids
        if name == "items" and isinstance(inner, list) and isinstance(inner[0], list):
            body["query"] = [65]
    if name == "max_completion_tokens":
        del body["max_tokens"]
    flag = {} if path.startswith("/v1/responses") else {"logprobs": True}
    body |= {"top_logprobs": flag, "tool_choice": HERMES, "best_of": {"n": 128}, "metadata": {"store": True}}.get(
        name, {}
    )
    place = body
    *outer, last = name.split(".")
    for part in outer:
        place = place.setdefault(part, dict(NEEDED.get(part, {})))
    place[last] = placed(limit, value)
    return body


@pytest.fixture(scope="module")
def server(spawn: Start, tmp_path_factory: pytest.TempPathFactory) -> Server:
    template = tmp_path_factory.mktemp("template") / "all.jinja"
    template.write_text("{{ tools }}{{ x }}{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = ("--tool-call-parser", "hermes", "--chat-template", str(template), "--max-body-bytes", str(64 * 2**20))
    infill = template.with_name("infill.json")
    names = ("fim_begin_token", "fim_middle_token", "fim_end_token")
    infill.write_text(json.dumps(dict(zip(names, "abc", strict=True)) | {"fim_position": "end"}))
    server = spawn(*flags, "--admin-api-key", ADMIN_KEY, "--completion-template", str(infill))
    for path in ("/tokenize", "/detokenize"):  # what the largest bodies take stays reserved, once
        for limit in limits_of(dict(ROUTES)[path].requests[path]):
            for value in past(limit):
                server.post(with_value(path, limit, value), path)
    server.settle()
    return server


@pytest.mark.gate(20)
@pytest.mark.parametrize(("path", "dialect"), ROUTES, ids=[path for path, _ in ROUTES])
async def test_one_past_every_limit(server: Server, path: str, dialect: Any) -> None:
    """Refused with the status the page says, and in OpenAI's shape with the field's name."""
    if "lora" in path or path == "/update_weights_from_disk":
        server.headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    steps = server.stats()["steps"]
    seen = 0
    async with connect(server) as client:
        for limit in limits_of(dialect.requests[path]):
            if path == "/tokenize" and limit.field in ("messages[x]", "tools[x]"):
                continue  # whatever there is of it is counted
            if path.startswith(("/v1/messages", "/v1/responses")) and limit.field == "tool_choice":
                continue  # these are tools of another shape; tests/plugins/server/ has wrong ones of each dialect
            if path.startswith("/v1/conversations") and "context" in limit.most:
                continue  # what is kept is bounded by the store: tests/plugins/server/test_responses.py
            for value in past(limit):
                status, reply = await client.post(with_value(path, limit, value), path)
                if "generates text and" in str(reply):
                    continue  # said before its inputs are read; tests/e2e/test_embeddings.py goes past their limits
                wanted = 404 if limit.most == "a served name" else dialect.invalid_status
                if path == "/update_weights_from_disk":  # SGLang's, among TGI's; a name is looked up first
                    wanted = 404 if limit.field == "model" else 400
                assert status == wanted, (limit, str(value)[:60], status, str(reply)[:300])
                error = reply.get("message") or reply["error"]
                told = str(error["param"] if isinstance(error, dict) else error)
                name = field_of(limit).rpartition(".")[2]
                is_rendered = path.startswith("/api/") and told.startswith(
                    "the prompt has"
                )  # errors have no field there
                assert is_rendered or name in told or TOLD_AS.get(limit.field, name) in told, (
                    limit,
                    str(value)[:60],
                    reply,
                )
                seen += 1
    assert seen
    assert server.stats()["steps"] == steps, "something refused was computed"


def test_the_server_is_as_before(server: Server) -> None:
    server.check_invariants()
