"""Tiny random checkpoints of InternVL, written by transformers' own classes."""

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
got_ocr2 = lazy("transformers.models.got_ocr2.image_processing_pil_got_ocr2")

SPECIALS = ("<img>", "</img>", "<IMG_CONTEXT>", "<|im_start|>", "<|im_end|>")
FIRST = VOCAB - len(SPECIALS)
IMAGE_ID = FIRST + 2
PREPROCESSOR: dict[str, Any] = {
    "size": {"height": 16, "width": 16}, "crop_to_patches": True, "min_patches": 1, "max_patches": 6,
    "image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.25, 0.3],
}  # fmt: skip
EYES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.7,
}  # fmt: skip
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2": ({"model_type": "qwen2"}, {}),
    "qwen3": ({"model_type": "qwen3", "head_dim": 32}, {"norm_type": "rms_norm", "use_qk_norm": True}),
    "llama": ({"model_type": "llama"}, {"attention_bias": True, "use_mean_pooling": False}),
}
"""Text models, each with an encoder of another make."""


def write_internvl(folder: Path, kind: str) -> Any:
    """A checkpoint with a tokeniser of bytes and the processor's settings; returns the reference."""
    text, vision = KINDS[kind]
    torch.manual_seed(0)
    config = transformers.InternVLConfig(
        text_config={**SMALL, "rms_norm_eps": 1e-5, **text},
        vision_config={**EYES, **vision},
        image_token_id=IMAGE_ID,
        image_seq_length=4,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    config.eos_token_id = None
    model = transformers.InternVLForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    tokenizer = build_tokenizer(FIRST, str(folder))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model


def reference_images(images: Sequence[Image.Image], **changes: Any) -> Any:
    """What transformers makes of them: ``pixel_values`` of all tiles, and ``num_patches`` of each image."""
    return got_ocr2.GotOcr2ImageProcessorPil(**{**PREPROCESSOR, **changes})(images=list(images), return_tensors="pt")


def greedy(model: Any, prompt: Sequence[int], images: Sequence[Image.Image], count: int) -> tuple[list[int], Any]:
    """The tokens that transformers chooses, and their log-probabilities: for each, everything is computed anew."""
    made = reference_images(images) if images else {}
    given = {"pixel_values": made["pixel_values"]} if images else {}
    tiles = iter([int(n) for n in made["num_patches"]] if images else [])
    ids = [
        i
        for token in prompt
        for i in ([FIRST, *[token] * (4 * next(tiles)), FIRST + 1] if token == IMAGE_ID else [token])
    ]
    tokens, scores = list[int](), list[float]()
    for _ in range(count):
        with torch.no_grad():
            last = model(input_ids=torch.tensor([ids]), **given, use_cache=False).logits[0, -1].log_softmax(-1)
        token = int(last[:FIRST].argmax())  # a placeholder would be taken for an image
        ids.append(token)
        tokens.append(token)
        scores.append(float(last[token]))
    return tokens, torch.tensor(scores)
