"""SGLang's ``/generate``, on the path of TGI's."""

from __future__ import annotations

import itertools
import json
import re

import httpx
import pytest
from fastapi import FastAPI

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import DialectContext
from fwk_kit.testing.fake_frontend import BOS, deltas_of, score
from fwk_server.tgi import TGIOptions
from fwk_server.tgi.dialect import TGIDialect

TEXT = "Grüße 0 🙂!"
IDS = list(TEXT.encode())


@pytest.fixture
def app(frontend, whole_app) -> FastAPI:
    return whole_app(TGIDialect(DialectContext(frontend)))


@pytest.fixture
def post(client):
    async def post(status=200, **fields):
        reply = await client.post("/generate", json=fields)
        assert reply.status_code == status, reply.text
        return reply.json()

    return post


async def test_what_features_add_is_told(post, frontend):
    def told(item):
        first, *rest = deltas_of(item, "ab")
        first.reply = {"mine": {"rows": [1]}}
        return [[first], rest]

    frontend.script = told
    assert (await post(text="Hi"))["meta_info"]["features"] == {"mine": {"rows": [1]}}


async def test_a_text_is_gone_on_with(post, frontend):
    reply = await post(text="Hi", rid="mine")
    assert (reply["text"], reply["output_ids"]) == (TEXT, IDS)
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "stop", "matched": IDS[-1]}
    assert (meta["id"], meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (
        "mine",
        3,
        len(IDS),
        4,
    )
    assert meta["e2e_latency"] >= 0
    sampling = frontend.items[-1].sampling
    assert (sampling.max_tokens, sampling.temperature) == (128, 1.0)
    cut = await post(input_ids=[72, 105], sampling_params={"max_new_tokens": 2, "temperature": 0, "sampling_seed": 5})
    assert cut["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert frontend.items[-1].prompt_token_ids == [72, 105]
    assert (frontend.items[-1].sampling.seed, frontend.items[-1].sampling.temperature) == (5, 0)


async def test_several_texts_have_settings_of_their_own(post, frontend):
    settings = [{"max_new_tokens": 2}, {"max_new_tokens": 3, "stop": ["x"]}]
    replies = await post(text=["a", "b"], sampling_params=settings, rid=["one", "two"])
    assert [reply["meta_info"]["id"] for reply in replies] == ["one", "two"]
    assert [len(reply["output_ids"]) for reply in replies] == [2, 3]
    assert [item.prompt_token_ids for item in frontend.items] == [[BOS, 97], [BOS, 98]]
    assert frontend.items[1].sampling.stop == ["x"]
    several = await post(text="Hi", sampling_params={"n": 2})
    assert [reply["text"] for reply in several] == [TEXT, TEXT.replace("0", "1")]
    assert isinstance(await post(text=["a"]), list)


async def test_log_probabilities_are_rows(post):
    meta = (await post(text="Hi", return_logprob=True, sampling_params={"max_new_tokens": 2}))["meta_info"]
    assert meta["input_token_logprobs"] == []
    assert meta["output_token_logprobs"] == [[score(token, 0).logprob, token, None] for token in IDS[:2]]
    asked = {"return_logprob": True, "logprob_start_len": 1, "top_logprobs_num": 2, "return_text_in_logprobs": True}
    meta = (await post(text="Hi!", **asked, sampling_params={"max_new_tokens": 1}))["meta_info"]
    assert meta["input_token_logprobs"] == [
        [None, 72, "H"],
        [score(105, 0).logprob, 105, "i"],
        [score(33, 0).logprob, 33, "!"],
    ]
    assert [len(row or []) for row in meta["input_top_logprobs"]] == [0, 2, 2]
    assert meta["output_top_logprobs"] == [[[-0.25, 72, "H"], [-1.25, 73, "I"]]]
    whole = (await post(text="Hi", return_logprob=True, logprob_start_len=0))["meta_info"]
    assert [row[1] for row in whole["input_token_logprobs"]] == [BOS, 72, 105]


async def test_a_stream_has_the_text_so_far(client, frontend):
    reply = await client.post("/generate", json={"text": ["a", "b"], "stream": True})
    *events, done, rest = reply.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    frames = [json.loads(event.removeprefix("data: ")) for event in events]
    for index in (0, 1):
        mine = [frame for frame in frames if frame["index"] == index]
        assert [frame["meta_info"]["finish_reason"] is None for frame in mine] == [True] * (len(mine) - 1) + [False]
        assert all(later["text"].startswith(one["text"]) for one, later in itertools.pairwise(mine))
        assert mine[-1]["text"] == TEXT
    frontend.script = lambda item: [[deltas_of(item, "ab")[0]], RequestFailed("bad luck")]
    broken = await client.post("/generate", json={"text": "a", "stream": True})
    assert json.loads(broken.text.split("\n\n")[1].removeprefix("data: "))["error"]["message"] == "bad luck"


async def test_wrong_bodies_are_refused_in_sglangs_shape(post, frontend):
    for fields, sentence in (
        ({"text": 3}, "text must be a string"),
        ({"text": "a", "input_ids": [1]}, "either text or input_ids"),
        ({"sampling_params": {}}, "either text or input_ids"),
        ({"input_ids": [["AAA"]]}, "input_ids must be a list of token ids"),
        ({"input_ids": [[[1]]]}, "input_ids must be a list of token ids"),
        ({"input_ids": [1, "a"]}, "input_ids must be a list of token ids"),
        ({"text": []}, "text must hold 1 to"),
        ({"text": ["a"], "sampling_params": [{}, {}]}, "sampling_params has 2 entries for 1 prompts"),
        ({"text": "a", "sampling_params": {"max_new_token": 3}}, "max_new_token.*did you mean max_new_tokens"),
        ({"text": "a", "sampling_params": {"top_p": 3}}, "top_p"),
        ({"text": "a", "image_data": "x"}, "image_data is not supported"),
        ({"text": "a", "nothing_such": 1}, "nothing_such is not supported"),
        ({"text": "a", "custom_logit_processor": "x"}, "custom_logit_processor"),
    ):
        error = (await post(400, **fields))["error"]
        assert re.search(sentence, error["message"]), error
        assert frontend.items == []


async def test_a_failure_is_told(post, frontend):
    frontend.script = lambda item: [RequestFailed("bad luck")]
    assert (await post(500, text="a"))["error"]["message"] == "bad luck"


async def test_a_stream_may_have_only_what_is_new(frontend, whole_app):
    options = TGIOptions(stream_output=True, weight_version="v7")
    app = whole_app(TGIDialect(DialectContext(frontend, options=options)))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        reply = await client.post("/generate", json={"text": "a", "stream": True})
        whole = (await client.post("/generate", json={"text": "a"})).json()
    frames = [json.loads(line.removeprefix("data: ")) for line in reply.text.split("\n\n")[:-2]]
    assert whole["meta_info"]["weight_version"] == frames[0]["meta_info"]["weight_version"] == "v7"
    assert len(frames) > 1
    assert "".join(frame["text"] for frame in frames) == TEXT
    assert [token for frame in frames for token in frame["output_ids"]] == whole["output_ids"]
    assert frames[-1]["meta_info"]["completion_tokens"] == len(whole["output_ids"])


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
async def test_what_is_served_is_told(client, path):
    told = (await client.get(path)).json()
    assert (told["model_path"], told["is_generation"], told["weight_version"]) == ("tiny", True, "default")


async def test_head_is_answered_where_get_is(client):
    reply = await client.head("/info")
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/json")
    wrong = await client.put("/info")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
