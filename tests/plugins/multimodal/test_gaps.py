"""What steps compute while requests with pictures come: the next token of each text, and one piece at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.helpers.encoded_apart import encoded_apart
from tests.helpers.images import IMAGE_ID, encoded, noise, write_vision

import fwk
from fwk import SamplingParams
from fwk.interfaces.multimodal import MediaItem
from fwk.types import Batch
from fwk_executors.inprocess.executor import InProcessExecutor
from fwk_features.step_planning.pace import Pace
from fwk_models.idefics3.model import Idefics3

NUM_TEXTS, NUM_PICTURES, NUM_REQUESTS, PIECES = 4, 8, 32, 5
CHUNK = 32
OPTIONS: dict[str, Any] = {
    **{"attention_backend": "torch", "max_total_tokens": 16384, "max_running_requests": 40, "check_blocks": True},
    **{"max_prefill_tokens": CHUNK, "max_decode_gap": 0},
}


class Step(NamedTuple):
    """slots: of sequences in it. num_prompt_tokens: of those that do not decode."""

    slots: frozenset[int]
    num_prompt_tokens: int
    num_encoded: int


@contextmanager
def watched() -> Iterator[list[Step]]:
    """The steps of an engine in this process."""
    steps: list[Step] = []
    launch, encode = InProcessExecutor.launch, Idefics3.encode
    count = [0]

    def encoded_now(self: Idefics3, kind: str, items: Any) -> Any:
        count[0] += len(items)
        return encode(self, kind, items)

    def launched(self: InProcessExecutor, batch: Batch) -> Any:
        count[0] = 0
        pending = launch(self, batch)
        prompts = sum(s.num_new_tokens for s in batch.sequences if not s.samples or s.num_new_tokens > 1)
        steps.append(Step(frozenset(s.slot for s in batch.sequences), prompts, count[0]))
        return pending

    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(InProcessExecutor, "launch", launched)
        patching.setattr(Idefics3, "encode", encoded_now)
        yield steps


@pytest.mark.parametrize(
    "is_apart", [pytest.param(False, id="in steps", marks=pytest.mark.sweep), pytest.param(True, id="apart")]
)
def test_texts_get_a_token_in_each_step_and_no_step_encodes_much(tmp_path: Path, is_apart: bool) -> None:
    write_vision(tmp_path)
    length = 120 if is_apart else 300  # steps encode a piece each, in which prompts do not advance as far
    (tmp_path / "rows").mkdir()
    images = [MediaItem("image", encoded(noise(i))) for i in range(NUM_PICTURES)]
    texts = [[5 + i, 6, 7] for i in range(NUM_TEXTS)]
    asking = [[9, 10 + i, IMAGE_ID, 5] for i in range(NUM_REQUESTS)]
    media = [*[[] for _ in texts], *[[images[i % NUM_PICTURES]] for i in range(NUM_REQUESTS)]]
    sampling = [SamplingParams(max_tokens=length, ignore_eos=True)] * NUM_TEXTS
    sampling += [SamplingParams(max_tokens=2, ignore_eos=True)] * NUM_REQUESTS
    with ExitStack() as stack:
        steps = stack.enter_context(watched())
        if is_apart:
            llm, _ = stack.enter_context(encoded_apart(tmp_path, tmp_path / "rows", **OPTIONS))
        else:
            llm = stack.enter_context(fwk.LLM(str(tmp_path), **OPTIONS))
        steps.clear()
        done = llm.generate([*texts, *asking], sampling, media=media)
    assert [len(one.token_ids) for one in done] == [length] * NUM_TEXTS + [2] * NUM_REQUESTS
    own = frozenset(range(NUM_TEXTS))
    assert own <= steps[0].slots, "texts come first"
    busy = [step for step in steps if step.slots - own]
    assert len(busy) > NUM_REQUESTS
    assert all(own <= step.slots for step in busy), "no text waits for a picture"
    assert max(step.num_prompt_tokens for step in busy) <= CHUNK
    assert max(step.num_encoded for step in busy) == (0 if is_apart else 1)
    assert sum(step.num_encoded for step in steps) == (0 if is_apart else NUM_PICTURES * PIECES)


def test_steps_that_encode_teach_nothing_of_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they take is no measure of their tokens: text that comes later would be cut to pieces of a few."""
    write_vision(tmp_path)
    told: list[int] = []
    monkeypatch.setattr(Pace, "took", lambda self, decoding, tokens, seconds: told.append(tokens))
    with watched() as steps, fwk.LLM(str(tmp_path), **{**OPTIONS, "max_decode_gap": 9}) as llm:
        steps.clear()
        told.clear()
        media = [[], [MediaItem("image", encoded(noise(1)))]]
        llm.generate([[5, 6, 7], [9, IMAGE_ID, 5]], SamplingParams(max_tokens=20, ignore_eos=True), media=media)
    encodes = [step for step in steps if step.num_encoded]
    assert len(encodes) == PIECES
    assert len(told) == len(steps) - len(encodes)
