"""A tiny random model that hears, written by transformers' own classes, and sounds to let it hear."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.helpers.checkpoints import SMALL, VOCAB, greedy_of, randomise, write_tokenizer
from tests.helpers.lazy import lazy

transformers = lazy("transformers")

SPECIALS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>", "<|im_start|>", "<|im_end|>")
FIRST = VOCAB - len(SPECIALS)
SOUND_ID = FIRST + 1
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'audio' %}"
    "<|audio_bos|><|AUDIO|><|audio_eos|>\n{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BINS = 16
EARS: dict[str, Any] = {
    "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_attention_heads": 2, "encoder_ffn_dim": 64,
    "encoder_layers": 2, "num_mel_bins": BINS, "max_source_positions": 100,
}  # fmt: skip
"""It hears two seconds."""
PREPROCESSOR: dict[str, Any] = {"feature_size": BINS, "chunk_length": 2}


def sound(seed: int, seconds: float = 1.0, rate: int = 16_000) -> np.ndarray:
    """[n] float32: a few tones that rise and fall, and noise; none is like another seed's."""
    random = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    tones = [np.sin(2 * np.pi * (f * time + g * time**2)) for f, g in random.uniform(80, 3000, (4, 2))]
    return ((sum(tones) / 8 + random.normal(0, 0.05, len(time))) * np.hanning(len(time))).astype(np.float32)


def wav(samples: np.ndarray, rate: int = 16_000, channels: int = 1) -> bytes:
    """A file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes((np.clip(samples, -1, 1 - 2**-15) * 2**15).round().astype("<i2").repeat(channels).tobytes())
    return file.getvalue()


def heard(samples: np.ndarray) -> np.ndarray:
    """What is left of them in such a file."""
    return ((np.clip(samples, -1, 1 - 2**-15) * 2**15).round() / 2**15).astype(np.float32)


def write_qwen2_audio(folder: Path, **changes: Any) -> Any:
    """A checkpoint with a tokeniser of bytes, a template and the processor's settings; returns the reference."""
    torch.manual_seed(0)
    text = {"model_type": "qwen2", **SMALL, "rms_norm_eps": 1e-5, **changes}
    config = transformers.Qwen2AudioConfig(
        text_config=text, audio_config=EARS, audio_token_index=SOUND_ID, attn_implementation="eager"
    )
    config.eos_token_id = None
    model = transformers.Qwen2AudioForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, SPECIALS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model


def greedy(model: Any, prompt: Sequence[int], sounds: Sequence[np.ndarray], count: int) -> tuple[list[int], Any]:
    """The tokens that transformers chooses, and their log-probabilities."""
    given: dict[str, Any] = {}
    lengths: list[int] = []
    if sounds:
        extractor = transformers.WhisperFeatureExtractor(**PREPROCESSOR)
        made = extractor(
            list(sounds), sampling_rate=16_000, return_attention_mask=True, padding="max_length", return_tensors="pt"
        )
        given = {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
        lengths = [((int(n) - 1) // 2 + 1 - 2) // 2 + 1 for n in made["attention_mask"].sum(-1)]
    found = iter(lengths)
    ids = [i for token in prompt for i in ([token] * (next(found) if token == SOUND_ID else 1))]
    return greedy_of(model, {"input_ids": torch.tensor([ids]), **given}, count, FIRST)
