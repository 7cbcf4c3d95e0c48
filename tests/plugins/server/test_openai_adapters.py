"""LoRA adapters over HTTP: as models, in the list, loaded and unloaded by administrators."""

import asyncio

import pytest
from tests.helpers.lazy import lazy

from fwk.errors import EngineDead, InvalidRequest
from fwk.interfaces.dialect import AdapterCard
from fwk_kit.testing.fake_frontend import FakeFrontend

openai = lazy("openai")

LOAD, UNLOAD = ["/v1/load_lora_adapter", "/load_lora_adapter"], ["/v1/unload_lora_adapter", "/unload_lora_adapter"]


class LoRAFrontend(FakeFrontend):
    """Serves the adapters ``poet`` and ``org/clerk``; finds every other name but ``lost``."""

    def __init__(self):
        super().__init__()
        self.cards = {name: AdapterCard(name, name, 1_700_000_001) for name in ("poet", "org/clerk")}
        self.can_load = True
        self.calls = []

    @property
    def adapters(self):
        return self.cards

    @property
    def can_load_adapters(self):
        return self.can_load

    async def load_adapter(self, name, source):
        self.calls.append((name, source))
        if source == "lost":
            raise InvalidRequest("lora_path names no adapter", "lora_path")
        if source == "dead":
            raise EngineDead("the engine process ended")
        self.cards[name] = AdapterCard(name, source, 1_700_000_002)
        return self.cards[name]

    async def unload_adapter(self, name):
        self.calls.append(name)
        del self.cards[name]


@pytest.fixture
def frontend():
    return LoRAFrontend()


def adapters(frontend):
    return [item.adapter for item in frontend.items]


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        (None, ""),
        ("tiny", ""),
        ("poet", "poet"),
        ("tiny:poet", "poet"),
        ("org/clerk", "org/clerk"),
        ("tiny:org/clerk", "org/clerk"),
    ],
)
async def test_what_model_names(api, frontend, model, adapter):
    body = {"model": model} if model else {}
    replies = [await api.chat(**body), await api.complete(**body, prompt=["a", "b"])]
    chunks = await api.chat_stream(**body) + await api.complete_stream(**body)
    assert adapters(frontend) == [adapter] * 5
    assert {reply["model"] for reply in (*replies, *chunks)} == {model or "tiny"}
    assert (await api.post("/tokenize", {"prompt": "a", **body})).status_code == 200
    assert (await api.post("/detokenize", {"tokens": [97], **body})).status_code == 200


