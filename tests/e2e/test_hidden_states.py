"""Hidden states in replies, against transformers' last hidden states of the same tokens."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch

import fwk
from fwk.errors import ConfigError, InvalidRequest
from tests.helpers.lazy import lazy
from tests.helpers.rig import Server
from tests.helpers.tiny import save_llama

transformers = lazy("transformers")

PROMPTS = [[5, 6, 7, 8, 9, 10, 11] * 6, [100, 101, 102]]
SAMPLING = fwk.SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, return_hidden_states=True)
Reference = Callable[[list[int]], np.ndarray]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("hidden") / "model")


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    """[num_tokens, hidden_size] float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def states(token_ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            found: Any = model(torch.tensor([token_ids]), output_hidden_states=True)
        return found.hidden_states[-1][0].numpy()

    return states


def arrays(completion: fwk.Completion) -> np.ndarray:
    return np.stack([np.frombuffer(row, "<f4") for row in completion.hidden_states])


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"disable_cuda_graph": True},
    "captured steps": {},
    "chunks": {"chunked_prefill_size": 8, "max_prefill_tokens": 16},
    "pre-emption": {"max_total_tokens": 104, "page_size": 4, "prefix_cache": "none"},
    "drafts": {"speculative_algorithm": "standalone"},
    "int8 weights": {"quantization": "int8"},
    "tensor parallel": {"executor": "processes", "tensor_parallel_size": 2},
    "overlap": {"executor": "threaded"},
}


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_they_are_those_of_transformers(folder: Path, reference: Reference, name: str) -> None:
    options = dict(SETTINGS[name])
    if name == "drafts":
        options["speculative_draft_model_path"] = str(folder)
    asked: tuple[Any, ...] = (PROMPTS, SAMPLING, 2)
    if name == "pre-emption":
        asked = ([PROMPTS[0], PROMPTS[0][:30], PROMPTS[1]], msgspec.structs.replace(SAMPLING, max_tokens=40), 1)
    tolerance = 0.3 if name == "int8 weights" else 1e-4
    with fwk.LLM(
        str(folder), **{"max_total_tokens": 1024, "dtype": "float32", "enable_return_hidden_states": True, **options}
    ) as llm:
        for _ in range(2):  # the second time there is a prefix in the cache
            for done in llm.generate(*asked):
                expected = reference([*done.prompt_token_ids, *done.token_ids])[:-1]
                np.testing.assert_allclose(arrays(done), expected, atol=tolerance)
                assert done.cached_tokens == 0
                if name == "drafts":
                    assert done.accepted_draft_tokens > 0
        if name == "pre-emption":
            assert llm.engine.stats().preemptions > 0
        plain = llm.generate(PROMPTS[0], fwk.SamplingParams(max_tokens=2, temperature=0.0))[0]
        assert plain.hidden_states == []
        if "prefix_cache" not in options:
            assert plain.cached_tokens > 0


def test_a_text_that_ends_early_has_no_more_of_them(folder: Path, reference: Reference) -> None:
    with fwk.LLM(str(folder), dtype="float32", max_total_tokens=1024, enable_return_hidden_states=True) as llm:
        whole = llm.generate(PROMPTS[1], SAMPLING)[0]
        sampling = fwk.SamplingParams(
            max_tokens=20, temperature=0.0, return_hidden_states=True, stop_token_ids=[whole.token_ids[4]]
        )
        done = llm.generate(PROMPTS[1], sampling)[0]
        assert len(arrays(done)) == len(PROMPTS[1]) + len(done.token_ids) - 1 < len(arrays(whole))


def test_without_the_option_they_are_refused(folder: Path) -> None:
    why = "needs an engine started with --enable-return-hidden-states"
    with fwk.LLM(str(folder), max_total_tokens=256) as llm, pytest.raises(InvalidRequest, match=why):
        llm.generate(PROMPTS, SAMPLING)


def test_trees_of_drafts_are_refused(folder: Path) -> None:
    options: dict[str, Any] = {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3}
    with pytest.raises(ConfigError, match="verifies trees; leave --enable-return-hidden-states out"):
        fwk.LLM(str(folder), enable_return_hidden_states=True, **options)


@pytest.fixture(scope="module")
def server(folder: Path, python_path: str) -> Iterator[Server]:
    template = folder / "template.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    flags = (
        "--chat-template",
        str(template),
        "--enable-return-hidden-states",
        "--load-format",
        "safetensors",
        "--dtype",
        "float32",
    )
    server = Server(folder, *flags, python_path=python_path)
    yield server.start()
    server.close()


@pytest.mark.sweep
def test_generate_has_all_of_them(server: Server, reference: Reference) -> None:
    asked: dict[str, Any] = {
        "input_ids": PROMPTS,
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True},
        "return_hidden_states": True,
    }
    first, rest = [], []
    for reply, prompt in zip(server.post(asked, "/generate").json(), PROMPTS, strict=True):
        first, *rest = reply["meta_info"]["hidden_states"]
        expected = reference([*prompt, *reply["output_ids"]])[:-1]
        np.testing.assert_allclose(np.array([*first, *rest]), expected, atol=1e-4)
        assert (len(first), len(rest)) == (len(prompt), 4)
    streamed = server.post(asked | {"input_ids": PROMPTS[1], "stream": True}, "/generate").text
    frames = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert ["hidden_states" in frame["meta_info"] for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert frames[-1]["meta_info"]["hidden_states"] == [first, *rest]


@pytest.mark.sweep
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_openais_routes_have_the_last_one(server: Server, reference: Reference, path: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    asked |= {"prompt": PROMPTS[0]} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a"}]}
    reply = server.post(asked | {"return_hidden_states": True}, path).json()
    (choice,) = reply["choices"]
    ids = [*(choice.get("prompt_token_ids") or reply["prompt_token_ids"]), *choice["token_ids"]]
    np.testing.assert_allclose(choice["hidden_states"], reference(ids)[-2], atol=1e-4)
    (single,) = server.post(asked | {"return_hidden_states": True, "max_tokens": 1}, path).json()["choices"]
    assert single["hidden_states"] == []
    assert "hidden_states" not in server.post(asked, path).json()["choices"][0]
    streamed = server.post(asked | {"return_hidden_states": True, "stream": True}, path).text
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    last = chunks[-1]["choices"][0]
    assert last.get("delta", last)["hidden_states"] == choice["hidden_states"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("path", "more", "why"),
    [
        ("/v1/completions", {"use_beam_search": True, "best_of": 2}, "use_beam_search"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        ("/v1/completions", {"token_healing": True}, "token_healing"),
        ("/v1/completions", {"max_tokens": 400, "n": 64}, "16384 tokens at most"),
        ("/completion", {}, "/v1/completions"),
        ("/tokenize", {}, "hidden states are for"),
    ],
)
def test_what_cannot_be_had_alongside_is_refused(server: Server, path: str, more: dict[str, Any], why: str) -> None:
    reply: httpx.Response = server.post({"prompt": "a b", "return_hidden_states": True, **more}, path)
    assert reply.status_code == 400
    assert why in reply.text
    assert "return_hidden_states" in reply.text
