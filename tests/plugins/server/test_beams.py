"""``use_beam_search`` and ``best_of``: what is asked of the engine, and what goes back."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from fwk.errors import RequestFailed
from fwk.interfaces.dialect import OutputDelta
from fwk.interfaces.feature import ServerPartContext
from fwk.types import TokenLogprobs
from fwk_features.beam_search.server import BeamSearchServer
from fwk_kit.testing.fake_frontend import EOS, deltas_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
LETTERS = b"abcd"


def scores_after(token_ids: list[int]) -> np.ndarray:
    """Log-probabilities of a, b, c, d and the end after a text: any, but always the same."""
    drawn = np.random.default_rng(token_ids).normal(size=5)
    return drawn - math.log(np.exp(drawn).sum())


IDS = [*LETTERS, EOS]


@pytest.fixture
def model(frontend):
    """A frontend whose model has five tokens."""

    def script(item):
        assert item.sampling.max_tokens == 1
        ranked = sorted(zip(IDS, scores_after(item.prompt_token_ids).tolist(), strict=True), key=lambda p: -p[1])
        entry = TokenLogprobs(ranked[0][0], ranked[0][1], 1, ranked[: item.sampling.logprobs])
        return [[OutputDelta(0, "?", [ranked[0][0]], "length", logprobs=[entry], num_output_tokens=1)]]

    frontend.script = script
    context = ServerPartContext("beam_search", "tiny", frontend.text, frontend.check, frontend=frontend)
    frontend.parts = [BeamSearchServer(context)]
    frontend.card = type(frontend.card)(
        **{name: getattr(frontend.card, name) for name in frontend.card.__slots__ if name != "end_token_ids"},
        end_token_ids=(EOS,),
    )
    return frontend


def all_texts(prompt: list[int], length: int) -> list[tuple[float, list[int]]]:
    """Every text of at most ``length`` tokens with its mean log-probability, best first."""
    found, running = [], [(0.0, [])]
    for _ in range(length):
        grown = []
        for total, ids in running:
            row = scores_after(prompt + ids)
            for token, score in zip(IDS, row.tolist(), strict=True):
                is_done = token == EOS or len(ids) + 1 == length
                (found if is_done else grown).append((total + score, [*ids, token]))
        running = grown
    return sorted(((total / len(ids), ids) for total, ids in found), reverse=True)


async def test_wide_beams_find_the_best_text_there_is(api, model):
    best = all_texts([256, 72, 105], 2)
    reply = await api.complete(use_beam_search=True, n=3, best_of=10, max_tokens=2, return_token_ids=True, logprobs=1)
    assert [choice["token_ids"] for choice in reply["choices"]] == [ids for _, ids in best[:3]]
    for choice, (score, ids) in zip(reply["choices"], best, strict=False):
        assert np.mean(choice["logprobs"]["token_logprobs"]) == pytest.approx(score)
        assert choice["finish_reason"] == ("stop" if ids[-1] == EOS else "length")
        assert choice["text"] == bytes(token for token in ids if token != EOS).decode()
    assert reply["usage"]["completion_tokens"] == sum(len(ids) for _, ids in best[:3])
    assert len(model.items[1:]) <= 10  # one step of all that continue
    assert all(item.n == 1 and item.sampling.temperature == 0 for item in model.items)


async def test_a_chat_and_a_stream_search_too(api, client, model):
    whole = await api.chat(use_beam_search=True, n=2, max_tokens=3)
    assert len(whole["choices"]) == 2
    body = {"prompt": "Hi", "use_beam_search": True, "n": 2, "max_tokens": 3, "stream": True}
    streamed = await client.post(COMPLETIONS, json=body)
    plain = await api.complete(use_beam_search=True, n=2, max_tokens=3)
    frames = [json.loads(line[6:]) for line in streamed.text.split("\n\n") if line.startswith("data: {")]
    texts = ["", ""]
    for frame in frames:
        for choice in frame["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in plain["choices"]]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 11}, "best_of"),
        ({"top_p": 0.9}, "top_p"),
        ({"temperature": 0.7}, "temperature"),
        ({"stop": ["x"]}, "stop"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"early_stopping": 3}, "early_stopping"),
        ({"length_penalty": 1000}, "length_penalty"),
        ({"n": 4, "best_of": 3}, "best_of"),
        ({"use_beam_search": False, "length_penalty": 2}, "length_penalty"),
    ],
)
async def test_what_beams_cannot_do_is_refused(api, model, fields, param):
    body = {"prompt": "Hi", "use_beam_search": True, "max_tokens": 3} | fields
    assert (await api.refused(COMPLETIONS, body))["param"] == param
    assert model.items == []


async def test_an_error_ends_the_search(client, model):
    good = model.script
    model.script = lambda item: [RequestFailed("bad luck")] if len(model.items) > 2 else good(item)
    reply = await client.post(COMPLETIONS, json={"prompt": "Hi", "use_beam_search": True, "n": 3, "max_tokens": 9})
    assert reply.status_code == 500
    assert "bad luck" in reply.text
    assert model.num_aborted + model.num_finished == len(model.items)


async def test_the_best_of_several_samples_go_back(api, frontend):
    def script(item):
        assert (item.n, item.sampling.logprobs) == (3, 0)
        for index, text in enumerate(("zz", "aa", "mm")):
            yield deltas_of(item, text, index=index)[:1]
            yield deltas_of(item, text, index=index)[1:]

    frontend.script = script
    reply = await api.complete(n=2, best_of=3)
    assert [choice["text"] for choice in reply["choices"]] == ["aa", "mm"]  # the scripted scores fall with the letter
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert reply["choices"][0]["logprobs"] is None
    assert (await api.chat(best_of=3))["choices"][0]["message"]["content"] == "aa"