async def test_unknown_models(api, client, frontend):
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
        "/tokenize": {"prompt": "Hi"},
    }
    unknown = ("nobody", "tiny:", "tiny:nobody", "tiny:tiny", "poet:tiny", "poet:", ":poet", "tiny:tiny:poet", "Poet")
    for name in unknown:
        for path, body in bodies.items():
            error = await api.refused(path, body | {"model": name}, 404)
            assert (error["code"], error["param"]) == ("model_not_found", "model"), (path, name)
        reply = await client.get(f"/v1/models/{name}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "model_not_found"), name
    assert not frontend.items


async def test_a_served_name_with_a_colon(api, frontend):
    frontend.card = type(frontend.card)("tiny:7b", "p", 1, 4096, 258)
    for model in ("tiny:7b", "tiny:7b:poet", "poet"):
        await api.complete(model=model)
    assert adapters(frontend) == ["", "poet", "poet"]
    await api.refused("/v1/completions", {"prompt": "Hi", "model": "tiny:poet"}, 404)


async def test_lora_path(api, frontend):
    for body in ({}, {"model": "tiny"}, {"model": "poet"}, {"model": "tiny:poet"}):
        await api.complete(lora_path="poet", **body)
        await api.chat(lora_path="poet", **body)
    await api.complete(lora_path="", model="poet")
    await api.complete(lora_path=None, model="poet")
    assert set(adapters(frontend)) == {"poet"}
    for body, path in (
        ({"lora_path": "nobody"}, "/v1/completions"),
        ({"lora_path": "org/clerk", "model": "poet"}, "/v1/completions"),
        ({"lora_path": ["poet"]}, "/v1/completions"),
        ({"lora_path": "poet"}, "/tokenize"),
    ):
        assert (await api.refused(path, {"prompt": "Hi"} | body))["param"] == "lora_path"


async def test_the_list(api):
    base, poet, clerk = (await api.get("/v1/models", "ModelList"))["data"]
    assert (base["id"], base["root"], base["parent"]) == ("tiny", "tiny", None)
    assert poet == base | {"id": "poet", "root": "poet", "parent": "tiny", "created": 1_700_000_001}
    assert await api.get("/v1/models/poet", "Model") == poet
    assert (
        await api.get("/v1/models/tiny:org/clerk", "Model") == clerk == await api.get("/v1/models/org/clerk", "Model")
    )


@pytest.mark.parametrize(("load", "unload"), list(zip(LOAD, UNLOAD, strict=True)))
async def test_load_and_unload(api, frontend, load, unload):
    reply = await api.post(load, {"lora_name": "new", "lora_path": "some/folder", "pinned": False})
    assert (reply.status_code, reply.json()["success"]) == (200, True)
    assert reply.json()["loaded_adapters"] == {"poet": "poet", "org/clerk": "org/clerk", "new": "some/folder"}
    assert (await api.get("/v1/models/new", "Model"))["root"] == "some/folder"
    await api.complete(model="tiny:new")
    reply = await api.post(unload, {"lora_name": "new", "lora_int_id": 3})
    assert (reply.status_code, set(reply.json()["loaded_adapters"])) == (200, {"poet", "org/clerk"})
    await api.refused("/v1/completions", {"prompt": "Hi", "model": "new"}, 404)
    error = await api.refused(unload, {"lora_name": "new"}, 404)
    assert (error["code"], error["param"]) == ("adapter_not_found", "lora_name")
    assert frontend.calls == [("new", "some/folder"), "new"]


async def test_wrong_bodies(api, frontend):
    for path, body, param in (
        (LOAD, {}, "lora_name"),
        (LOAD, {"lora_name": "x"}, "lora_path"),
        (LOAD, {"lora_name": "", "lora_path": "x"}, "lora_name"),
        (LOAD, {"lora_name": 3, "lora_path": "x"}, "lora_name"),
        (LOAD, {"lora_name": "x", "lora_path": ["x"]}, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "x" * 4097}, "lora_path"),
        (LOAD, {"lora_name": "x", "lora_path": "x", "pinned": True}, "pinned"),
        (LOAD, {"lora_name": "x", "lora_path": "x", "load_inplace": True}, "load_inplace"),
        (UNLOAD, {}, "lora_name"),
        (UNLOAD, {"lora_name": None}, "lora_name"),
    ):
        for one in path:
            assert (await api.refused(one, body))["param"] == param, (one, body)
        assert not frontend.calls


async def test_errors_of_loading(api):
    assert (await api.refused(LOAD[0], {"lora_name": "x", "lora_path": "lost"}))["param"] == "lora_path"
    assert (await api.refused(LOAD[0], {"lora_name": "x", "lora_path": "dead"}, 503))["code"] == "engine_unavailable"
    assert (await api.refused(LOAD[0], b"[]"))["type"] == "invalid_request_error"
    reply = await api.post(LOAD[0], b"{}", headers={"content-type": "text/plain"})
    assert reply.status_code == 415, "a form of some web page must load nothing"


async def test_closed_servers(api, frontend):
    frontend.can_load = False
    for path in (*LOAD, *UNLOAD):
        error = await api.refused(path, {"lora_name": "poet", "lora_path": "x"})
        assert "--enable-lora and --lora-dirs" in error["message"]
    assert (await api.refused(UNLOAD[0], {"lora_name": "lost"}, 404))["param"] == "lora_name"
    assert not frontend.calls
    await api.complete(model="poet")


async def test_openais_client(base_url, frontend):
    async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in await client.models.list()] == ["tiny", "poet", "org/clerk"]
        names = ["tiny", "poet", "tiny:org/clerk"]
        message = {"role": "user", "content": "Hi"}
        replies = await asyncio.gather(*(client.chat.completions.create(model=m, messages=[message]) for m in names))
        assert [reply.model for reply in replies] == names
        assert sorted(adapters(frontend)) == ["", "org/clerk", "poet"]
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="nobody", prompt="Hi")
