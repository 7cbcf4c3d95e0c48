"""Whisper through the whole engine against transformers in float32, by the rules of its decoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.architectures import close
from tests.helpers.sounds import heard, wav
from tests.helpers.whisper import (
    END,
    FIRST_TIME,
    GENERATION,
    SPECIAL,
    START,
    VOCAB,
    greedy,
    scores,
    speech,
    write_whisper,
)

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, FwkError, InvalidRequest
from fwk.interfaces.multimodal import MediaItem

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
TEXT = [START, SPECIAL["en"], SPECIAL["transcribe"], SPECIAL["notimestamps"]]
TIMES = [SPECIAL["startofprev"], 72, 101, START, SPECIAL["de"], SPECIAL["translate"]]
RULES = {name: GENERATION[name] for name in ("suppress_tokens", "begin_suppress_tokens")}
ASKED: list[tuple[list[int], dict[str, Any], int, float]] = [
    (TEXT, {**RULES, "suppress_tokens": [*RULES["suppress_tokens"], *range(FIRST_TIME, VOCAB)]}, 1, 2.0),
    (TIMES, {**RULES, "timestamp_begin": FIRST_TIME, "max_initial_timestamp_index": 50}, 2, 2.0),
    (TEXT[:-1], {**RULES, "timestamp_begin": FIRST_TIME, "max_initial_timestamp_index": 50}, 3, 0.4),
]
"""What the decoder begins with, the rules, a seed of sound and its seconds."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, write_whisper(folder)


def ask(llm: fwk.LLM, **sampling: Any) -> list[Any]:
    settings = {"temperature": 0, "logprobs": 0, **sampling}
    media = [[MediaItem("audio", wav(speech(seed, seconds)))] for _, _, seed, seconds in ASKED]
    params = [SamplingParams(**settings, extra=rules) for _, rules, _, _ in ASKED]
    return llm.generate([prompt for prompt, _, _, _ in ASKED], params, media=media)


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_algorithm": "ngram", "chunked_prefill_size": 7},
        {"max_total_tokens": 400, "mm_encoder_cache_bytes": 0},
        {},
        {"executor": "threaded", "page_size": 1},
    ],
    ids=["drafts", "pre-emption", "plain", "overlap"],
)
def test_tokens_and_their_scores(pair: tuple[Path, Any], options: dict[str, Any]) -> None:
    folder, reference = pair
    with fwk.LLM(str(folder), **{**SMALL, **options}) as llm:
        done = ask(llm)
    for found, (prompt, rules, seed, seconds) in zip(done, ASKED, strict=True):
        samples = heard(speech(seed, seconds))
        wanted = greedy(reference, samples, prompt, has_times="timestamp_begin" in rules)
        assert found.token_ids == wanted[: len(found.token_ids)]
        assert len(wanted) - len(found.token_ids) == (wanted[-1] == END), "the end is no part of the text"
        assert [entry.token_id for entry in found.logprobs] == found.token_ids
        close(torch.tensor([entry.logprob for entry in found.logprobs]),
              scores(reference, samples, prompt, found.token_ids))  # fmt: skip


@pytest.mark.sweep
@pytest.mark.parametrize(
    "changes", [{"num_mel_bins": 128}, {"activation_function": "relu", "tie_word_embeddings": False}]
)
def test_other_sizes(changes: dict[str, Any], tmp_path: Path) -> None:
    reference = write_whisper(tmp_path, **changes)
    with fwk.LLM(str(tmp_path), **SMALL) as llm:
        done = ask(llm)
    for found, (prompt, rules, seed, seconds) in zip(done, ASKED, strict=True):
        wanted = greedy(reference, heard(speech(seed, seconds)), prompt, has_times="timestamp_begin" in rules)
        assert found.token_ids == wanted[: len(found.token_ids)]


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"tensor_parallel_size": 2}])
def test_integers_and_two_ranks(pair: tuple[Path, Any], options: dict[str, Any]) -> None:
    """Of two ranks the same tokens; of integers nearly the same probabilities of the first."""
    with fwk.LLM(str(pair[0]), **SMALL) as llm:
        plain = ask(llm, max_tokens=6)
    with fwk.LLM(str(pair[0]), **SMALL, **options) as llm:
        found = ask(llm, max_tokens=6)
    for one, other in zip(plain, found, strict=True):
        if "quantization" not in options:
            assert one.token_ids == other.token_ids
        elif one.token_ids[0] == other.token_ids[0]:
            assert abs(one.logprobs[0].logprob - other.logprobs[0].logprob) < 0.5


def test_what_is_no_sound_is_refused(pair: tuple[Path, Any]) -> None:
    sound = MediaItem("audio", wav(speech(1)))
    wrong: dict[str, list[MediaItem]] = {
        "this model hears one sound at once, not 2": [sound, sound],
        "audio 1: the sound is longer than the 2 seconds": [MediaItem("audio", wav(speech(1, 2.1)))],
        "shorter than 10 milliseconds": [MediaItem("audio", wav(speech(1)[:100]))],
        "is no WAV, MP3": [MediaItem("audio", b"no sound")],
        "writes down what it hears: send a sound": [],
    }
    with fwk.LLM(str(pair[0]), **SMALL) as llm:
        for message, media in wrong.items():
            with pytest.raises(InvalidRequest, match=message):
                llm.generate([TEXT], SamplingParams(max_tokens=2), media=[media])
        with pytest.raises(InvalidRequest, match="send a sound"):
            llm.generate("Hello", SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"scale_embedding": True}, "'scale_embedding' is True: whisper is served with False"),
        ("config.json", {"max_source_positions": "x"}, "'max_source_positions' must be a whole number"),
        ("preprocessor_config.json", {"chunk_length": 3}, "makes windows of 300 frames, and the model hears 200"),
        ("preprocessor_config.json", {"feature_size": 128}, "makes 128 bins, and the model hears 80"),
    ],
)
def test_wrong_settings_are_named(file: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_whisper(tmp_path)
    path = tmp_path / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(FwkError, match=message), fwk.LLM(str(tmp_path), **SMALL) as llm:
        ask(llm)


def test_without_sounds_it_is_not_served(pair: tuple[Path, Any]) -> None:
    with pytest.raises(ConfigError, match="transcribes sounds and does nothing else"):
        fwk.LLM(str(pair[0]), **SMALL, enable_multimodal=False)
