"""Transcriptions: what timestamps say, what forms ask, and models that transcribe nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fastapi import FastAPI
from tests.helpers.lazy import lazy

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import DialectContext
from fwk.server.app import install_error_handlers
from fwk_kit.testing.fake_frontend import FakeFrontend
from fwk_server._common.upload import Upload
from fwk_server.openai_audio.dialect import AudioDialect
from fwk_server.openai_audio.files import OneUpload, SoundFiles
from fwk_server.openai_audio.reply import clock
from fwk_server.openai_audio.request import LISTS, read
from fwk_server.openai_audio.tokens import STEP, segments

whisper = lazy("transformers.models.whisper.generation_whisper")

FIRST = 100


def reference(tokens: list[int], count: int) -> tuple[list[tuple[int, int, list[int]]], int]:
    """What transformers makes of a window, in samples."""
    retrieve = whisper.WhisperGenerationMixin._retrieve_segment
    frames = count // 160
    found, advance = retrieve(
        seek_sequence=torch.tensor(tokens), seek_outputs=[{"token_timestamps": None}],
        time_offset=torch.zeros(1, dtype=torch.float64), timestamp_begin=FIRST, seek_num_frames=torch.tensor([frames]),
        time_precision=0.02, time_precision_features=0.01, input_stride=2, prev_idx=0, idx=0,
        return_token_timestamps=False, decoder_input_ids=torch.zeros(1, 4),
    )  # fmt: skip
    parts = [(round(float(x["start"]) * 16_000), round(float(x["end"]) * 16_000), x["tokens"].tolist()) for x in found]
    return parts, int(advance) * 160


def texts() -> list[list[int]]:
    """As the rules let them be: times in pairs, in order, and perhaps an open end."""
    random, found = np.random.default_rng(0), list[list[int]]()
    for _ in range(60):
        now, tokens = int(random.integers(0, 10)), list[int]()
        for _ in range(random.integers(1, 4)):
            tokens += [FIRST + now, *random.integers(0, 90, random.integers(1, 4)).tolist()]
            now += int(random.integers(1, 20))
            tokens.append(FIRST + now)
            now += int(random.integers(0, 5))
        ends = [tokens, [*tokens, FIRST + now], [*tokens, FIRST + now, 5, 6], tokens[:-1]]
        found.append(ends[random.integers(4)])
    return found


def test_segments_are_those_of_transformers() -> None:
    kinds = set[tuple[bool, bool]]()
    for tokens in texts():
        wanted, advance = reference(tokens, 100 * STEP)
        found, understood = segments(tokens, FIRST, 100 * STEP)
        assert understood == advance, tokens
        assert [(begin, end) for begin, end, _ in found] == [(begin, end) for begin, end, _ in wanted], tokens
        words = [[token for token in part if token < FIRST] for *_, part in wanted]
        assert [[token for token in part if token < FIRST] for *_, part in found] == words
        kinds.add((len(found) > 1, understood == 100 * STEP))
    assert len(kinds) == 4, "one segment and more, to the end and not"


def test_times_of_subtitles() -> None:
    assert clock(3_725.0426, is_vtt=False) == "01:02:05,043"
    assert clock(59.9996, is_vtt=True) == "00:01:00.000"


def test_a_form_in_any_pieces() -> None:
    """A character, a boundary and a list come in whatever pieces the network makes."""
    body = (
        b'--x\r\nContent-Disposition: form-data; name="prompt"\r\n\r\nGr\xc3\xbc\xc3\x9fe\r\n'
        b'--x\r\nContent-Disposition: form-data; name="timestamp_granularities[]"\r\n\r\nsegment\r\n'
        b'--x\r\nContent-Disposition: form-data; name="timestamp_granularities[]"\r\n\r\nsegment\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\nabc\r\n--x--\r\n'
    )
    for size in (1, 7, len(body)):
        files = SoundFiles(100)
        upload = Upload(OneUpload(files, 10), lists=LISTS)

        class Pieces:
            headers = {"content-type": "multipart/form-data; boundary=x"}

            async def stream(self, size: int = size) -> Any:
                for at in range(0, len(body), size):
                    yield body[at : at + size]

        async def blocking(function: Any) -> None:
            function()

        asyncio.run(upload.read(Pieces(), blocking))  # type: ignore[arg-type]
        assert upload.fields == {"prompt": "Grüße"}
        assert upload.lists[LISTS[0]] == ["segment", "segment"]
        assert (upload.path.read_bytes(), upload.size) == (b"abc", 3)
        upload.discard()
        files.close()


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"seed": "x"}, "seed"),
        ({"stream": "maybe"}, "stream"),
        ({"temperature": "1.5"}, "temperature"),
        ({"chunking_strategy": "{}"}, "chunking_strategy"),
        ({"known_speaker_names[]": "a"}, "known_speaker_names[]"),
    ],
)
def test_a_wrong_field_is_named(given: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read("transcribe", given, {})
    assert caught.value.param == field


async def test_a_model_of_text_transcribes_nothing() -> None:
    app, dialect = FastAPI(), AudioDialect(DialectContext(FakeFrontend()))
    install_error_handlers(app)
    dialect.routes(app)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
        refused = await client.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"abc")})
    assert refused.status_code == 400
    assert "transcribes no sounds: serve one that does" in refused.json()["error"]["message"]
