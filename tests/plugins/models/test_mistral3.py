"""Mistral 3 through the whole engine against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.architectures import close
from tests.helpers.images import encoded, noise
from tests.helpers.mistral3 import (
    EYES,
    FIRST,
    IMAGE_ID,
    PREPROCESSOR,
    SPECIALS,
    greedy,
    placed,
    reference_images,
    write_mistral3,
)

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError
from fwk.interfaces.multimodal import MediaItem, MultimodalContext
from fwk.types import ModelConfig
from fwk_models.mistral3 import models
from fwk_multimodal.mistral3.processor import Mistral3Processor

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
COUNT = 8
SEEN = "[IMG]"
CHATS = {
    "text alone": ("What is this?", []),
    "image first": (f"{SEEN}What is this?", [noise(1)]),
    "two": (f"Look: {SEEN} and {SEEN} now", [noise(2, 20, 60), noise(3, 70, 12)]),
    "prompt ends in it": (f"What? {SEEN}", [noise(4, 9, 9)]),
}


def test_greedy_tokens_and_their_scores(tmp_path: Path) -> None:
    """Twice, once in chunks and with drafts: the second time from the prefix cache; then without the encoder."""
    reference = write_mistral3(tmp_path)
    wanted: dict[str, Any] = {}
    no_marks = dict.fromkeys(range(FIRST, FIRST + 5), -100.0)
    sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=0, logit_bias=no_marks)
    for options in ({}, {"chunked_prefill_size": 7, "speculative_algorithm": "ngram"}):
        with fwk.LLM(str(tmp_path), **SMALL, **options) as llm:
            prompts = [llm.text.encode(text, add_special_tokens=False) for text, _ in CHATS.values()]
            media = [[MediaItem("image", encoded(image)) for image in images] for _, images in CHATS.values()]
            found = [done for _ in range(2) for done in llm.generate(prompts, sampling, media=media)]
        for done, (name, (_, images)), prompt in zip(found, [*CHATS.items()] * 2, prompts * 2, strict=True):
            if name not in wanted:
                wanted[name] = greedy(reference, prompt, images, COUNT)
            assert done.token_ids == wanted[name][0], (name, options)
            close(torch.tensor([entry.logprob for entry in done.logprobs or ()]), wanted[name][1])
    with fwk.LLM(str(tmp_path), enable_multimodal=False, **SMALL) as llm:
        [done] = llm.generate([prompts[0]], sampling)
    assert done.token_ids == wanted["text alone"][0]


class Marks:
    """A tokeniser that knows the marks alone."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [FIRST + SPECIALS.index(text)]


def context(**changes: Any) -> MultimodalContext:
    raw = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320}
    raw |= {"image_token_index": IMAGE_ID, "vision_config": EYES, "architectures": ["x"]}
    return MultimodalContext(ModelConfig.from_dict(raw, ""), {**PREPROCESSOR, **changes}, Marks(), 2**20)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{}, {"size": {"longest_edge": 1000}}, {"size": {"height": 16, "width": 80}}])
def test_images_are_those_of_transformers(changes: dict[str, Any]) -> None:
    processor = Mistral3Processor(context(**changes))
    sizes = [(16, 16), (8, 9), (9, 90), (400, 20), (40, 24), (333, 222), (60, 61), (32, 16), (2, 3)]
    for number, size in enumerate(sizes):
        image = noise(number, *size)
        found = processor.process([5, IMAGE_ID, 6], [MediaItem("image", encoded(image))])
        wanted = reference_images([image], **changes)
        [piece] = found.media
        np.testing.assert_array_equal(piece.arrays["pixel_values"], wanted["pixel_values"][0])
        assert found.token_ids == placed([5, IMAGE_ID, 6], wanted["image_sizes"].tolist())
        assert (piece.start, piece.length) == (1, len(found.token_ids) - 2)


@pytest.mark.parametrize("size", [{"longest_edge": 0}, {"longest_edge": 10**6}, {"width": 5}, {"longest_edge": "a"}])
def test_wrong_sizes_are_named(size: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError, match=r"preprocessor_config\.json: "):
        Mistral3Processor(context(size=size))


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "'vision_config' must be an object"),
        ({"vision_config": {"model_type": "siglip"}}, "vision_config's 'model_type' is 'siglip'; mistral3 computes"),
        ({"vision_config": {}, "text_config": {"model_type": "gemma"}}, "'gemma'; mistral3 computes 'mistral' or 'll"),
        ({"vision_config": {}, "vision_feature_layer": -2}, "'vision_feature_layer' is -2; mistral3 is served with -1"),
    ],
)
def test_wrong_configs_are_named(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        models()[0].normalised(raw)
