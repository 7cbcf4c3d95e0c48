"""Models that see, of one processor each, through the whole engine against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import close
from tests.helpers.checkpoints import change_config
from tests.helpers.images import encoded, noise
from tests.helpers.vision_models import KINDS, greedy, reference_processor, write_seeing

import fwk
from fwk import SamplingParams
from fwk.config import ModelOptions
from fwk.errors import ConfigError, InvalidRequest, ModelLoadError
from fwk.interfaces.loader import LoaderContext
from fwk.interfaces.multimodal import MediaItem, MultimodalContext, MultimodalProcessor
from fwk.text import ModelText
from fwk.types import ModelConfig
from fwk_loaders.dummy.loader import DummyLoader

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
COUNT = 8
SEEN = "\0"
"""Stands for the mark of an image."""
CHATS: dict[str, tuple[str, list[Image.Image]]] = {
    "text alone": ("What is this?", []),
    "image first": (f"{SEEN}What is this?", [noise(1)]),
    "two": (f"Look:\n{SEEN} and {SEEN}\nnow", [noise(2, 20, 60), noise(3, 70, 12)]),
    "one after another": (f"{SEEN}{SEEN}", [noise(4, 16, 16), noise(5, 9, 9)]),
    "the first again": (f"Again {SEEN}", [noise(1)]),
}


class Reference:
    """A kind's model, its folder, and what it says to each chat."""

    def __init__(self, name: str, folder: Path, **changes: Any) -> None:
        self.kind, self.folder, self.model = KINDS[name], folder, write_seeing(folder, name, **changes)
        self.processor = reference_processor(folder, name)
        self._said: dict[str, Any] = {}

    def text(self, name: str) -> str:
        return CHATS[name][0].replace(SEEN, self.kind.marks[0])

    def said(self, name: str) -> tuple[list[int], list[int], Any]:
        if name not in self._said:
            self._said[name] = self.greedy(name)
        return self._said[name]

    def greedy(self, name: str) -> tuple[list[int], list[int], Any]:
        return greedy(self.model, self.processor, self.text(name), CHATS[name][1], COUNT, self.kind.first)

    def ask(
        self, llm: fwk.LLM, names: Sequence[str], n: int = 1, adapter: str | None = None, **sampling: Any
    ) -> list[Any]:
        prompts = [llm.text.encode(self.text(name), add_special_tokens=False) for name in names]
        media = [[MediaItem("image", encoded(image)) for image in CHATS[name][1]] for name in names]
        no_marks = dict.fromkeys(range(self.kind.first, self.kind.first + len(self.kind.marks)), -100.0)
        settings = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 0, "logit_bias": no_marks}
        more: dict[str, Any] = {"adapter": adapter} if adapter else {}
        return llm.generate(prompts, SamplingParams(**{**settings, **sampling}), n=n, media=media, **more)

    def check(self, done: Sequence[Any], names: Sequence[str]) -> None:
        for name, found in zip(names, done, strict=True):
            prompt, tokens, scores = self.said(name)
            assert found.prompt_token_ids == prompt, name
            assert found.token_ids == tokens, name
            close(torch.tensor([entry.logprob for entry in found.logprobs]), scores)


OTHERS = ("llava_full", "internvl_qwen3", "internvl_llama")
"""Of another text model or encoder than the one before them; tried in the sweep."""
SOME = [pytest.param(name, marks=[pytest.mark.sweep] * (name in OTHERS)) for name in KINDS]


@pytest.fixture(scope="module", params=SOME)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp("model"))


OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 7, "max_prefill_tokens": 24, "max_running_requests": 3},
    "defaults": {},
    "plain": {"attention_backend": "torch", "operator_backend": "torch", "disable_cuda_graph": True},
    "n-gram": {"speculative_algorithm": "ngram"},
    "whole prompts": {"chunked_prefill_size": -1, "executor": "threaded", "mm_encoder_cache_bytes": 0},
    "two ranks": {"tensor_parallel_size": 2, "executor": "processes"},
}


