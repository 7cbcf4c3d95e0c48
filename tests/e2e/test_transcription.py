"""Sound over HTTP to what is said in it: a real server, its processes and OpenAI's client, against transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from fwk_server.openai_audio.tokens import segments
from tests.helpers.lazy import lazy
from tests.helpers.rig import Server, assert_no_leak
from tests.helpers.sounds import heard, wav
from tests.helpers.whisper import (
    END,
    FIRST_TIME,
    RATE,
    SECONDS,
    SPECIAL,
    START,
    features,
    greedy,
    scores,
    speech,
    write_whisper,
)

openai = lazy("openai")

LANGUAGES = ("en", "de", "fr")
WINDOW = SECONDS * RATE
SHORT, LONG = speech(1, 1.5), speech(2, 3.5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    folder = tmp_path_factory.mktemp("speech")
    reference = write_whisper(folder)
    flags = ("--dtype", "float32", "--load-format", "auto", "--max-sound-bytes", "400000", "--max-sound-seconds", "8")
    server = Server(folder, *flags)
    try:
        server.wait_ready()
        yield server, reference
    finally:
        server.close()


@pytest.fixture
def client(served: tuple[Server, Any]) -> Any:
    return openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", timeout=280, max_retries=0)


def told(reference: Any, samples: np.ndarray) -> str:
    """The language that the reference hears."""
    with torch.no_grad():
        logits = reference(features(reference, samples), decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
    return max(LANGUAGES, key=lambda name: float(logits[SPECIAL[name]]))


def said(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < END).decode(errors="replace")


def prefix(language: str, task: str = "transcribe", *, has_times: bool) -> list[int]:
    return [START, SPECIAL[language], SPECIAL[task], *([] if has_times else [SPECIAL["notimestamps"]])]


def plain(reference: Any, samples: np.ndarray, language: str, task: str = "transcribe") -> str:
    """The text of one window."""
    return said(greedy(reference, heard(samples), prefix(language, task, has_times=False), has_times=False)).strip()


def timed(reference: Any, samples: np.ndarray, language: str) -> list[tuple[float, float, str, float]]:
    """Segments by the reference's tokens: begin, end, text, mean log-probability."""
    found, seek, samples = list[tuple[float, float, str, float]](), 0, heard(samples)
    begin = prefix(language, has_times=True)
    for _ in range(40):
        window = samples[seek : seek + WINDOW]
        tokens = greedy(reference, window, begin, has_times=True)
        tokens = tokens[: tokens.index(END)] if END in tokens else tokens
        mean = float(scores(reference, window, begin, tokens).sum()) / (len(tokens) + 1)
        parts, advance = segments(tokens, FIRST_TIME, len(window))
        for first, last, ids in parts:
            if said(ids).strip():
                times = [min(seek + place, len(samples)) / RATE for place in (first, last)]
                found.append((times[0], times[1], said(ids), mean))
        seek += advance or WINDOW
        if seek + RATE // 100 > len(samples):
            return found
    raise AssertionError("the reference hears no end")


