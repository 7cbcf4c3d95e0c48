"""Reranking, scores, classes and vectors over HTTP, over a frontend whose vectors are known."""

import base64
import dataclasses
import math
import struct

import numpy as np
import pytest

from fwk.interfaces.dialect import DialectContext
from fwk_server.scoring.dialect import PoolingDialect
from fwk_server.scoring.scores import cosine, max_sim, probabilities

RERANK = {"query": "ab", "documents": ["abc", "b", {"text": "zz"}]}


@pytest.fixture
def dialect(frontend):
    return PoolingDialect(DialectContext(frontend))


@pytest.fixture
def serves(frontend):
    """Have the frontend serve another kind of model, with these vectors by length of the input."""

    def change(make, **fields):
        frontend.card = dataclasses.replace(frontend.card, **fields)

        async def embed(items):
            frontend.embedded += items
            return [np.array(make(item.token_ids), "<f4").tobytes() for item in items]

        frontend.embed = embed
        return frontend

    return change


@pytest.fixture
def cross_encoder(serves):
    return serves(lambda ids: [len(ids) - 8.0], task="classify", embedding_size=1, labels=("relevant",))


async def post(api, path, **body):
    reply = await api.post(path, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_a_cross_encoder_reads_query_and_document_as_one(api, cross_encoder, path):
    reply = await post(api, path, **RERANK, model="tiny")
    assert [item["index"] for item in reply["results"]] == [0, 2, 1]
    wanted = [sigmoid(n - 8) for n in (6, 5, 4)]
    assert [item["relevance_score"] for item in reply["results"]] == pytest.approx(wanted)
    assert reply["usage"]["total_tokens"] == 15
    assert all(len(item.token_ids) == 3 + n for item, n in zip(cross_encoder.embedded, (3, 1, 2), strict=True))
    texts = [item.get("document", {}).get("text") for item in reply["results"]]
    assert texts == ([None] * 3 if path == "/v2/rerank" else ["abc", "zz", "b"])


async def test_only_the_best_and_without_texts(api, cross_encoder):
    reply = await post(api, "/rerank", **RERANK, top_n=2, return_documents=False)
    assert [item["index"] for item in reply["results"]] == [0, 2]
    assert all("document" not in item for item in reply["results"])


@pytest.mark.parametrize(
    "config",
    [
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
        {"problem_type": "regression"},
    ],
)
async def test_a_score_stays_as_it_is_where_the_model_says_so(api, serves, config):
    serves(lambda ids: [len(ids)], task="classify", embedding_size=1, labels=("x",), config=config)
    reply = await post(api, "/v1/score", text_1="ab", text_2=["c", "cd"])
    assert [item["score"] for item in reply["data"]] == [4.0, 5.0]


async def test_as_many_texts_with_as_many(api, cross_encoder):
    reply = await post(api, "/score", text_1=["a", "abc"], text_2=["x", "y"])
    assert [item["score"] for item in reply["data"]] == pytest.approx([sigmoid(-5), sigmoid(-3)])
    for texts in (["a", "b", "c"], []):
        refused = await api.post("/score", {"text_1": texts, "text_2": ["x", "y"]})
        assert refused.status_code == 400, refused.text


async def test_vectors_are_compared_by_their_angle(api, serves):
    frontend = serves(lambda ids: [len(ids), 1.0], task="embed", embedding_size=2)
    reply = await post(api, "/v1/rerank", **RERANK)
    assert len(frontend.embedded) == 4  # the query once

    def angle(n):
        return (3 * n + 1) / math.hypot(3, 1) / math.hypot(n, 1)

    found = {item["index"]: item["relevance_score"] for item in reply["results"]}
    assert found == pytest.approx({0: angle(4), 1: angle(2), 2: angle(3)})


async def test_token_vectors_are_compared_one_by_one(api, serves):
    serves(lambda ids: [[t / 256, 1.0] for t in ids], task="embed", embedding_size=2, has_token_vectors=True)
    [item] = (await post(api, "/score", text_1="a", text_2="b"))["data"]
    query, document = ([[256 / 256, 1], [ord(c) / 256, 1]] for c in "ab")
    wanted = sum(max(a[0] * b[0] + a[1] * b[1] for b in document) for a in query)
    assert item["score"] == pytest.approx(wanted)
    [item] = (await post(api, "/pooling", input=[[1, 2, 3]]))["data"]
    assert item["data"] == [[1 / 256, 1.0], [2 / 256, 1.0], [3 / 256, 1.0]]


async def test_a_colbert_gets_its_markers(api, serves, frontend):
    config = {"architectures": ["HF_ColBERT"]}
    serves(lambda ids: [[1.0]] * len(ids), task="embed", embedding_size=1, has_token_vectors=True, config=config)
    await post(api, "/score", text_1="q", text_2="d")
    query, document = (frontend.text.decode(item.token_ids) for item in frontend.embedded)
    assert (query, document) == ("[unused0]q", "[unused1]d")


async def test_a_template_of_pairs_makes_the_prompt(api, cross_encoder, frontend):
    frontend.text.renders_pairs = True
    await post(api, "/rerank", query="q", documents=["d"])
    assert frontend.text.seen.messages == [{"role": "query", "content": "q"}, {"role": "document", "content": "d"}]
    assert frontend.text.decode(frontend.embedded[0].token_ids) == "[query]q[document]d"


async def test_classes(api, serves):
    frontend = serves(lambda ids: [0.0, len(ids), 1.0], task="classify", embedding_size=3, labels=("a", "b", "c"))
    reply = await post(api, "/classify", input=["x", "yy"])
    first, second = reply["data"]
    shares = np.exp([0, 2, 1]) / np.exp([0, 2, 1]).sum()
    assert first["probs"] == pytest.approx(shares.tolist())
    assert (first["label"], first["num_classes"], second["index"]) == ("b", 3, 1)
    [raw] = (await post(api, "/classify", input=[[5]], use_activation=False))["data"]
    assert (raw["label"], raw["probs"]) == ("b", [0.0, 1.0, 1.0])
    assert frontend.embedded[-1].token_ids == [5]
    refused = await api.post("/rerank", RERANK)
    assert refused.status_code == 400
    assert "sorts into 3 classes and scores no pairs: use /classify" in refused.text


def test_activations():
    logits = np.array([0.5, -1.0])
    many = probabilities(logits, {"problem_type": "multi_label_classification"})
    assert many == pytest.approx([sigmoid(0.5), sigmoid(-1)])
    assert probabilities(logits, {"problem_type": "regression"}).tolist() == [0.5, -1.0]
    assert probabilities(np.array([1000.0, 0.0]), {}).tolist() == [1.0, 0.0]


def test_comparisons_by_hand():
    first, second = np.array([[1.0, 0.0], [0.0, 2.0]]), np.array([[0.0, 3.0], [4.0, 0.0]])
    assert max_sim(first, second) == 4.0 + 6.0
    assert cosine(first[1:], second[:1]) == 1.0
    assert cosine(first[:1], np.zeros((1, 2))) == 0.0


async def test_vectors(api, serves):
    serves(lambda ids: [len(ids), 0.5], task="embed", embedding_size=2)
    [item] = (await post(api, "/pooling", input="abc"))["data"]
    assert item == {"index": 0, "object": "pooling", "data": [4.0, 0.5]}
    [item] = (await post(api, "/pooling", input="abc", encoding_format="base64"))["data"]
    assert struct.unpack("<2f", base64.b64decode(item["data"])) == (4.0, 0.5)


async def test_what_is_wrong_is_named(api, cross_encoder):
    for path, body, reason in (
        ("/rerank", {"query": "a", "documents": []}, "documents must be 1 to 2048 texts"),
        ("/rerank", {"query": "a", "documents": ["x", 3]}, "documents must be 1 to 2048 texts"),
        ("/rerank", {"query": "a", "documents": "x"}, "documents must be 1 to 2048 texts"),
        ("/rerank", {"documents": ["x"]}, "query"),
        ("/rerank", {**RERANK, "top_n": 0}, "top_n"),
        ("/rerank", {**RERANK, "model": "other"}, "'other' is not served here"),
        ("/score", {"text_1": "a", "text_2": [1]}, "text_2 must be a text or 1 to 2048 texts"),
        ("/pooling", {"input": []}, "input must not be empty"),
        ("/classify", {"input": {}}, "input must be a string"),
    ):
        reply = await api.post(path, body)
        assert reply.status_code in (400, 404), (path, body)
        assert reason in reply.json()["error"]["message"]
        assert not cross_encoder.embedded


async def test_a_model_that_generates_has_nothing_to_score_with(api):
    for path, body in (("/rerank", RERANK), ("/classify", {"input": "x"})):
        reply = await api.post(path, body)
        assert reply.status_code == 400
        assert "generates text and has nothing to classify with: serve a classifier" in reply.text


async def test_embeddings_are_cut_where_the_model_was_made_for_it(frontend):
    from fwk.errors import InvalidRequest
    from fwk_server._common.caller import Caller
    from fwk_server.openai import embeddings

    def card(**config):
        frontend.card = dataclasses.replace(frontend.card, task="embed", embedding_size=4, config=config)

    def ask(dimensions):
        return embeddings.prepare({"input": "ab", "dimensions": dimensions}, frontend, Caller())

    card()
    with pytest.raises(InvalidRequest, match="dimensions must be 4"):
        ask(2)
    card(matryoshka_dimensions=[2, 4])
    with pytest.raises(InvalidRequest, match="dimensions must be 2 or 4, not 3"):
        ask(3)
    card(is_matryoshka=True)
    with pytest.raises(InvalidRequest, match="1 to 4, not 5"):
        ask(5)
    [item] = (await embeddings.embed(ask(2), frontend))["data"]
    length = math.hypot(3, 256)
    assert item["embedding"] == pytest.approx([3 / length, 256 / length])
