"""A tiny random Mistral 3, written by transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken

from fwk_loaders.dummy.tokenizer import build_tokenizer
from tests.helpers.checkpoints import SMALL, VOCAB, randomise
from tests.helpers.lazy import lazy

transformers = lazy("transformers")
pixtral = lazy("transformers.models.pixtral.image_processing_pil_pixtral")

SPECIALS = ("[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]")
FIRST = VOCAB - len(SPECIALS)
IMAGE_ID = FIRST + 2
PREPROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4},
    "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.25, 0.3],
}  # fmt: skip
EYES: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "image_size": 48, "patch_size": 4,
}  # fmt: skip
SIDE = 8
"""Of a square of patches."""


def write_mistral3(folder: Path) -> Any:
    """A checkpoint with a tokeniser of bytes and the processor's settings; returns the reference."""
    torch.manual_seed(0)
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **SMALL, "rms_norm_eps": 1e-5, "sliding_window": None, "head_dim": 32},
        vision_config=EYES,
        image_token_index=IMAGE_ID,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    config.eos_token_id = None
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    tokenizer = build_tokenizer(FIRST, str(folder))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model


def reference_images(images: Sequence[Image.Image], **changes: Any) -> Any:
    """What transformers makes of them: ``pixel_values``, padded to one size, and ``image_sizes``."""
    settings = {**PREPROCESSOR, **changes, "patch_size": {"height": SIDE, "width": SIDE}}
    return pixtral.PixtralImageProcessorPil(**settings)(images=list(images), return_tensors="pt")


def placed(prompt: Sequence[int], sizes: Sequence[Sequence[int]]) -> list[int]:
    """The prompt with its images' tokens. sizes: height and width of each, scaled."""
    left, ids = iter(sizes), list[int]()
    for token in prompt:
        if token != IMAGE_ID:
            ids.append(token)
            continue
        height, width = (int(edge) // SIDE for edge in next(left))
        ids += ([IMAGE_ID] * width + [IMAGE_ID + 1]) * height
        ids[-1] = IMAGE_ID + 2
    return ids


def greedy(model: Any, prompt: Sequence[int], images: Sequence[Image.Image], count: int) -> tuple[list[int], Any]:
    """The tokens that transformers chooses, and their log-probabilities: for each, everything is computed anew."""
    made = reference_images(images) if images else {}
    given = {"pixel_values": made["pixel_values"], "image_sizes": made["image_sizes"]} if images else {}
    ids = placed(prompt, made["image_sizes"].tolist() if images else [])
    tokens, scores = list[int](), list[float]()
    for _ in range(count):
        with torch.no_grad():
            last = model(input_ids=torch.tensor([ids]), **given, use_cache=False).logits[0, -1].log_softmax(-1)
        token = int(last[:FIRST].argmax())  # a placeholder would be taken for an image
        ids.append(token)
        tokens.append(token)
        scores.append(float(last[token]))
    return tokens, torch.tensor(scores)
