"""Qwen2-Audio through the whole engine against transformers in float32, and sounds as it hears them."""

from __future__ import annotations

import io
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.architectures import close
from tests.helpers.lazy import lazy
from tests.helpers.sounds import EARS, FIRST, PREPROCESSOR, SOUND_ID, greedy, heard, sound, wav, write_qwen2_audio

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.multimodal import MediaItem, MultimodalContext
from fwk.types import ModelConfig
from fwk_multimodal._common.resampling import Resampler
from fwk_multimodal._common.sound import Limit, decode, pieces, resampled
from fwk_multimodal._common.spectrograms import log_mel
from fwk_multimodal.qwen2_audio.processor import Qwen2AudioProcessor

av, transformers = lazy("av"), lazy("transformers")

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
COUNT = 10
HEARD = "<|audio_bos|><|AUDIO|><|audio_eos|>"
CHATS: dict[str, tuple[str, list[np.ndarray]]] = {
    "text alone": ("What is this?", []),
    "sound first": (f"{HEARD}What is this?", [sound(1)]),
    "two of different lengths": (f"Hear: {HEARD} and {HEARD} now", [sound(2, 0.31), sound(3, 2.0)]),
    "shortest": (f"{HEARD}", [sound(4, 0.1)]),
    "the first again": (f"Again {HEARD} here", [sound(1)]),
}


def ask(llm: fwk.LLM, chats: Sequence[tuple[str, list[np.ndarray]]], **sampling: Any) -> list[Any]:
    prompts = [llm.text.encode(text, add_special_tokens=False) for text, _ in chats]
    media = [[MediaItem("audio", wav(samples)) for samples in sounds] for _, sounds in chats]
    no_marks = dict.fromkeys(range(FIRST, FIRST + 5), -100.0)
    settings = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 0, "logit_bias": no_marks}
    return llm.generate(prompts, SamplingParams(**{**settings, **sampling}), media=media)


Pair = tuple[Path, dict[str, tuple[list[int], Any]]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A folder, and what the reference says to each chat."""
    folder = tmp_path_factory.mktemp("model")
    reference = write_qwen2_audio(folder)
    with fwk.LLM(str(folder), **SMALL) as llm:
        prompts = {name: llm.text.encode(text, add_special_tokens=False) for name, (text, _) in CHATS.items()}
    return folder, {
        name: greedy(reference, prompts[name], [heard(samples) for samples in sounds], COUNT)
        for name, (_, sounds) in CHATS.items()
    }


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "options",
    [{}, {"chunked_prefill_size": 7, "speculative_algorithm": "ngram"}, {"mm_encoder_cache_bytes": 0}],
    ids=["defaults", "chunks and drafts", "no encoder cache"],
)
def test_greedy_tokens_and_their_scores(pair: Pair, options: dict[str, Any]) -> None:
    """Twice: the second time prompts come from the prefix cache."""
    with fwk.LLM(str(pair[0]), prefix_cache="radix", **SMALL, **options) as llm:
        for done in (ask(llm, list(CHATS.values())), ask(llm, list(CHATS.values()))):
            for name, found in zip(CHATS, done, strict=True):
                tokens, scores = pair[1][name]
                assert found.token_ids == tokens, name
                close(torch.tensor([entry.logprob for entry in found.logprobs]), scores)
        content = [{"type": "audio", "audio": wav(sound(1))}, {"type": "text", "text": "What?"}]
        assert (
            len(
                llm.chat(
                    [{"role": "user", "content": content}], SamplingParams(max_tokens=2, ignore_eos=True)
                ).token_ids
            )
            == 2
        )


@pytest.mark.parametrize("bins", [16, 80, 128])
def test_spectrograms_are_those_of_transformers(bins: int) -> None:
    extractor = transformers.WhisperFeatureExtractor(feature_size=bins, chunk_length=2)
    for seed in range(3):
        samples = np.zeros(32_000, np.float32)
        samples[: 9000 * (seed + 1)] = sound(seed, 2)[: 9000 * (seed + 1)]
        wanted = extractor(samples, sampling_rate=16_000)["input_features"][0]
        np.testing.assert_allclose(log_mel(samples, bins), wanted, atol=1e-4)


@pytest.mark.gate(2)
@pytest.mark.parametrize("rate", [8000, 22_050, 44_100, 48_000, 11_025])
def test_other_rates_keep_the_tones_that_both_can_hold(rate: int) -> None:
    time = np.arange(rate) / rate
    tone = np.sin(2 * np.pi * 1234 * time).astype(np.float32)
    found = resampled(tone, rate)
    assert len(found) == 16_000
    wanted = np.sin(2 * np.pi * 1234 * np.arange(16_000) / 16_000)
    assert np.abs(found - wanted)[200:-200].max() < 2e-3
    if rate > 22_050:  # no more than a whisper of a tone that the new rate cannot hold
        high = resampled(np.sin(2 * np.pi * 10_000 * time).astype(np.float32), rate)
        assert np.abs(high[200:-200]).max() < 2e-2


def encoded(samples: np.ndarray, kind: str, codec: str, rate: int = 16_000) -> bytes:
    """A file by FFmpeg."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout="mono")
        frame = av.AudioFrame.from_ndarray((samples * 32767).astype(np.int16)[None], format="s16", layout="mono")
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format, layout="mono", rate=rate, frame_size=stream.frame_size or 0)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            container.mux(stream.encode(part))
        container.mux(stream.encode(None))
    return file.getvalue()