@pytest.mark.parametrize(
    "options", [pytest.param(o, id=n, marks=[pytest.mark.sweep] * (n != "chunks")) for n, o in OPTIONS.items()]
)
def test_greedy_tokens_and_their_scores(reference: Reference, options: dict[str, Any]) -> None:
    """Twice: the second time prompts come from the prefix cache."""
    with fwk.LLM(str(reference.folder), prefix_cache="radix", **{**SMALL, **options}) as llm:
        reference.check(reference.ask(llm, list(CHATS)), list(CHATS))
        again = reference.ask(llm, list(CHATS))
    reference.check(again, list(CHATS))
    assert max(done.cached_tokens for done in again) > 0


@pytest.mark.gate(1)
@pytest.mark.parametrize("names", ["of the hub", "new"])
def test_a_llava_whatever_its_weights_are_called(names: str, tmp_path: Path) -> None:
    """transformers has changed that twice."""
    reference = Reference("llava", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if names == "of the hub":
        tensors = {name.replace("vision_tower.", "vision_tower.vision_model."): x for name, x in tensors.items()}
    else:
        tensors = {
            "lm_head.weight"
            if name == "language_model.lm_head.weight"
            else "model." + name.replace("language_model.model.", "language_model."): x
            for name, x in tensors.items()
        }
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with fwk.LLM(str(tmp_path), chunked_prefill_size=7, **SMALL) as llm:
        reference.check(reference.ask(llm, list(CHATS)), list(CHATS))


@pytest.mark.sweep
def test_scores_of_a_prompt_and_samples_of_it(reference: Reference) -> None:
    prompt = reference.said("two")[0]
    given = reference.processor(
        text=reference.text("two"), images=CHATS["two"][1], return_tensors="pt", add_special_tokens=False
    )
    with torch.no_grad():
        rows = reference.model(**given).logits[0].log_softmax(-1)[:-1]
    with fwk.LLM(str(reference.folder), **SMALL) as llm:
        [done] = reference.ask(llm, ["two"], prompt_logprobs=0)
        three = reference.ask(llm, ["two"], n=3, temperature=1, seed=1)
    scores = torch.tensor([entry.logprob for entry in done.prompt_logprobs[1:]])
    close(scores, rows.gather(1, torch.tensor([prompt[1:]]).T)[:, 0])
    assert len({tuple(one.token_ids) for one in three}) == 3


@pytest.mark.sweep
def test_text_alone_loads_no_encoder(reference: Reference) -> None:
    with fwk.LLM(str(reference.folder), enable_multimodal=False, chunked_prefill_size=1, **SMALL) as llm:
        reference.check(reference.ask(llm, ["text alone"]), ["text alone"])
        with pytest.raises(InvalidRequest, match="this server's model reads text only, not image"):
            reference.ask(llm, ["image first"])


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16"}])
def test_other_formats_say_the_same_in_chunks(reference: Reference, options: dict[str, Any]) -> None:
    found: list[list[list[int]]] = []
    for chunk in (512, 7):
        with fwk.LLM(str(reference.folder), **{**SMALL, **options}, chunked_prefill_size=chunk) as llm:
            found.append([done.token_ids for done in reference.ask(llm, list(CHATS))])
    assert found[0] == found[1]


@pytest.mark.sweep
def test_an_adapter_changes_the_text_model_alone(reference: Reference, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    ending = "layers.1.self_attn.v_proj"
    names = load_file(reference.folder / "model.safetensors")
    [name] = [name for name in names if name.endswith(f"{ending}.weight") and "language_model" in name]
    [module] = [m for name, m in reference.model.named_modules() if name.endswith(f"language_model.{ending}")]
    a, b = (torch.randn(shape, generator=generator) for shape in ((4, module.in_features), (module.out_features, 4)))
    head = f"base_model.model.{name.removesuffix('.weight')}."
    save_file({head + "lora_A.weight": a, head + "lora_B.weight": b}, tmp_path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 2, "target_modules": ["v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    options = {"enable_lora": True, "lora_paths": [f"a={tmp_path}"]}
    before = module.weight.data.clone()
    try:
        module.weight.data += b @ a * 0.5
        wanted = reference.greedy("two")
    finally:
        module.weight.data = before
    assert wanted[1] != reference.said("two")[1]
    with fwk.LLM(str(reference.folder), **options, **SMALL) as llm:
        [plain] = reference.ask(llm, ["two"])
        [adapted] = reference.ask(llm, ["two"], adapter="a")
    assert plain.token_ids == reference.said("two")[1]
    assert adapted.token_ids == wanted[1]


SIZES: list[tuple[int, int]] = [
    (40, 24),
    (24, 40),
    (16, 16),
    (33, 32),
    (200, 30),
    (30, 200),
    (9, 9),
    (100, 99),
    (17, 64),
    (640, 480),
    (8, 9),
    (333, 222),
    (60, 61),
]
MORE: dict[str, list[tuple[int, int]]] = {
    "llava": [(3, 200), (1, 1)],
    "mistral3": [(9, 90), (400, 40), (2, 3)],
    "internvl": [(9, 90), (400, 2), (32, 16), (64, 32), (100, 50)],
}
"""Small and long ones, which others refuse as transformers does, and those of two tiles."""


def processor_of(folder: Path, name: str) -> tuple[ModelText, MultimodalProcessor]:
    """The text of a checkpoint's model, and fwk's processor of its images; how it merges patches is left to fwk."""
    kind, checkpoint = KINDS[name], DummyLoader(LoaderContext()).open(folder)
    [spec] = [
        s for s in import_module(kind.package).models() if f"{kind.name}ForConditionalGeneration" in s.architectures
    ]
    raw = {name: value for name, value in checkpoint.config().items() if name != "spatial_merge_size"}
    config = ModelConfig.from_dict(spec.normalised(raw), str(folder))
    text = ModelText(checkpoint, ModelOptions(), config.vocab_size)
    context = MultimodalContext(config, checkpoint.processor_config(), text, max_pixels=2**20)
    return text, kind.ours()(context)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llava", {}),
        ("pixtral", {}),
        ("llava_onevision", {}),
        ("llava_onevision", {"image_grid_pinpoints": [[32, 32], [16, 48]], "resample": 2}),
        ("mistral3", {}),
        ("mistral3", {"size": {"longest_edge": 1000}}),
        ("mistral3", {"size": {"height": 16, "width": 80}}),
        ("internvl", {}),
        ("internvl", {"max_patches": 12, "min_patches": 2}),
        ("internvl", {"max_patches": 1}),
        ("internvl", {"resample": 2}),
        ("gemma3", {}),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 9}),
        ("gemma3", {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 2, "pan_and_scan_min_crop_size": 30}),
        ("gemma3", {"resample": 3, "rescale_factor": 0.01}),
    ],
)
def test_tokens_and_numbers_are_those_of_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    write_seeing(tmp_path, name, **changes)
    kind, theirs = KINDS[name], reference_processor(tmp_path, name)
    calls = {key: value for key, value in changes.items() if key.startswith(("do_", "pan_"))}
    text, ours = processor_of(tmp_path, name)
    for i, size in enumerate(SIZES + MORE.get(name, [])):
        images = [noise(i, *size), noise(100 + i, size[1], size[0])]
        prompt = f"a\n{kind.marks[0]}b\n\n{kind.marks[0]}\n"
        wanted = theirs(text=prompt, images=images, return_tensors="np", add_special_tokens=False, **calls)
        given = [MediaItem("image", encoded(image)) for image in images]
        placed = ours.process(text.encode(prompt, add_special_tokens=False), given)
        assert placed.token_ids == wanted["input_ids"][0].tolist()
        found = [pixels for piece in placed.media for pixels in kind.pixels(piece.arrays)]
        for one, other in zip(found, kind.wanted(wanted), strict=True):
            np.testing.assert_array_equal(one, other)


