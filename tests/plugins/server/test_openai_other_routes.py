"""/v1/models, /tokenize, /detokenize, and the documentation of the routes."""

from types import SimpleNamespace

import httpx
import pytest

from fwk import __version__


async def test_models_are_listed(api, client):
    reply = await api.get("/v1/models", "ModelList")
    [model] = reply["data"]
    assert model == await api.get("/v1/models/tiny", "Model")
    assert (model["id"], model["max_model_len"], model["root"]) == ("tiny", 4096, "tiny")


@pytest.mark.parametrize("name", ["other", "org/other", "tiny/x", "%0d%0a", "..%2ftiny"])
async def test_other_models_are_not_found(api, client, name):
    reply = await client.get(f"/v1/models/{name}")
    assert reply.status_code == 404
    assert api.check("Error", reply.json())["error"]["code"] == "model_not_found"


async def test_a_model_name_may_hold_slashes(api, frontend):
    frontend.card = type(frontend.card)("org/tiny", "p", 1, 10, 258)
    assert (await api.get("/v1/models/org/tiny", "Model"))["id"] == "org/tiny"


async def test_tokenize_and_back(api):
    reply = (await api.post("/tokenize", {"prompt": "Hé", "return_token_strs": True})).json()
    assert reply == {
        "count": 4,
        "max_model_len": 4096,
        "tokens": [256, 72, 0xC3, 0xA9],
        "token_strs": ["<bos>", "H", "\ufffd", "\ufffd"],
    }
    back = (await api.post("/detokenize", {"tokens": reply["tokens"]})).json()
    assert back == {"prompt": "<bos>Hé", "content": "<bos>Hé"}
    as_llama = {"content": "H", "add_special": True}
    assert (await api.post("/tokenize", as_llama)).json()["tokens"] == [256, 72]
    assert (await api.post("/tokenize", {"content": "H"})).json()["tokens"] == [72]
    assert (await api.post("/tokenize", {"prompt": "H", "add_special_tokens": False})).json()["tokens"] == [72]
    assert (await api.post("/tokenize", {"prompt": ""})).json()["count"] == 1


async def test_names_of_special_tokens(client, frontend):
    """As lm-eval's remote tokenizer asks before it cuts texts; nothing of the template or the vocabulary is told."""
    bare = (await client.get("/tokenizer_info")).json()
    assert (bare["eos_token"], bare["model_max_length"]) == (None, frontend.card.max_model_len)
    config = {"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>", "tokenizer_class": "Tiny"}
    config |= {"chat_template": "secret", "pad_token": 3}
    checkpoint = SimpleNamespace(tokenizer_config=lambda: config)
    frontend.__class__ = type(
        "Described", (type(frontend),), {"served_weights": SimpleNamespace(checkpoint=checkpoint)}
    )
    told = (await client.get("/tokenizer_info")).json()
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "pad_token": None}
    assert told == {"tokenizer_class": "Tiny", "model_max_length": frontend.card.max_model_len, **named}


async def test_messages_are_tokenized_as_chat_would(api, frontend):
    messages = [{"role": "user", "content": "Hi"}]
    await api.chat(messages=messages)
    reply = (await api.post("/tokenize", {"messages": messages})).json()
    assert reply["tokens"] == frontend.items[0].prompt_token_ids
    without = (await api.post("/tokenize", {"messages": messages, "add_generation_prompt": False})).json()
    assert without["count"] < reply["count"]


async def test_requests_are_rendered_to_what_would_be_computed(api, frontend):
    """For routers: ids alone, and nothing is generated."""
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "tools": [], "cache_salt": "mine"}
    await api.chat(**chat)
    reply = (await api.post("/v1/chat/completions/render", chat | {"model": "tiny"})).json()
    assert reply["token_ids"] == frontend.items[0].prompt_token_ids
    assert (reply["model"], reply["cache_salt"], reply["features"]) == ("tiny", "mine", None)
    rendered = (await api.post("/v1/completions/render", {"prompt": ["H", "HI"]})).json()
    assert [one["token_ids"] for one in rendered] == [[256, 72], [256, 72, 73]]
    assert len(frontend.items) == 1
    wrong = await api.post("/v1/chat/completions/render", {"messages": [{"role": "king", "content": "Hi"}]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "messages[0].role")


async def test_wrong_token_requests(api):
    for path, body, param in (
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {"tokens": [1, 2.5]}, "tokens[1]"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**63]}, "tokens"),
    ):
        assert (await api.refused(path, body))["param"] == param, (path, body)


async def test_big_texts_are_tokenised_off_the_loop(api, frontend):
    await api.post("/tokenize", {"prompt": "a" * 100_000})
    assert frontend.num_blocking == 1


async def test_the_routes_document_their_bodies(client):
    document = (await client.get("/openapi.json")).json()
    for path, field in [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/tokenize", "prompt"),
        ("/detokenize", "tokens"),
    ]:
        post = document["paths"][path]["post"]
        assert field in post["requestBody"]["content"]["application/json"]["schema"]["properties"]
        assert post["description"]


async def test_the_version_is_told(client):
    assert (await client.get("/version")).json() == {"version": __version__}


@pytest.mark.parametrize(
    ("method", "path", "likely"),
    [
        ("POST", "/chat/completions", "/v1/chat/completions"),
        ("POST", "/v1/v1/chat/completions", "/v1/chat/completions"),
        ("POST", "/openai/v1/embeddings/", "/v1/embeddings"),
        ("GET", "/models/x/y", "/v1/models/x/y"),
        ("GET", "/v1/v1/models/", "/v1/models"),
        ("GET", "/v1/health/", "/health"),
        ("GET", "/v1/modelz", None),
        ("GET", "/v1", None),
        ("GET", f"/{'x' * 300}", None),
    ],
)
async def test_another_base_address_is_told_the_one_to_use(whole_app, dialect, method, path, likely):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(whole_app(dialect)), base_url="http://test") as http:
        reply = await http.request(method, path, json={} if method == "POST" else None)
        named = (await http.get("/v1/models/")).json()
    assert reply.status_code == 404
    assert (f": use {likely} " in reply.text) if likely else (": use" not in reply.text)
    assert named["object"] == "list", "no model without a name"


async def test_no_address_is_redirected_for_a_slash(whole_app, dialect):
    """Clients that follow no redirect, and proxies whose address it does not name, need another answer."""
    app = whole_app(dialect)
    routes = {(route.path, method) for route in app.routes for method in route.methods}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for path, method in sorted(route for route in routes if "{" not in route[0] and len(route[0]) > 1):
            reply = await http.request(method, f"{path}/", json={} if method == "POST" else None)
            assert reply.status_code == 404 or (path, reply.status_code) == ("/v1/models", 200), (method, path)
            assert f"use {path} " in reply.text or method == "HEAD" or reply.status_code == 200, (
                method,
                path,
                reply.text,
            )
