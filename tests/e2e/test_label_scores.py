"""SGLang's /v1/score of a generating model, against transformers' probabilities of the next token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tests.helpers.lazy import lazy
from tests.helpers.rig import Server
from tests.helpers.tiny import save_llama

transformers = lazy("transformers")

QUERY = [5, 6, 7, 8, 9, 10, 11] * 6
ITEMS = [[20, 21], [30], [40, 41, 42, 43]]
LABELS = [65, 7, 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("scores") / "model")


@pytest.fixture(scope="module")
def server(folder: Path, python_path: str) -> Iterator[Server]:
    template = folder / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = ("--chat-template", str(template), "--load-format", "safetensors", "--dtype", "float32")
    server = Server(folder, *flags, python_path=python_path)
    yield server.start()
    server.close()


def expected(folder: Path, prompts: list[list[int]], is_softmax: bool) -> np.ndarray:
    """[num_prompts, num_labels]."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        rows = [model(torch.tensor([ids])).logits[0, -1].double() for ids in prompts]
    if is_softmax:
        return np.stack([row[LABELS].softmax(0).numpy() for row in rows])
    return np.stack([row.softmax(0)[LABELS].numpy() for row in rows])


@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize("item_first", [False, True])
def test_scores_are_the_labels_probabilities(server: Server, folder: Path, is_softmax: bool, item_first: bool) -> None:
    asked: dict[str, Any] = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
    reply = server.post(asked | {"apply_softmax": is_softmax, "item_first": item_first}, "/v1/score")
    assert reply.status_code == 200, reply.text
    prompts = [item + QUERY if item_first else QUERY + item for item in ITEMS]
    found = reply.json()
    np.testing.assert_allclose(found["scores"], expected(folder, prompts, is_softmax), rtol=1e-3, atol=1e-7)
    assert found["object"] == "scoring"
    assert found["usage"]["prompt_tokens"] == sum(map(len, prompts))


def test_texts_are_joined_and_tokenised(server: Server, folder: Path) -> None:
    asked: dict[str, Any] = {"query": "Is it good? ", "items": ["yes", "not at all"], "label_token_ids": LABELS}
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode("Is it good? " + item).ids for item in ("yes", "not at all")]
    found = server.post(asked, "/score").json()["scores"]
    np.testing.assert_allclose(found, expected(folder, prompts, False), rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"label_token_ids": None}, "label_token_ids is required"),
        ({"label_token_ids": []}, "label_token_ids must hold"),
        ({"label_token_ids": [10**6]}, "outside the vocabulary"),
        ({"label_token_ids": ["a"]}, "must hold token ids"),
        ({"items": None}, "items is required"),
        ({"items": []}, "items must be"),
        ({"items": ["a"]}, "arrays of token ids"),
        ({"query": "a"}, "items must be a text"),
        ({"items": [[1]] * 2000, "label_token_ids": [1, 2, 3]}, "more than 4096 scores"),
        ({"items": [[1] * 600]}, "query and items[0]"),
        ({"text_1": "a"}, "text_1 is for scores of pairs"),
    ],
)
def test_what_is_wrong_is_told(server: Server, changes: dict[str, Any], why: str) -> None:
    asked = {"query": QUERY, "items": ITEMS, "label_token_ids": LABELS} | changes
    reply = server.post({name: value for name, value in asked.items() if value is not None}, "/v1/score")
    assert reply.status_code == 400
    assert why in reply.text
