"""POST /v1/embeddings: both encodings, order, refusals, and OpenAI's own client over sockets."""

import asyncio
import base64
import contextlib
import dataclasses
import struct

import httpx
import pytest
from tests.helpers.lazy import lazy

from fwk.errors import EngineDead, RequestFailed

openai = lazy("openai")

PATH = "/v1/embeddings"
TENTH = struct.unpack("<f", struct.pack("<f", 0.1))[0]


@pytest.fixture
def frontend(frontend):
    """Serves a model of embeddings; the last test of a kind turns it back."""
    frontend.card = dataclasses.replace(frontend.card, task="embed", embedding_size=4)
    return frontend


async def vectors(api, **body):
    reply = await api.post(PATH, body)
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert found["object"] == "list"
    assert [item["index"] for item in found["data"]] == list(range(len(found["data"])))
    assert {item["object"] for item in found["data"]} == {"embedding"}
    return [item["embedding"] for item in found["data"]], found


async def test_one_text(api):
    [vector], reply = await vectors(api, input="ab", model="tiny")
    assert vector == [3.0, 256.0, 98.0, TENTH]
    assert reply["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert reply["model"] == "tiny"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["a", "bcd"], [[2, 256, 97], [4, 256, 100]]),
        ([7, 8, 9], [[3, 7, 9]]),
        ([[7], [8, 9]], [[1, 7, 7], [2, 8, 9]]),
    ],
)
async def test_kinds_of_input(api, given, expected):
    found, reply = await vectors(api, input=given)
    assert [vector[:3] for vector in found] == expected
    assert reply["usage"]["prompt_tokens"] == sum(vector[0] for vector in expected)


async def test_base64_holds_the_same_numbers(api):
    floats, _ = await vectors(api, input=["a", "bcd"], encoding_format="float")
    texts, _ = await vectors(api, input=["a", "bcd"], encoding_format="base64")
    assert [list(struct.unpack("<4f", base64.b64decode(text))) for text in texts] == floats


async def test_dimensions_of_its_own(api):
    assert len((await vectors(api, input="a", dimensions=4))[0][0]) == 4


async def test_without_special_tokens(api):
    assert (await vectors(api, input="ab", add_special_tokens=False))[0][0][0] == 2


async def test_what_observers_are_told(api, frontend):
    headers = {"x-request-id": "mine", "traceparent": "00-x"}
    await api.post(PATH, {"input": "a", "priority": 3}, headers=headers)
    [item] = frontend.embedded
    assert (item.label, dict(item.trace), item.priority) == ("mine", {"traceparent": "00-x"}, 3)


async def test_wrong_requests(api, frontend):
    for body, param in (
        ({}, "input"),
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", 5]}, "input[1]"),
        ({"input": [5, "a"]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1], [258]]}, "input[1]"),
        ({"input": [-1]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": "a" * 5000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": "4"}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "priority": 2**31}, "priority"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ):
        assert (await api.refused(PATH, body))["param"] == param, body
        assert not frontend.embedded


async def test_another_model_is_not_found(api):
    await api.refused(PATH, {"input": "a", "model": "other"}, status=404)


async def test_a_model_does_what_it_is_for(api, frontend):
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
        "/v1/completions": {"prompt": "Hi"},
    }
    for path, body in bodies.items():
        error = await api.refused(path, body)
        assert error["message"] == "the model 'tiny' makes embeddings and generates no text: use /v1/embeddings"
    (model,) = (await api.get("/v1/models", "ModelList"))["data"]
    assert (model["task"], model["capabilities"]) == ("embed", ["embedding"])
    frontend.card = dataclasses.replace(frontend.card, task="generate", embedding_size=0)
    error = await api.refused(PATH, {"input": "a"})
    assert "the model 'tiny' generates text and makes no embeddings" in error["message"]
    (model,) = (await api.get("/v1/models", "ModelList"))["data"]
    assert (model["task"], model["capabilities"][:2]) == ("generate", ["completion", "tools"])


@pytest.mark.parametrize(("error", "status"), [(EngineDead("stopped"), 503), (RequestFailed("bad"), 500)])
async def test_failures(api, frontend, error, status):
    frontend.embed_error = error
    assert (await api.refused(PATH, {"input": "a"}, status=status))["message"] == str(error)


async def test_a_client_that_goes_away_aborts(base_url, frontend):
    frontend.embed_seconds = 30.0
    async with httpx.AsyncClient() as http:
        with contextlib.suppress(httpx.ReadTimeout):
            await http.post(base_url + PATH, json={"input": ["a", "b"]}, timeout=0.3)
    for _ in range(200):
        if frontend.num_aborted:
            break
        await asyncio.sleep(0.01)
    assert frontend.num_aborted == 2


@pytest.mark.gate(1)
@pytest.mark.parametrize("arguments", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
async def test_openais_own_client(base_url, arguments):
    """It asks for base64 when it is told nothing, and decodes that."""
    async with openai.AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as client:
        reply = await client.embeddings.create(model="tiny", input=["ab", "abc"], **arguments)
        expected = [[3.0, 256.0, 98.0, TENTH], [4.0, 256.0, 99.0, TENTH]]
        found = [item.embedding for item in reply.data]
        if arguments.get("encoding_format") == "base64":  # asked for, so handed over as it came
            found = [list(struct.unpack("<4f", base64.b64decode(text))) for text in found]
        assert found == [pytest.approx(vector) for vector in expected]
        assert reply.usage.total_tokens == 7
        with pytest.raises(openai.BadRequestError, match="dimensions must be 4"):
            await client.embeddings.create(model="tiny", input="a", dimensions=2)
