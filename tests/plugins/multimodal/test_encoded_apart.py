"""Engines without an encoder, whose media another worker encodes, say what those say that encode in their steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.checkpoints import VOCAB
from tests.helpers.encoded_apart import encoded_apart
from tests.helpers.images import IMAGE_ID, encoded, noise, write_vision
from tests.helpers.qwen_vl import write_qwen_vl
from tests.helpers.sounds import sound, wav, write_qwen2_audio
from tests.helpers.vision_models import KINDS, write_seeing
from tests.helpers.whisper import SPECIAL, START, speech, write_whisper

import fwk
from fwk import SamplingParams
from fwk.interfaces.multimodal import MediaItem

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 7, "max_prefill_tokens": 24, "max_running_requests": 3},
    "drafts and pre-emption": {"speculative_algorithm": "ngram", "max_total_tokens": 320, "page_size": 4},
}
COUNT = 8
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
MODELS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "idefics3": (write_vision, ""),
    "qwen2.5-vl": (partial(write_qwen_vl, kind="Qwen2_5_VL"), QWEN),
    "qwen3-vl": (partial(write_qwen_vl, kind="Qwen3VL"), QWEN),
    **{name: (partial(write_seeing, name=name), kind.marks[0]) for name, kind in KINDS.items()},
    "qwen2-audio": (write_qwen2_audio, "<|audio_bos|><|AUDIO|><|audio_eos|>"),
}
"""What writes a checkpoint, and the mark of a piece of media in texts."""

GATE = ("idefics3", "qwen2.5-vl", "gemma3")


def chats(name: str) -> tuple[list[str], list[list[MediaItem]]]:
    """Texts with a mark for each of their media: several of different sizes, one alone, none, and the first again."""
    if name == "qwen2-audio":
        media = [MediaItem("audio", wav(sound(seed, seconds))) for seed, seconds in ((1, 1.0), (2, 0.31), (3, 2.0))]
    else:
        sizes = [(1, 40, 24), (2, 20, 60), (3, 70, 12)]
        media = [MediaItem("image", encoded(noise(seed, width, height))) for seed, width, height in sizes]
    texts = ["\0What is this?", "Look: \0 and \0 now", "What is this?", "\0What is this, again?"]
    return texts, [media[:1], media[1:], [], media[:1]]


def ask(llm: fwk.LLM, name: str) -> list[Any]:
    """All in one batch, and all again, from the prefix cache."""
    texts, media = chats(name)
    mark = MODELS[name][1]
    pieces = [text.split("\0") for text in texts]
    if name == "idefics3":
        prompts = [_joined([llm.text.encode(part, add_special_tokens=False) for part in parts]) for parts in pieces]
    else:
        prompts = [llm.text.encode(mark.join(parts), add_special_tokens=False) for parts in pieces]
    no_marks = dict.fromkeys(range(VOCAB - 8, VOCAB), -100.0)
    settings: dict[str, Any] = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 0}
    sampling = SamplingParams(**settings, logit_bias=no_marks)
    return [done for _ in range(2) for done in llm.generate(prompts, sampling, media=media)]


def _joined(parts: list[list[int]]) -> list[int]:
    return [token for i, part in enumerate(parts) for token in ([IMAGE_ID] if i else []) + part]


def said(done: list[Any]) -> list[tuple[list[int], list[float]]]:
    return [(one.token_ids, [entry.logprob for entry in one.logprobs]) for one in done]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.sweep] * (n not in GATE)) for n in MODELS])
def test_tokens_and_their_scores(name: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    MODELS[name][0](model)
    for label, options in OPTIONS.items() if name != "gemma3" else [("whole images", {})]:
        given = {**SMALL, "prefix_cache": "radix", **options}
        with fwk.LLM(str(model), **given) as llm:
            wanted = said(ask(llm, name))
        with encoded_apart(model, tmp_path, **given) as (llm, batches):
            done = ask(llm, name)
            assert max(one.cached_tokens for one in done) > 0
        assert [ids for ids, _ in said(done)] == [ids for ids, _ in wanted], label
        for (_, found), (_, scores) in zip(said(done), wanted, strict=True):
            assert found == pytest.approx(scores, abs=1e-4), label
        assert len(batches) == 6, "each prompt with media, twice"


@pytest.mark.sweep
def test_sound_that_is_transcribed(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_whisper(model)
    prompts = [[START, SPECIAL["en"], SPECIAL["transcribe"], SPECIAL["notimestamps"]]] * 2
    media = [[MediaItem("audio", wav(speech(seed, seconds)))] for seed, seconds in ((1, 2.0), (3, 0.4))]
    sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    with fwk.LLM(str(model), **SMALL) as llm:
        wanted = [done.token_ids for done in llm.generate(prompts, sampling, media=media)]
    with encoded_apart(model, tmp_path, **SMALL) as (llm, batches):
        assert [done.token_ids for done in llm.generate(prompts, sampling, media=media)] == wanted
    assert batches == [1, 1]