FILES = {
    "flac": ("flac", "flac"),
    "mp3": ("mp3", "libmp3lame"),
    "ogg": ("ogg", "libopus"),
    "m4a": ("mp4", "aac"),
    "webm": ("webm", "libopus"),
    "wav of another codec": ("wav", "pcm_mulaw"),
    "aac": ("adts", "aac"),
}


@pytest.mark.gate(3)
@pytest.mark.parametrize(("kind", "codec"), FILES.values(), ids=FILES)
def test_files_that_hold_sounds(kind: str, codec: str) -> None:
    rate = 48_000 if codec == "libopus" else 16_000
    samples = sound(7, 1.0, rate)
    found = decode(MediaItem("audio", encoded(samples, kind, codec, rate)), 30)
    wanted = resampled(samples, rate)
    best = max(
        np.corrcoef(found[shift : shift + 12_000], wanted[2000 : 2000 + 12_000])[0, 1] for shift in range(0, 4000)
        if len(found) >= shift + 12_000
    )  # fmt: skip
    assert best > 0.9, "the same sound, but for a codec's delay"


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 4, "float32", "float64"])
def test_plain_wav_files_of_every_width(width: int | str, channels: int) -> None:
    samples = sound(3, 0.2)
    wide = samples.repeat(channels).astype(np.float64)
    if isinstance(width, str):
        body, size, code = wide.astype(f"<f{(width[-2:] == '64' and 8) or 4}").tobytes(), int(width[-2:]) // 8, 3
    elif width == 1:
        body, size, code = ((wide * 127).round() + 128).astype(np.uint8).tobytes(), 1, 1
    else:
        whole = (wide * (2 ** (8 * width - 1) - 1)).round().astype("<i8")
        body, size, code = whole.view(np.uint8).reshape(-1, 8)[:, :width].tobytes(), width, 1
    head = np.array([code, channels], "<u2").tobytes() + np.array([16_000, 16_000 * channels * size], "<u4").tobytes()
    head += np.array([channels * size, 8 * size], "<u2").tobytes()
    data = b"RIFF\0\0\0\0WAVEfmt " + len(head).to_bytes(4, "little") + head + b"LIST\4\0\0\0abcd"
    data += b"data" + len(body).to_bytes(4, "little") + body
    np.testing.assert_allclose(decode(MediaItem("audio", data), 30), samples, atol=0.01 if width == 1 else 1e-4)