def test_every_format_through_openais_client(served: tuple[Server, Any], client: Any) -> None:
    _, reference = served
    file = ("speech.wav", wav(SHORT))
    create = client.audio.transcriptions.create
    language = told(reference, heard(SHORT))
    text = plain(reference, SHORT, language)
    found = create(file=file, model="tiny")
    assert found.text == text
    assert found.usage.seconds == 1.5
    assert create(file=file, model="tiny", response_format="text") == f"{text}\n"
    events = list(create(file=file, model="tiny", stream=True))
    assert {event.type for event in events[:-1]} == {"transcript.text.delta"}
    assert "".join(event.delta for event in events[:-1]).strip() == events[-1].text == text
    parts = timed(reference, SHORT, "de")
    many = create(
        file=file, model="tiny", language="de", response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert (many.language, many.duration) == ("de", 1.5)
    assert [(one.start, one.end, one.text) for one in many.segments] == [
        (round(begin, 2), round(end, 2), text) for begin, end, text, _ in parts
    ]
    np.testing.assert_allclose([one.avg_logprob for one in many.segments], [one[3] for one in parts], atol=1e-4)
    with torch.no_grad():
        logits = reference(features(reference, heard(SHORT)), decoder_input_ids=torch.tensor([[START]])).logits[0, -1]
    silence = float(logits.softmax(-1)[SPECIAL["nospeech"]])
    assert many.segments[0].no_speech_prob == pytest.approx(silence, abs=1e-4)
    srt, vtt = (create(file=file, model="tiny", language="de", response_format=form) for form in ("srt", "vtt"))
    assert srt.startswith("1\n00:00:0")
    assert vtt.startswith("WEBVTT\n\n00:00:0")
    assert srt.count(" --> ") == vtt.count(" --> ") == len(parts)


def test_translations_and_prompts(served: tuple[Server, Any], client: Any) -> None:
    _, reference = served
    file = ("speech.wav", wav(SHORT))
    language = told(reference, heard(SHORT))
    url = f"{served[0].url}/v1/audio/translations"  # whose call is deprecated in OpenAI's client
    found = httpx.post(url, files={"file": file}, data={"model": "tiny"}, timeout=280).json()
    assert found["text"] == plain(reference, SHORT, language, "translate")
    begin = [SPECIAL["startofprev"], *b" Hi", *prefix("fr", has_times=False)]
    wanted = said(greedy(reference, heard(SHORT), begin, has_times=False)).strip()
    assert client.audio.transcriptions.create(file=file, model="tiny", language="fr", prompt="Hi").text == wanted


def test_long_sounds_are_heard_by_windows(served: tuple[Server, Any], client: Any) -> None:
    """Several at once, in batches of windows."""
    _, reference = served
    parts = timed(reference, LONG, "en")
    assert len({round(begin // SECONDS) for begin, *_ in parts}) > 1, "more than one window says something"

    def ask(form: str) -> Any:
        file = ("speech.wav", wav(LONG))
        return client.audio.transcriptions.create(file=file, model="tiny", language="en", response_format=form)

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(ask, ("verbose_json", "json"))
    assert [(one.start, one.end, one.text) for one in one.segments] == [
        (round(begin, 2), round(end, 2), text) for begin, end, text, _ in parts
    ]
    assert one.text == other.text == "".join(text for _, _, text, _ in parts).strip()


WAV = wav(SHORT)
WRONG: dict[str, tuple[dict[str, Any], bytes | None, str]] = {
    "no file": ({}, None, "file is missing"),
    "an empty file": ({}, b"", "the file is empty"),
    "text": ({}, b"hello", "file is no WAV, MP3, FLAC, Ogg, M4A or WebM file"),
    "half a WAV": ({}, WAV[: len(WAV) // 2], "file: the sound is damaged or cut short"),
    "noise named MP3": ({}, b"ID3" + np.random.default_rng(0).bytes(5000), "file: the sound is damaged|no sound"),
    "nearly nothing": ({}, wav(SHORT[:50]), "file: the sound is shorter than 10 milliseconds"),
    "too long": ({}, wav(np.zeros(9 * 8000, np.float32), 8000), "longer than the 8 seconds that this server"),
    "too large": ({}, wav(np.zeros(250_000, np.float32)), "the file has more than 400000 bytes"),
    "another model": ({"model": "other"}, WAV, "the model 'other' is not served here"),
    "words": ({"response_format": "verbose_json", "timestamp_granularities[]": "word"}, WAV, "timestamps of words"),
    "a granularity without times": ({"timestamp_granularities[]": "segment"}, WAV, "is with response_format verbose"),
    "a format": ({"response_format": "diarized_json"}, WAV, "response_format must be json, text, srt, vtt, verbose"),
    "a language": ({"language": "xx"}, WAV, "language 'xx' is not known to this model; it knows de, en, fr"),
    "a temperature": ({"temperature": "nan"}, WAV, "temperature must be a number from 0 to 1, not 'nan'"),
    "a stream of subtitles": ({"stream": "true", "response_format": "srt"}, WAV, "stream is with response_format json"),
    "an unknown field": ({"beam": "5"}, WAV, "'beam' is not supported; there are file, model, language"),
    "log-probabilities": ({"include[]": "logprobs"}, WAV, r"include\[\] is not supported"),
}


@pytest.mark.parametrize("path", ["transcriptions", pytest.param("translations", marks=pytest.mark.sweep)])
def test_what_is_wrong_gets_one_sentence(served: tuple[Server, Any], path: str) -> None:
    url = f"{served[0].url}/v1/audio/{path}"
    for name, (fields, data, message) in WRONG.items():
        files = {"nothing": (None, "")} if data is None else {"file": ("speech.wav", data)}
        refused = httpx.post(url, data=fields, files=files, timeout=60)
        assert refused.status_code == (404 if name == "another model" else 400), (name, refused.text)
        assert_no_leak(refused.text)
        assert re.search(message, refused.json()["error"]["message"]), (name, refused.text)
    assert httpx.post(url, json={}, timeout=60).status_code == 415


def test_it_does_nothing_else(served: tuple[Server, Any]) -> None:
    url = served[0].url
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    bodies = {"chat/completions": chat, "completions": {"prompt": "Hi"}, "embeddings": {"input": "Hi"}}
    for path, body in bodies.items():
        refused = httpx.post(f"{url}/v1/{path}", json=body, timeout=60)
        assert refused.status_code == 400, refused.text
        assert "writes down what it hears, no more: use /v1/audio/transcriptions" in refused.text, refused.text
    [listed] = httpx.get(f"{url}/v1/models").json()["data"]
    assert (listed["task"], listed["capabilities"]) == ("transcribe", ["transcribe", "audio"])
