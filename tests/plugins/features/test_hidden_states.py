"""Hidden states: which of those that workers report are a sequence's, and runs that cannot have any."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tests.helpers.pretend_cuda import JOURNAL, pretended

import fwk
from fwk import Facts, SamplingParams
from fwk.errors import ConfigError, InvalidRequest
from fwk.interfaces.feature import EnginePartContext
from fwk.types import Request
from fwk_features.hidden_states import NewStates, StepStates, features
from fwk_features.hidden_states.engine import HiddenStatesEngine
from fwk_kit.testing.serving import TINY

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 512, "dtype": "float32"}
ASKS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, return_hidden_states=True)


def part() -> HiddenStatesEngine:
    [spec] = features()
    return HiddenStatesEngine(EnginePartContext(spec.name, lambda *args: [], spec.wire))


def sequence(num_prompt: int, num_tokens: int) -> Any:
    return SimpleNamespace(key=("a", 0), num_prompt_tokens=num_prompt, token_ids=[7] * num_tokens)


def states(start: int, text: bytes) -> StepStates:
    return StepStates(start, [text[i : i + 1] for i in range(len(text))])


def test_tokens_count_once_and_rejected_drafts_do_not() -> None:
    engine, own = part(), sequence(4, 4)
    assert engine.matchable(own, 3) == 0  # the cache has no states of the prompt's tokens
    engine.took(own, states(0, b"ab"))
    assert engine.event(own) == NewStates([b"a", b"b"])
    engine.took(own, states(0, b"ab"))  # it was pre-empted, and starts over
    own.token_ids += [8]
    engine.took(own, states(2, b"cd"))
    assert engine.matchable(own, 4) == 4
    own.token_ids += [9, 9]  # one of three drafts was accepted
    engine.took(own, states(4, b"efxy"))
    assert engine.event(own) == NewStates([b"c", b"d", b"e", b"f"])
    assert engine.event(own) is None
    engine.forget(own)
    assert engine.matchable(own, 4) == 0


def test_an_encoders_prompt_has_none() -> None:
    request = Request(request_id="a", prompt_token_ids=[1, 2], sampling=ASKS, num_encoder_tokens=1)
    with pytest.raises(InvalidRequest, match="no hidden states to return"):
        part().check(request)


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"drafts": "tree", "chosen": {"speculative": ("ngram",)}}, "--speculative-algorithm ngram verifies trees"),
        ({"task": "embed"}, "served to embed"),
        ({"model": SimpleNamespace(raw={"is_encoder_decoder": True})}, "an encoder or a decoder"),
        ({"drafts": "chain", "task": "generate"}, None),
    ],
)
def test_runs_that_cannot_have_any(facts: dict[str, Any], why: str | None) -> None:
    [spec] = features()
    refusal = spec.refusal(Facts(**facts))
    assert refusal is None if why is None else why in (refusal or "")


def test_a_model_that_generates_nothing_has_none_to_return(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "architectures": ["LlamaModel"]}))
    with pytest.raises(ConfigError, match="served to embed, and its replies are made of hidden states"):
        fwk.LLM(str(tmp_path), enable_return_hidden_states=True, **OPTIONS)


@pytest.mark.parametrize("drafts", [{"speculative_algorithm": "ngram"}, pytest.param({}, marks=pytest.mark.sweep)])
def test_a_device_is_not_waited_for(tiny_folder: Path, drafts: dict[str, Any]) -> None:
    """The same as on the host, from a device that notes every wait; with and without drafts."""
    prompts = [[1, 7, 3, 9] * 9, [5, 5, 6]]
    backends = dict.fromkeys(("attention_backend", "operator_backend", "sampling_backend"), "torch")
    options: dict[str, Any] = (
        OPTIONS | backends | drafts | {"enable_return_hidden_states": True, "chunked_prefill_size": 16}
    )
    with fwk.LLM(str(tiny_folder), device="cpu", **options) as llm:
        wanted = llm.generate(prompts, ASKS)
    with pretended() as plugins, fwk.LLM(str(tiny_folder), plugins=plugins, device="pretended", **options) as llm:
        JOURNAL.clear()
        found = llm.generate(prompts, ASKS)
        assert JOURNAL.faults == []
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert len(one.hidden_states) == len(one.prompt_token_ids) + 5
        mine, theirs = (np.frombuffer(b"".join(done.hidden_states), "<f4") for done in (one, other))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