def context(**changes: Any) -> MultimodalContext:
    raw = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320}
    raw |= {"audio_token_index": SOUND_ID, "audio_config": EARS, "architectures": ["x"]}
    return MultimodalContext(ModelConfig.from_dict(raw, ""), {**PREPROCESSOR, **changes}, None)  # type: ignore[arg-type]


WRONG: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "it is no WAV, MP3, FLAC, Ogg, M4A or WebM file"),
    "a list of files": (b"#EXTM3U\nfile:///etc/passwd\n", "it is no WAV, MP3, FLAC"),
    "a page": (b"<html>", "it is no WAV, MP3, FLAC"),
    "a head alone": (wav(sound(1))[:20], "it: the sound is damaged or cut short|it: there is no sound"),
    "no samples": (wav(sound(1)[:0]), "shorter than 30 milliseconds"),
    "too short": (wav(sound(1)[:300]), "it: the sound is shorter than 30 milliseconds"),
    "too long": (wav(sound(1, 2.1)), "it: the sound is longer than the 2 seconds that this model hears at once"),
    "half a FLAC": (b"fLaC" + bytes(100), "it: the sound is damaged|there is no sound"),
    "noise named MP3": (b"ID3" + np.random.default_rng(0).bytes(5000), "damaged|there is no sound"),
}


@pytest.mark.parametrize(("data", "message"), WRONG.values(), ids=WRONG)
def test_what_is_no_sound_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        Qwen2AudioProcessor(context()).process([SOUND_ID], [MediaItem("audio", data, "it")])
    assert caught.value.param == "it"


def test_every_cut_of_a_file_is_refused_or_a_sound() -> None:
    """No other error comes out, wherever a file ends and whatever byte is wrong."""
    random = np.random.default_rng(0)
    blamed, found = set[str | None](), list[np.ndarray]()
    for kind, codec in [*FILES.values(), ("wav", "pcm_s16le")]:
        data = encoded(sound(7, 0.3), kind, codec, 48_000 if codec == "libopus" else 16_000)
        for _ in range(25):
            broken = bytearray(data[: random.integers(1, len(data) + 1)])
            for place in random.integers(0, len(broken), 3):
                broken[place] = random.integers(256)
            try:
                found.append(decode(MediaItem("audio", bytes(broken), "it"), 30))
            except InvalidRequest as error:
                blamed.add(error.param)
    assert blamed == {"it"}
    assert all(x.dtype == np.float32 and x.ndim == 1 and np.isfinite(x).all() for x in found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_rate": 8000}, "'sampling_rate' is 8000; sounds are heard with 16000"),
        ({"feature_size": 80}, "makes 80 bins, and the model hears 16"),
        ({"chunk_length": 0}, "chunk_length must be 1 to 300 seconds"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        Qwen2AudioProcessor(context(**changes))


def test_a_sound_comes_in_pieces() -> None:
    """The rate is changed piece by piece as at once, and what is too long by its head is not decoded."""
    samples = sound(5, 1.0, 44_100)
    whole = resampled(samples, 44_100)
    resampler = Resampler(44_100, 16_000)
    parts = [resampler.push(samples[at : at + 1000]) for at in range(0, len(samples), 1000)]
    parts.append(resampler.push(samples[:0], is_last=True))
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-6)
    long = io.BytesIO(wav(sound(5, 1.0)))
    with pytest.raises(InvalidRequest, match=r"longer than the 0\.5 seconds of a test"):
        next(pieces(long, "it", Limit(0.5, "of a test")))
    assert long.tell() < 100, "no sample was read"


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["wav", "mp3"])
def test_half_an_hour_in_bounded_memory(kind: str) -> None:
    minute = np.tile(sound(6, 1.0, 44_100), 60)
    data = (
        wav(np.tile(minute, 30), 44_100) if kind == "wav" else encoded(np.tile(minute, 30), "mp3", "libmp3lame", 44_100)
    )
    tracemalloc.start()
    count = sum(len(part) for part in pieces(io.BytesIO(data), "it", Limit(3600)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == pytest.approx(1800 * 16_000, rel=1e-3)
    assert peak < 60 * 2**20
