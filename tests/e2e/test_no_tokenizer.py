"""Serving without a tokenizer: token ids in, token ids out, and a sentence for all that is text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import fwk
from fwk.errors import ConfigError, InvalidRequest
from tests.helpers.rig import Server
from tests.helpers.tiny import tiny_folder, tiny_llm

__all__ = ["tiny_folder", "tiny_llm"]
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def bare(tiny_model: Path, python_path: str) -> Iterator[Server]:
    server = Server(
        tiny_model, "--skip-tokenizer-init", "--log-requests", "--log-requests-level", "3", python_path=python_path
    )
    server.wait_ready()  # ``start`` would ask for text
    yield server
    server.close()


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_replies_hold_ids_and_no_text(bare: Server, tiny: Server) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    reply = post(bare, "/v1/completions", **asked).json()
    known = post(tiny, "/v1/completions", **asked, return_token_ids=True).json()
    (choice,), (expected,) = reply["choices"], known["choices"]
    assert choice["text"] == ""
    assert choice["token_ids"] == expected["token_ids"]
    assert choice["prompt_token_ids"] == PROMPT
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["token_logprobs"] == expected["logprobs"]["token_logprobs"]
    assert reply["usage"] == known["usage"]
    native = post(
        bare, "/generate", input_ids=PROMPT, sampling_params={"max_new_tokens": 6, "temperature": 0, "ignore_eos": True}
    )
    assert native.json()["output_ids"] == choice["token_ids"]


def test_streams_hold_ids(bare: Server) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    (whole,) = post(bare, "/v1/completions", **asked).json()["choices"]
    reply = post(bare, "/v1/completions", **asked, stream=True)
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    assert [i for chunk in chunks for choice in chunk["choices"] for i in choice["token_ids"]] == whole["token_ids"]


def test_a_stop_token_ends_the_output(bare: Server) -> None:
    asked = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    ids = post(bare, "/v1/completions", **asked).json()["choices"][0]["token_ids"]
    (choice,) = post(bare, "/v1/completions", **asked, stop_token_ids=[ids[2]]).json()["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[2]) + 1]
    assert choice["stop_reason"] == ids[2]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "text"}),
        ("/v1/completions", {"prompt": PROMPT, "stop": ["x"]}),
        ("/v1/completions", {"prompt": PROMPT, "stop_regex": ["x+"]}),
        ("/v1/completions", {"prompt": PROMPT, "bad_words": ["x"]}),
        ("/v1/completions", {"prompt": PROMPT, "echo": True}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/messages", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}),
        ("/generate", {"text": "hi"}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": PROMPT}),
    ],
)
def test_what_needs_text_is_refused(bare: Server, path: str, body: dict[str, Any]) -> None:
    reply = post(bare, path, **body)
    assert reply.status_code == 400
    assert "no tokenizer (--skip-tokenizer-init)" in reply.text


@pytest.mark.parametrize("field", [{"guided_regex": "a+"}, {"token_healing": True}])
def test_grammars_are_refused(bare: Server, field: dict[str, Any]) -> None:
    reply = post(bare, "/v1/completions", prompt=PROMPT, **field)
    assert reply.status_code == 400
    assert next(iter(field)) in reply.text


def test_python_and_options(tiny_llm: Any, tiny_folder: Any) -> None:
    llm = tiny_llm(skip_tokenizer_init=True)
    sampling = fwk.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    done = llm.generate([PROMPT], sampling)[0]
    assert (done.text, done.token_ids) == ("", tiny_llm().generate([PROMPT], sampling)[0].token_ids)
    with pytest.raises(InvalidRequest, match="give token ids instead of text"):
        llm.generate("text", sampling)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"chat_template": "x"}, "--chat-template is of no use with --skip-tokenizer-init"),
        ({"grammar_backend": "llguidance"}, "--grammar-backend llguidance: grammars are of text"),
    ]
    for options, why in cases:
        with pytest.raises(ConfigError, match=why):
            fwk.LLM(str(tiny_folder), load_format="dummy", skip_tokenizer_init=True, **options)
