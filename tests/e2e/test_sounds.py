"""Sounds over HTTP: a real server, its helper process and its engine, against transformers in float32."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.helpers.rig import Server
from tests.helpers.sounds import greedy, heard, sound, wav, write_qwen2_audio

COUNT = 8


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Any]]:
    folder = tmp_path_factory.mktemp("sounds")
    reference = write_qwen2_audio(folder)
    server = Server(folder, "--dtype", "float32", "--load-format", "auto", "--max-media-bytes", "90000").start()
    yield server, reference
    server.close()


def ask(server: Server, part: dict[str, Any]) -> httpx.Response:
    content = [part, {"type": "text", "text": "What?"}]
    settings = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    messages = [{"role": "user", "content": content}]
    return httpx.post(f"{server.url}/v1/chat/completions", json={"messages": messages, **settings}, timeout=60)


def part(data: bytes | str, **more: Any) -> dict[str, Any]:
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": text, "format": "wav", **more}}


@pytest.mark.sweep
def test_a_sound_is_heard(served: tuple[Server, Any]) -> None:
    server, reference = served
    samples = sound(1)
    answers = [ask(server, part(wav(samples)))]
    url = f"data:audio/wav;base64,{base64.urlsafe_b64encode(wav(samples)).decode().rstrip('=')}"
    answers.append(ask(server, {"type": "audio_url", "audio_url": {"url": url}}))
    found = [answer.json()["choices"][0]["token_ids"] for answer in answers]
    prompt = answers[0].json()["prompt_token_ids"]
    sounds = [n for n, token in enumerate(prompt) if token == prompt[prompt.index(316)]]
    short = [token for n, token in enumerate(prompt) if n not in sounds[1:]]
    assert found == [greedy(reference, short, [heard(samples)], COUNT)[0]] * 2
    listed = httpx.get(f"{server.url}/v1/models").json()["data"][0]
    assert "audio" in listed["capabilities"]
    assert httpx.get(f"{server.url}/props").json()["modalities"] == {"vision": False, "audio": True}


AT = "messages[0].content[0].input_audio"
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no object": ({"type": "input_audio", "input_audio": "x"}, f"{AT} must be an object"),
    "no data": ({"type": "input_audio", "input_audio": {"format": "wav"}}, f"{AT}.data must be base64"),
    "not base64": (part("ab*d"), f"{AT}: what follows the comma of its data: URL is not base64"),
    "text": (part(b"RIFFxxxx"), f"{AT} is no WAV, MP3, FLAC, Ogg, M4A or WebM file"),
    "too long": (part(wav(sound(1, 2.5))), f"{AT}: the sound is longer than the 2 seconds"),
    "too large": (part(wav(np.zeros(60_000, np.float32))), f"{AT} has more than 90000 bytes (--max-media-bytes)"),
    "an image": ({"type": "image_url", "image_url": {"url": "data:,"}}, "reads text and audios (input_audio), not"),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("given", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_sound_is_refused(served: tuple[Server, Any], given: dict[str, Any], message: str) -> None:
    refused = ask(served[0], given)
    assert refused.status_code == 400, refused.text
    assert message in refused.json()["error"]["message"]
