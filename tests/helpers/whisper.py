"""A tiny random Whisper, written by transformers' own classes, and synthesised speech for it to hear."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken

from fwk_loaders.dummy.tokenizer import build_tokenizer
from tests.helpers.checkpoints import randomise
from tests.helpers.lazy import lazy

transformers = lazy("transformers")

END = 256
NAMES = (
    "<|startoftranscript|>", "<|en|>", "<|de|>", "<|fr|>", "<|translate|>", "<|transcribe|>", "<|startoflm|>",
    "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
SPECIAL = {name.strip("<|>"): 259 + i for i, name in enumerate(NAMES)}
START, FIRST_TIME = SPECIAL["startoftranscript"], SPECIAL["notimestamps"] + 1
SECONDS, PLACES = 2, 100
"""It hears two seconds, at 20 ms each."""
VOCAB = FIRST_TIME + PLACES + 1
TARGET = 64
RATE = 16_000
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "decoder_layers": 3,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 128, "num_mel_bins": 80,
    "max_source_positions": PLACES, "max_target_positions": TARGET,
}  # fmt: skip
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END,
    "no_timestamps_token_id": SPECIAL["notimestamps"], "prev_sot_token_id": SPECIAL["startofprev"],
    "is_multilingual": True, "max_length": TARGET, "max_initial_timestamp_index": 50,
    "lang_to_id": {f"<|{name}|>": SPECIAL[name] for name in ("en", "de", "fr")},
    "task_to_id": {name: SPECIAL[name] for name in ("translate", "transcribe")},
    "suppress_tokens": [7, 9, 33, *range(257, SPECIAL["notimestamps"])], "begin_suppress_tokens": [32, END],
    "return_timestamps": False,
}  # fmt: skip


def speech(seed: int, seconds: float = 2.0) -> np.ndarray:
    """[n] float32: pulses of a voice through the resonances of vowels, syllable after syllable, with breath between."""
    random = np.random.default_rng(seed)
    out, at = random.normal(0, 0.003, round(seconds * RATE)), 0
    while at < len(out):
        count = int(random.uniform(0.08, 0.25) * RATE)
        time = np.arange(count) / RATE
        voice, harmonics = random.uniform(90, 220), np.arange(1, 30)[:, None]
        strength = sum(np.exp(-(((harmonics * voice - f) / 120) ** 2)) for f in random.uniform((250, 900), (900, 2600)))
        tone = (strength * np.sin(2 * np.pi * voice * harmonics * (time + 0.02 * time**2))).sum(0)
        syllable = (tone + random.normal(0, 0.2, count)) * np.hanning(count)
        part = out[at : at + count]
        part += 0.2 * syllable[: len(part)] / max(np.abs(syllable).max(), 1e-6)
        at += count + int(random.uniform(0.01, 0.1) * RATE)
    return out.astype(np.float32)


def write_whisper(folder: Path, generation: dict[str, Any] | None = None, **changes: Any) -> Any:
    """A checkpoint with a tokeniser of bytes and the files of one that transcribes; returns the reference."""
    torch.manual_seed(0)
    ids = {
        name: GENERATION[name] for name in ("decoder_start_token_id", "eos_token_id", "pad_token_id", "bos_token_id")
    }
    config = transformers.WhisperConfig(**{**SIZES, **ids, **changes}, attn_implementation="eager")
    model = transformers.WhisperForConditionalGeneration(config).eval()
    randomise(model)
    model.generation_config = transformers.GenerationConfig(**{**GENERATION, **(generation or {})})
    model.save_pretrained(folder)
    tokenizer = build_tokenizer(259, str(folder))
    times = [f"<|{i / 50:.2f}|>" for i in range(PLACES + 1)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in NAMES])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in times])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"feature_size": config.num_mel_bins, "chunk_length": SECONDS}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def features(model: Any, samples: np.ndarray) -> Any:
    """[1, num_bins, 200], by transformers' own extractor."""
    extractor = transformers.WhisperFeatureExtractor(feature_size=model.config.num_mel_bins, chunk_length=SECONDS)
    return extractor(samples, sampling_rate=RATE, return_tensors="pt")["input_features"]


def greedy(model: Any, samples: np.ndarray, prompt: Sequence[int], *, has_times: bool) -> list[int]:
    """What is chosen behind the prompt until the end or the last place, by transformers' own rules."""
    settings, begin = model.generation_config, len(prompt)
    rules = transformers.LogitsProcessorList([
        transformers.SuppressTokensAtBeginLogitsProcessor(settings.begin_suppress_tokens, begin),
        transformers.SuppressTokensLogitsProcessor(settings.suppress_tokens),
        transformers.WhisperTimeStampLogitsProcessor(settings, begin_index=begin)
        if has_times
        else transformers.SuppressTokensLogitsProcessor([*range(FIRST_TIME, VOCAB)]),
    ])  # fmt: skip
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        encoded = model.model.encoder(features(model, samples))
        while ids.shape[1] < TARGET:
            logits = model(encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False).logits[:, -1]
            token = int(rules(ids, logits.float()).argmax())
            ids = torch.cat((ids, torch.tensor([[token]])), 1)
            if token == END:
                break
    return ids[0, begin:].tolist()


def scores(model: Any, samples: np.ndarray, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """[len(tokens)]: the log-probability of each behind the prompt and those before it."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_features=features(model, samples), decoder_input_ids=ids[:, :-1]).logits[0]
    found = logits[len(prompt) - 1 :].log_softmax(-1)
    return found.gather(1, torch.tensor(tokens)[:, None])[:, 0]
