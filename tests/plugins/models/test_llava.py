"""LLaVA through the whole engine, and its processor, against transformers in float32, on tiny random checkpoints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import close
from tests.helpers.checkpoints import SMALL as TEXT
from tests.helpers.checkpoints import change_config, randomise
from tests.helpers.images import IMAGE_ID, SPECIALS, VISION, encoded, greedy, noise
from tests.helpers.lazy import lazy
from tokenizers import AddedToken

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.dialect import MediaReading
from fwk.interfaces.multimodal import MediaItem
from fwk_loaders.dummy.tokenizer import build_tokenizer

image_processing_pil_llava = lazy("transformers.models.llava.image_processing_pil_llava")
transformers = lazy("transformers")

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
SETTINGS: dict[str, Any] = {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}
CHATS: list[Any] = [
    ("USER: Hello. ASSISTANT:", []),
    ("USER: <image>\nWhat is this? ASSISTANT:", [noise(1)]),
    ("USER: First <image> and then <image> ASSISTANT:", [noise(2, 20, 50), noise(3, 16, 16)]),
]


def write(folder: Path, **changes: Any) -> transformers.LlavaForConditionalGeneration:
    torch.manual_seed(0)
    vision: Any = {"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3}
    text: Any = {"model_type": "llama", **TEXT}
    config = transformers.LlavaConfig(
        text_config=text,
        vision_config=vision,
        image_token_index=IMAGE_ID,
        **changes,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    tokenizer = build_tokenizer(IMAGE_ID, str(folder))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return model


def reference_processor(folder: Path, strategy: str = "default") -> Any:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    return transformers.LlavaProcessor(
        image_processing_pil_llava.LlavaImageProcessorPil(**SETTINGS),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy=strategy,
        num_additional_image_tokens=1,
    )


def ask(llm: fwk.LLM, chats: Sequence[Any]) -> list[Any]:
    prompts = [llm.text.encode(text, add_special_tokens=False) for text, _ in chats]
    media = [[MediaItem("image", encoded(image)) for image in images] for _, images in chats]
    return llm.generate(prompts, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0), media=media)


@pytest.mark.gate(1)
@pytest.mark.parametrize("names", ["saved", "of the hub", "new"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": False}],
    ids=["default", "full"],
)
def test_greedy_tokens_and_their_scores(names: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Whatever the weights are called: transformers has changed that twice."""
    reference = write(tmp_path, **changes)
    processor = reference_processor(tmp_path, changes.get("vision_feature_select_strategy", "default"))
    tensors = load_file(tmp_path / "model.safetensors")
    if names == "of the hub":
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
    elif names == "new":
        tensors = {
            "lm_head.weight"
            if name == "language_model.lm_head.weight"
            else "model." + name.replace("language_model.model.", "language_model."): x
            for name, x in tensors.items()
        }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with fwk.LLM(str(tmp_path), chunked_prefill_size=7, **SMALL) as llm:
        done = ask(llm, CHATS)
    for (text, images), found in zip(CHATS, done, strict=True):
        tokens, scores = greedy(reference, processor, text, images, 10)
        assert found.token_ids == tokens
        close(torch.tensor([entry.logprob for entry in found.logprobs]), torch.tensor(scores))


@pytest.mark.gate(3)
@pytest.mark.parametrize("size", [(40, 24), (24, 40), (16, 16), (3, 200), (101, 99), (640, 480), (1, 1)])
def test_numbers_are_those_of_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    write(tmp_path)
    reference: Any = image_processing_pil_llava.LlavaImageProcessorPil(**SETTINGS)
    wanted = reference(noise(1, *size), return_tensors="np")["pixel_values"][0]
    with fwk.LLM(str(tmp_path), **SMALL) as llm:
        reading: Any = llm._parts.service(MediaReading)
        processor: Any = reading.context.jobs._make()._placer._processor
        prompt = llm.text.encode("a<image>", add_special_tokens=False)
        placed = processor.process(prompt, [MediaItem("image", encoded(noise(1, *size)))])
        processor = processor._of_kind
        processor.context = replace(processor.context, max_pixels=100_000)
        with pytest.raises(InvalidRequest, match="it: the image of 2 x 30000 is too long"):
            processor.process(prompt, [MediaItem("image", encoded(noise(1, 2, 30_000)), "it")])
    np.testing.assert_array_equal(placed.media[0].arrays["pixel_values"], wanted)


def test_text_alone_loads_no_encoder(tmp_path: Path) -> None:
    reference = write(tmp_path)
    with fwk.LLM(str(tmp_path), enable_multimodal=False, **SMALL) as llm:
        [done] = ask(llm, CHATS[:1])
    assert done.token_ids == greedy(reference, reference_processor(tmp_path), CHATS[0][0], [], 10)[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": [1, 2]}, "'vision_feature_layer' must name one of the 3 layers, not"),
        ({"vision_feature_layer": 9}, "'vision_feature_layer' must name one of the 3 layers, not 9"),
        ({"vision_config": {**VISION, "model_type": "siglip_vision_model"}}, "llava computes 'clip_vision_model' or"),
        ({"text_config": {"model_type": "qwen2"}}, "'model_type' is 'qwen2'; llava computes 'llama'"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(tmp_path), **SMALL)