def test_a_picture_that_becomes_too_long_is_refused(tmp_path: Path) -> None:
    write_seeing(tmp_path, "llava")
    text, ours = processor_of(tmp_path, "llava")
    prompt = text.encode("a<image>", add_special_tokens=False)
    with pytest.raises(InvalidRequest, match="it: the image of 2 x 30000 is too long"):
        ours.process(prompt, [MediaItem("image", encoded(noise(1, 2, 30_000)), "it")])


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llava", {"vision_feature_layer": [1, 2]}, "'vision_feature_layer' must name one of the 3 layers, not"),
    ("llava", {"vision_feature_layer": 9}, "'vision_feature_layer' must name one of the 3 layers, not 9"),
    ("llava", {"vision_config": {"model_type": "siglip_vision_model"}}, "llava computes 'clip_vision_model' or"),
    ("llava", {"text_config": {"model_type": "qwen2"}}, "'model_type' is 'qwen2'; llava computes 'llama'"),
    ("pixtral", {"vision_feature_layer": -2}, "'vision_feature_layer' is -2; llava is served with -1 for 'pixtral'"),
    ("pixtral", {"text_config": {"model_type": "qwen2"}}, "'qwen2'; llava computes 'mistral' or 'llama'"),
    ("mistral3", {"vision_config": None}, "'vision_config' must be an object"),
    ("mistral3", {"vision_config": {"model_type": "siglip"}}, "'model_type' is 'siglip'; mistral3 computes"),
    ("mistral3", {"text_config": {"model_type": "gemma"}}, "'gemma'; mistral3 computes 'mistral' or 'll"),
    ("mistral3", {"vision_feature_layer": -2}, "'vision_feature_layer' is -2; mistral3 is served with -1"),
    ("internvl", {"vision_config": None}, "'vision_config' must be an object"),
    ("internvl", {"text_config": {"model_type": "gemma"}}, "'gemma'; internvl computes 'qwen2' or 'qwen3'"),
    ("internvl", {"vision_feature_layer": -2}, "'vision_feature_layer' is -2; internvl is served with -1"),
    ("llava_onevision", {"vision_feature_select_strategy": "default"}, "is 'default'; llava_onevision is served with"),
    ("llava_onevision", {"vision_feature_layer": [1]}, "'vision_feature_layer' must name one of the 2 layers, not"),
    (
        "gemma3",
        {"mm_tokens_per_image": 5},
        "4 x 4 patches of an image are not squares of which 'mm_tokens_per_image', 5,",
    ),
    ("gemma3", {"vision_config": {"model_type": "clip_vision_model"}}, "gemma3_vl computes 'siglip_vision_model'"),
    ("gemma3", {"vision_config": None}, "'vision_config' must be an object"),
    ("gemma3", {"text_config": {"model_type": "gemma"}}, "'gemma'; gemma3_vl computes 'gemma3_text'"),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG)
