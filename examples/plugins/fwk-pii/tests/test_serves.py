"""A server that redacts, with a real client."""

import asyncio
import urllib.error
from types import SimpleNamespace
from typing import Any

import pytest
from fwk_pii import PiiOptions
from fwk_pii.server import PiiFilter

from fwk.interfaces.dialect import GenerateInput, OutputDelta
from fwk.interfaces.feature import ServerPartContext
from fwk.testing import TINY, ask, serve_tiny
from fwk.types import SamplingParams


def part(**options: Any) -> PiiFilter:
    text: Any = SimpleNamespace(has_tokenizer=True)
    return PiiFilter(ServerPartContext("pii", "tiny", text, ask=asyncio.sleep, options=PiiOptions(**options)))


def replied(pieces: list[str]) -> tuple[list[str], list[list[int]]]:
    call = part().open(GenerateInput([1], SamplingParams()), "")

    async def run() -> list[OutputDelta]:
        last = len(pieces) - 1
        deltas = [OutputDelta(0, piece, [7], "stop" if i == last else None) for i, piece in enumerate(pieces)]
        return [await call.output(delta, None) for delta in deltas]

    out = asyncio.run(run())
    return [delta.text for delta in out], [delta.token_ids for delta in out]


def test_a_reply_keeps_back_what_may_become_more() -> None:
    texts, tokens = replied(["Ask ann", "@exam", "ple.org", " now, or ", "bob"])
    assert texts == ["Ask ", "", "", "[email] now, or ", "bob"]
    assert tokens == [[]] * 5


def test_sequences_of_a_request_have_nothing_to_do_with_one_another() -> None:
    call = part().open(GenerateInput([1], SamplingParams(), n=2), "")

    async def run() -> list[str]:
        pieces = [(0, "ann@ex"), (1, "bob "), (0, "ample.org")]
        sent = [(await call.output(OutputDelta(i, text, [1]), None)).text for i, text in pieces]
        return [*sent, (await call.output(OutputDelta(0, "", [], "stop"), None)).text]

    assert asyncio.run(run()) == ["", "bob ", "", "[email]"]


def test_prompts_are_redacted_and_log_probabilities_refused() -> None:
    with serve_tiny("--enable-pii-redaction", config=TINY) as url:
        texts = [
            ask(url, "/v1/completions", {"prompt": prompt, "max_tokens": 8, "temperature": 0})["choices"][0]["text"]
            for prompt in ("Mail ann.lee@example.org", "Mail [email]", "Mail ann.lee(at)example.org")
        ]
        assert texts[0] == texts[1] != texts[2]
        for stream in (False, True):
            with pytest.raises(urllib.error.HTTPError) as refused:
                ask(url, "/v1/completions", {"prompt": "x", "max_tokens": 2, "logprobs": 1, "stream": stream})
            assert refused.value.code == 400
            assert "log-probabilities would show" in refused.value.read().decode()
        assert "features.pii" in ask(url, "/server_info")["active"]


def test_an_unknown_kind_is_named() -> None:
    wrong = serve_tiny("--enable-pii-redaction", "--pii-kinds", "emial")
    with pytest.raises(RuntimeError, match=r"--pii-kinds.*'emial'"), wrong:
        pass
