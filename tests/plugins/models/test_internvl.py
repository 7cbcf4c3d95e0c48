"""InternVL through the whole engine against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.architectures import close
from tests.helpers.images import encoded, noise
from tests.helpers.internvl import EYES, FIRST, IMAGE_ID, KINDS, PREPROCESSOR, greedy, reference_images, write_internvl

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError
from fwk.interfaces.multimodal import MediaItem, MultimodalContext
from fwk.types import ModelConfig
from fwk_models.internvl import models
from fwk_multimodal.internvl.processor import InternVLProcessor

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
COUNT = 8
SEEN = "<IMG_CONTEXT>"
CHATS = {
    "text alone": ("What is this?", []),
    "image first": (f"{SEEN}What is this?", [noise(1)]),
    "two": (f"Look: {SEEN} and {SEEN} now", [noise(2, 20, 60), noise(3, 70, 12)]),
    "prompt ends in it": (f"What? {SEEN}", [noise(4, 16, 16)]),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_their_scores(kind: str, tmp_path: Path) -> None:
    """Twice, once in chunks and with drafts: the second time from the prefix cache."""
    reference = write_internvl(tmp_path, kind)
    wanted: dict[str, Any] = {}
    for options in ({}, {"chunked_prefill_size": 7, "speculative_algorithm": "ngram"}):
        with fwk.LLM(str(tmp_path), **SMALL, **options) as llm:
            prompts = [llm.text.encode(text, add_special_tokens=False) for text, _ in CHATS.values()]
            media = [[MediaItem("image", encoded(image)) for image in images] for _, images in CHATS.values()]
            no_marks = dict.fromkeys(range(FIRST, FIRST + 5), -100.0)
            sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=0, logit_bias=no_marks)
            found = [done for _ in range(2) for done in llm.generate(prompts, sampling, media=media)]
        for done, (name, (_, images)), prompt in zip(found, [*CHATS.items()] * 2, prompts * 2, strict=True):
            if name not in wanted:
                wanted[name] = greedy(reference, prompt, images, COUNT)
            assert done.token_ids == wanted[name][0], (name, options)
            close(torch.tensor([entry.logprob for entry in done.logprobs or ()]), wanted[name][1])


def test_text_alone_loads_no_encoder(tmp_path: Path) -> None:
    reference = write_internvl(tmp_path, "qwen2")
    with fwk.LLM(str(tmp_path), enable_multimodal=False, **SMALL) as llm:
        prompt = llm.text.encode("What?", add_special_tokens=False)
        [done] = llm.generate([prompt], SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True))
    with torch.no_grad():
        first = int(reference(input_ids=torch.tensor([prompt])).logits[0, -1].argmax())
    assert done.token_ids[0] == first


class Marks:
    """A tokeniser that knows two marks."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [{"<img>": FIRST, "</img>": FIRST + 1}[text]]


def context(**changes: Any) -> MultimodalContext:
    raw = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320}
    raw |= {"image_token_id": IMAGE_ID, "vision_config": EYES, "architectures": ["x"]}
    return MultimodalContext(ModelConfig.from_dict(raw, ""), {**PREPROCESSOR, **changes}, Marks(), 2**20)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"max_patches": 12, "min_patches": 2}, {"max_patches": 1}, {"resample": 2}])
def test_tiles_are_those_of_transformers(changes: dict[str, Any]) -> None:
    processor = InternVLProcessor(context(**changes))
    sizes = [(16, 16), (8, 9), (9, 90), (400, 2), (40, 24), (333, 222), (60, 61), (32, 16), (64, 32), (100, 50)]
    for number, size in enumerate(sizes):
        image = noise(number, *size)
        placed = processor.process([5, IMAGE_ID, 6], [MediaItem("image", encoded(image))])
        wanted = reference_images([image], **changes)
        found = np.stack([piece.arrays["pixel_values"] for piece in placed.media])
        np.testing.assert_array_equal(found, wanted["pixel_values"])
        assert placed.token_ids == [5, FIRST, *[IMAGE_ID] * (4 * len(found)), FIRST + 1, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": {"height": 32, "width": 32}}, "cuts tiles of 32, the model reads 16 pixels"),
        ({"size": {"height": 32, "width": 16}}, "size must be a square"),
        ({"max_patches": 0}, "min_patches and max_patches must be 1 to 64"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        InternVLProcessor(context(**changes))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "'vision_config' must be an object"),
        (
            {"vision_config": {}, "text_config": {"model_type": "gemma"}},
            "'gemma'; internvl computes 'qwen2' or 'qwen3'",
        ),
        ({"vision_config": {}, "vision_feature_layer": -2}, "'vision_feature_layer' is -2; internvl is served with -1"),
    ],
)
def test_wrong_configs_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        models()[0].normalised(raw)