def test_wrong_configs_are_named(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_seeing(tmp_path, name)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(tmp_path), **SMALL)


WRONG_SETTINGS: list[tuple[str, dict[str, Any], str]] = [
    ("internvl", {"size": {"height": 32, "width": 32}}, "cuts tiles of 32, the model reads 16 pixels"),
    ("internvl", {"size": {"height": 32, "width": 16}}, "size must be a square"),
    ("internvl", {"max_patches": 0}, "min_patches and max_patches must be 1 to 64"),
    ("mistral3", {"size": {"longest_edge": 0}}, r"preprocessor_config\.json: "),
    ("mistral3", {"size": {"longest_edge": 10**6}}, r"preprocessor_config\.json: "),
    ("mistral3", {"size": {"width": 5}}, r"preprocessor_config\.json: "),
    ("mistral3", {"size": {"longest_edge": "a"}}, r"preprocessor_config\.json: "),
]


@pytest.mark.parametrize(("name", "changes", "message"), WRONG_SETTINGS)
def test_wrong_settings_are_named(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_seeing(tmp_path, name, **changes)
    with pytest.raises(ModelLoadError, match=message):
        processor_of(tmp_path, name)


def test_an_image_whose_tokens_see_each_other_fits_into_a_step(tmp_path: Path) -> None:
    write_seeing(tmp_path, "gemma3")
    message = (
        "computes the 4 tokens of an image in one step, .* --chunked-prefill-size 4 or more, and --max-prefill-tokens 7"
    )
    small: list[dict[str, Any]] = [{"chunked_prefill_size": 3}, {"max_prefill_tokens": 6}]
    for options in small:
        with pytest.raises(ConfigError, match=message):
            fwk.LLM(str(tmp_path), **SMALL, max_running_requests=3, **options)
