"""Log-probabilities of prompts: once a request, whole after a pre-emption, and where the feature is not installed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import EmbedInput, GenerateInput, OutputDelta
from fwk.interfaces.feature import EnginePartContext
from fwk.types import NewSequence, Request, TokenLogprobs
from fwk_features.prompt_logprobs import PromptScores, Scored, StepScores, features
from fwk_features.prompt_logprobs.engine import PromptLogprobsEngine
from fwk_features.prompt_logprobs.server import PromptLogprobsCall, PromptLogprobsServer
from fwk_features.prompt_logprobs.worker import PromptLogprobsWorker
from fwk_kit.testing.serving import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 512, "dtype": "float32"}
ASKS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prompt_logprobs=1)
ASKED = msgspec.Raw(msgspec.msgpack.encode(Scored(1)))


def part() -> PromptLogprobsEngine:
    [spec] = features()
    return PromptLogprobsEngine(EnginePartContext(spec.name, lambda *args: [], spec.wire))


def sequence(num_prompt: int, index: int = 0) -> Any:
    request = Request(
        request_id="a", prompt_token_ids=[7] * num_prompt, sampling=ASKS, features={"prompt_logprobs": ASKED}
    )
    return SimpleNamespace(key=("a", index), num_prompt_tokens=num_prompt, request=request)


def scores(*token_ids: int) -> StepScores:
    entries = [TokenLogprobs(token, -1.0, 1) for token in token_ids]
    return StepScores(len(entries), msgspec.Raw(msgspec.msgpack.encode(entries)))


def test_the_first_sequence_is_scored_once() -> None:
    engine, own, other = part(), sequence(5), sequence(5, 1)
    assert (engine.new(own), engine.new(other)) == (ASKED, None)
    assert (engine.matchable(own, 4), engine.matchable(other, 4)) == (0, 4)
    engine.took(own, scores(1, 2))
    assert engine.matchable(own, 4) == 0
    engine.preempted(own)  # it starts over, and so do its scores
    assert engine.new(own) == ASKED
    first, second = scores(1, 2), scores(3, 4)
    engine.took(own, first)
    engine.took(own, second)
    assert (engine.new(own), engine.matchable(own, 4)) == (None, 4)
    engine.preempted(own)
    assert engine.event(own) == PromptScores([first.entries, second.entries])
    assert engine.event(own) is None
    assert engine.new(own) is None
    engine.forget(own)
    assert engine.new(own) == ASKED


def test_a_prompt_of_one_token_has_nothing_to_score() -> None:
    assert part().new(sequence(1)) is None


def test_an_encoders_prompt_has_none() -> None:
    request = Request(request_id="a", prompt_token_ids=[1, 2], sampling=ASKS, num_encoder_tokens=1)
    with pytest.raises(InvalidRequest, match="so its tokens have no log-probabilities"):
        part().check(request)


def test_a_sequence_that_ends_amid_its_prompt_is_forgotten_in_its_slot() -> None:
    """The next one there asks for nothing: its steps read no hidden states."""
    worker = PromptLogprobsWorker(SimpleNamespace())  # type: ignore[arg-type]
    worker.begin(NewSequence(3, [1, 2, 3, 4], 4, 0, [], ASKS, 0), Scored(1))
    assert worker.wants_hidden(np.array([2, 3]))
    worker.forget(3)
    assert not worker.wants_hidden(np.array([2, 3]))


def test_each_sequence_gets_them_with_its_first_delta() -> None:
    call = PromptLogprobsCall(1)
    told = PromptScores([scores(1, 2).entries, scores(3).entries])

    def tell(index: int, event: PromptScores | None) -> list[int | None] | None:
        found = asyncio.run(call.output(OutputDelta(index, "", []), event)).prompt_logprobs
        return None if found is None else [None if entry is None else entry.token_id for entry in found]

    assert [tell(0, told), tell(1, None), tell(0, None)] == [[None, 1, 2, 3], [None], None]
    server = PromptLogprobsServer(None)  # type: ignore[arg-type]
    assert server.open(EmbedInput([1]), "") is None
    assert server.open(GenerateInput([1], SamplingParams()), "") is None
    assert server.open(GenerateInput([1], ASKS), "") is not None


def test_several_sequences_of_a_prompt(tiny_folder: Path) -> None:
    with fwk.LLM(str(tiny_folder), **OPTIONS) as llm:
        prompt = list(range(20))
        first, second = llm.generate([prompt], ASKS, n=2)
        assert [entry and entry.token_id for entry in first.prompt_logprobs or []] == [None, *prompt[1:]]
        assert second.prompt_logprobs == [None]
        [one] = llm.generate([[5]], ASKS)
        assert one.prompt_logprobs == [None]


def test_a_model_that_generates_nothing_starts_with_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaModel"]}))
    with fwk.LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.embed([[1, 2, 3]]).shape == (1, 64)
