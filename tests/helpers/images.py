"""A tiny random model that takes images, written by transformers' own classes, and images to show it."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.helpers.checkpoints import SMALL, VOCAB, randomise, write_tokenizer
from tests.helpers.lazy import lazy

image_processing_pil_idefics3 = lazy("transformers.models.idefics3.image_processing_pil_idefics3")
transformers = lazy("transformers")

SPECIALS = ("<image>", "<fake_token_around_image>", "<end_of_utterance>")
IMAGE_ID = VOCAB - len(SPECIALS)
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ ' ' + part['text'] }}"
    "{% elif part['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<end_of_utterance>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""SmolVLM's, in short: contents are lists of parts."""

PREPROCESSOR: dict[str, Any] = {
    "do_image_splitting": True,
    "size": {"longest_edge": 32},
    "max_image_size": {"longest_edge": 16},
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
TOKENS_PER_TILE = 4
KINDS: dict[str, tuple[str, str]] = {
    "idefics3": ("Idefics3Config", "Idefics3ForConditionalGeneration"),
    "smolvlm": ("SmolVLMConfig", "SmolVLMForConditionalGeneration"),
}


def write_config(folder: Path) -> Path:
    """What the dummy loader needs of such a model; no weights."""
    text = {"model_type": "llama", "rms_norm_eps": 1e-5, **SMALL}
    config = {
        **{"architectures": ["Idefics3ForConditionalGeneration"], "model_type": "idefics3", "dtype": "float32"},
        **{"text_config": text, "vision_config": VISION, "image_token_id": IMAGE_ID, "scale_factor": 2},
    }
    (folder / "config.json").write_text(json.dumps(config))
    _write_texts(folder)
    return folder


def write_vision(folder: Path, kind: str = "idefics3", **changes: Any) -> transformers.PreTrainedModel:
    """A checkpoint with a tokeniser of bytes, a template and the processor's settings; returns the reference.

    changes: of the text model's config.
    """
    config_type, model_type = KINDS[kind]
    torch.manual_seed(0)
    text = {"model_type": "llama", "rms_norm_eps": 1e-5, **SMALL, **changes}
    config = getattr(transformers, config_type)(
        text_config=text, vision_config=VISION, image_token_id=IMAGE_ID, scale_factor=2, attn_implementation="eager"
    )
    config.eos_token_id = config.text_config.eos_token_id
    model = getattr(transformers, model_type)(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    _write_texts(folder)
    return model


def _write_texts(folder: Path) -> None:
    write_tokenizer(folder, SPECIALS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))


def reference_processor(folder: Path, **changes: Any) -> Any:
    """transformers' own, with Pillow and numpy."""
    images = image_processing_pil_idefics3.Idefics3ImageProcessorPil(**{**PREPROCESSOR, **changes})
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return transformers.Idefics3Processor(images, tokenizer, image_seq_len=TOKENS_PER_TILE)


def noise(seed: int, width: int = 40, height: int = 24, mode: str = "RGB") -> Image.Image:
    """An image no other seed makes."""
    channels = {"RGB": 3, "RGBA": 4, "L": 1}[mode]
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)
    return Image.fromarray(pixels.squeeze())


def encoded(image: Image.Image, format_: str = "PNG", **settings: Any) -> bytes:
    """A file of it."""
    file = io.BytesIO()
    image.save(file, format_, **settings)
    return file.getvalue()


def greedy(
    model: transformers.PreTrainedModel, processor: Any, text: str, images: Sequence[Image.Image], count: int
) -> tuple[list[int], list[float]]:
    """The tokens that transformers generates, and the logarithms of their probabilities."""
    given = processor(text=text, images=list(images) or None, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(  # pyright: ignore[reportCallIssue]
            **given,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = out.sequences[0, given["input_ids"].shape[1] :]
    scores = torch.cat(out.logits).log_softmax(-1)
    return tokens.tolist(), scores[torch.arange(len(tokens)), tokens].tolist()
