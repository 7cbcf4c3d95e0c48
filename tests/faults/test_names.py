"""Names decide what is acted on: every route that takes the name of a thing refuses one that is not there."""

from __future__ import annotations

import re
from typing import Any

import httpx

from tests.helpers.http import NO_TLS
from tests.helpers.rig import Server, assert_no_leak

MESSAGES = [{"role": "user", "content": "Hi"}]
TEXT = {"input": "x"}
PAIR = {"text_1": "x", "text_2": "y"}
RANKED = {"query": "x", "documents": ["y"]}
SMALLEST: dict[str, dict[str, Any]] = {
    "/": {"inputs": "x"},
    "/api/chat": {"messages": MESSAGES},
    "/api/embed": TEXT,
    "/api/embeddings": {"prompt": "x"},
    "/api/generate": {"prompt": "x"},
    "/api/pull": {},
    "/api/show": {},
    "/apply-template": {"messages": MESSAGES},
    "/classify": TEXT,
    "/completion": {"prompt": "x"},
    "/completions": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/generate": {"inputs": "x"},
    "/generate_stream": {"inputs": "x"},
    "/infill": {"input_prefix": "x", "input_suffix": "y"},
    "/pooling": TEXT,
    "/rerank": RANKED,
    "/score": PAIR,
    "/tokenize": {"prompt": "x"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions/render": {"messages": MESSAGES},
    "/v1/completions/render": {"prompt": "x"},
    "/v1/embeddings": TEXT,
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/v1/rerank": RANKED,
    "/v1/responses": TEXT,
    "/v1/responses/compact": TEXT,
    "/v1/responses/input_tokens": TEXT,
    "/v1/score": PAIR,
    "/v2/rerank": RANKED,
}
"""The least that is served of each route whose body may name a model."""

NAMING = (
    ("/v1/responses", TEXT | {"previous_response_id": "lost"}, 404),
    ("/v1/responses", TEXT | {"conversation": "lost"}, 404),
    ("/v1/responses", {"input": [{"type": "item_reference", "id": "lost"}]}, 404),
    ("/v1/responses/input_tokens", TEXT | {"previous_response_id": "lost"}, 404),
    ("/v1/responses/input_tokens", TEXT | {"conversation": "lost"}, 404),
    ("/v1/batches", {"input_file_id": "lost", "endpoint": "/v1/completions", "completion_window": "24h"}, 404),
    ("/v1/completions", {"prompt": "x", "lora_path": "lost"}, 400),
    ("/v1/completions", {"prompt": "x", "model": "tiny:lost"}, 404),
    ("/generate", {"text": "x", "lora_path": "lost"}, 400),
)
PAGES = ("/v1/batches?after=", "/v1/files?after=", "/v1/chat/completions?after=", "/v1/messages/batches?after_id=")
POSTED = {"/v1/chat/completions/{}": {"metadata": {}}, "/v1/conversations/{}/items": {"items": []}}


def _has_model(spec: dict[str, Any], path: str) -> bool:
    content = spec["paths"][path]["post"].get("requestBody", {}).get("content", {})
    schemas = [body["schema"] for kind, body in content.items() if kind == "application/json"]
    schemas += [one for schema in schemas for one in schema.get("anyOf", ())]
    return any("model" in schema.get("properties", {}) for schema in schemas)


def test_what_is_not_there_is_refused_by_every_route(tiny: Server) -> None:
    spec = tiny.get("/openapi.json").json()
    named = {path for path, methods in spec["paths"].items() if "post" in methods and _has_model(spec, path)}
    assert len(named) > 20, "schemas name their fields"
    assert named <= SMALLEST.keys(), f"a smallest body for {named - SMALLEST.keys()}"
    wrong: list[str] = []

    def look(reply: httpx.Response, *expected: int) -> None:
        assert_no_leak(reply.text)
        if reply.status_code not in expected:
            wrong.append(f"{reply.request.method} {reply.url}: {reply.status_code} {reply.text:.100}")

    for path, body in SMALLEST.items():
        refused = (404, 400) if path == "/infill" else (404,)  # for want of tokens for it
        look(tiny.post(body | {"model": "lost"}, path), *refused)
    for path, body, status in NAMING:
        look(tiny.post(body, path), status)
    for path in PAGES:
        look(tiny.get(f"{path}lost"), 400)
    for path, methods in spec["paths"].items():
        if "{" in path and not path.startswith("/api/blobs"):
            place = re.sub(r"\{\w+\}", "lost", path)
            for method in methods:
                body = POSTED.get(re.sub(r"\{\w+\}", "{}", path), {}) if method == "post" else None
                headers = tiny.headers
                look(
                    httpx.request(method, tiny.url + place, json=body, headers=headers, verify=NO_TLS, timeout=60), 404
                )
    assert not wrong, "\n".join(wrong)
    tiny.check_invariants()
