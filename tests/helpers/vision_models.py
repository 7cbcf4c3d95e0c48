"""Tiny random checkpoints of models that see, written by transformers' own classes, and its processors for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image

from fwk.interfaces.multimodal import MultimodalProcessor
from tests.helpers.checkpoints import SMALL, VOCAB, WINDOWS, randomise, write_tokenizer
from tests.helpers.images import VISION
from tests.helpers.lazy import lazy

transformers = lazy("transformers")
onevision = lazy("transformers.models.llava_onevision.image_processing_pil_llava_onevision")
pixtral = lazy("transformers.models.pixtral.image_processing_pil_pixtral")
gemma3 = lazy("transformers.models.gemma3.image_processing_pil_gemma3")
llava = lazy("transformers.models.llava.image_processing_pil_llava")
got_ocr2 = lazy("transformers.models.got_ocr2.image_processing_pil_got_ocr2")

MEANS: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.25, 0.3]}
PIXTRAL: dict[str, Any] = {
    "model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 48, "image_size": 48, "patch_size": 4,
}  # fmt: skip
INTERN: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48,
    "image_size": [16, 16], "patch_size": [4, 4], "layer_scale_init_value": 0.7,
}  # fmt: skip
INTERNVL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "internvl": ({"model_type": "qwen2"}, {}),
    "internvl_qwen3": (
        {"model_type": "qwen3", "head_dim": 32},
        {"norm_type": "rms_norm", "use_qk_norm": True},
    ),
    "internvl_llama": ({"model_type": "llama"}, {"attention_bias": True, "use_mean_pooling": False}),
}
"""InternVL's text models, each with an encoder of another make."""
Changes = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """An architecture. marks: special tokens, the first of which stands for an image.

    config: makes it, given the first mark's id. processor: transformers', of a tokenizer and preprocessor_config.json.
    longest: text that is one token, as the vocabularies of such models have it. package: fwk's plugin of the model.
    load: its processor. pixels, wanted: of a piece of media, and of what transformers makes, images to be compared.
    """

    name: str
    marks: tuple[str, ...]
    settings: Changes
    config: Callable[[int], Any]
    processor: Callable[[Any, Changes], Any]
    longest: tuple[str, ...] = ()
    named: Changes = field(default_factory=dict[str, Any])
    package: str = ""
    load: str = ""
    pixels: Callable[[Any], Sequence[np.ndarray]] = lambda arrays: [arrays["pixel_values"]]
    wanted: Callable[[Any], Sequence[np.ndarray]] = lambda found: list(found["pixel_values"])

    def ours(self) -> type[MultimodalProcessor]:
        """fwk's processor."""
        module, _, name = self.load.partition(":")
        return getattr(import_module(f"fwk_multimodal.{module}.processor"), name)

    @property
    def first(self) -> int:
        """The id of the first mark; no text has those from there on."""
        return VOCAB - len(self.marks)


def _gemma3(first: int) -> Any:
    text = {**SMALL, **WINDOWS, "sliding_window": 7, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**VISION, "layer_norm_eps": 1e-3},
        mm_tokens_per_image=4,
        boi_token_index=first,
        eoi_token_index=first + 1,
        image_token_index=first + 2,
        tie_word_embeddings=False,  # else it repeats what it read last
        attn_implementation="eager",
    )
    return config


def _pixtral(first: int) -> Any:
    text = {"model_type": "mistral", **SMALL, "rms_norm_eps": 1e-5, "sliding_window": None, "head_dim": 32}
    return transformers.LlavaConfig(
        text_config=text,
        vision_config=PIXTRAL,
        image_token_index=first,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        attn_implementation="eager",
    )


def _llava(first: int, **changes: Any) -> Any:
    return transformers.LlavaConfig(
        text_config={"model_type": "llama", **SMALL},
        vision_config={"model_type": "clip_vision_model", **VISION, "num_hidden_layers": 3},
        image_token_index=first,
        attn_implementation="eager",
        **changes,
    )


def _mistral3(first: int) -> Any:
    text = {"model_type": "mistral", **SMALL, "rms_norm_eps": 1e-5, "sliding_window": None, "head_dim": 32}
    return transformers.Mistral3Config(
        text_config=text,
        vision_config=PIXTRAL,
        image_token_index=first,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def _internvl(name: str, first: int) -> Any:
    text, vision = INTERNVL[name]
    return transformers.InternVLConfig(
        text_config={**SMALL, "rms_norm_eps": 1e-5, **text},
        vision_config={**INTERN, **vision},
        image_token_id=first,
        image_seq_length=4,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )


def _onevision(first: int) -> Any:
    return transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **SMALL, "rms_norm_eps": 1e-5},
        vision_config={"model_type": "siglip_vision_model", **VISION, "vision_use_head": False},
        image_token_index=first,
        video_token_index=first + 1,
        image_grid_pinpoints=TILES,
        vision_aspect_ratio="anyres_max_3",
        attn_implementation="eager",
    )


@dataclass
class Expanding:
    """A processor of transformers that needs torchvision for videos: its image processor, and its text for each image.

    places: that text, of what the image processor makes and an image's number. The model is not given what is
    counted for it.
    """

    tokenizer: Any
    images: Any
    mark: str
    places: Callable[[Any, int], str]

    def __call__(self, text: str, images: Any, return_tensors: str, add_special_tokens: bool, **_: Any) -> Any:
        made = self.images(images=images, return_tensors=return_tensors) if images else {}
        first, *rest = text.split(self.mark)
        text = first + "".join(self.places(made, number) + part for number, part in enumerate(rest))
        given = self.tokenizer(text, return_tensors=return_tensors, add_special_tokens=add_special_tokens)
        inputs = {name: value for name, value in made.items() if name != "num_patches"}
        return {**{name: given[name] for name in ("input_ids", "attention_mask")}, **inputs}


def _pixtral_places(made: Any, number: int, side: int = 4) -> str:
    """side: of a token's square, in pixels."""
    height, width = (int(edge) // side for edge in made["image_sizes"][number])
    rows = ["[IMG]" * width] * height
    return "[IMG_BREAK]".join(rows) + "[IMG_END]"


def _internvl_places(made: Any, number: int) -> str:
    return f"<img>{'<IMG_CONTEXT>' * (4 * int(made['num_patches'][number]))}</img>"


def _onevision_places(settings: Changes) -> Callable[[Any, int], str]:
    """By transformers' own methods, which read nothing else of the processor."""
    known = SimpleNamespace(
        num_image_tokens=16,
        vision_aspect_ratio="anyres_max_3",
        image_processor=SimpleNamespace(image_grid_pinpoints=settings["image_grid_pinpoints"]),
    )
    theirs = transformers.LlavaOnevisionProcessor
    known._get_unpadded_features = partial(theirs._get_unpadded_features, known)

    def places(made: Any, number: int) -> str:
        height, width = (int(edge) for edge in made["image_sizes"][number])
        return "<image>" * theirs._get_number_of_features(known, height, width, 16, 16)

    return places


TILES = [[16, 16], [16, 32], [32, 16], [32, 32], [48, 16], [16, 64], [48, 48]]
PIXTRAL_MARKS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def _without_padding(found: Any) -> list[np.ndarray]:
    """Pixtral's images, each of its own size."""
    pairs = zip(found["pixel_values"], found["image_sizes"], strict=True)
    return [pixels[:, :height, :width] for pixels, (height, width) in pairs]


LLAVA_FULL = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", "multimodal_projector_bias": False}


def _llava_kind(**changes: Any) -> Kind:
    """changes: of the config."""
    return Kind(
        "Llava",
        ("<image>",),
        {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}},
        partial(_llava, **changes),
        lambda tokenizer, settings: transformers.LlavaProcessor(
            llava.LlavaImageProcessorPil(**settings),
            tokenizer,
            patch_size=4,
            vision_feature_select_strategy=changes.get("vision_feature_select_strategy", "default"),
            num_additional_image_tokens=1,
        ),
        package="fwk_models.llava",
        load="llava:LlavaProcessor",
    )


KINDS: dict[str, Kind] = {
    "llava": _llava_kind(),
    "llava_full": _llava_kind(**LLAVA_FULL),
    "pixtral": Kind(
        "Llava",
        PIXTRAL_MARKS,
        {"size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4}, **MEANS},
        _pixtral,
        lambda tokenizer, settings: Expanding(
            tokenizer, pixtral.PixtralImageProcessorPil(**settings), PIXTRAL_MARKS[0], _pixtral_places
        ),
        package="fwk_models.llava",
        load="llava:LlavaProcessor",
        wanted=_without_padding,
    ),
    "mistral3": Kind(
        "Mistral3",
        PIXTRAL_MARKS,
        {"size": {"longest_edge": 48}, "patch_size": {"height": 4, "width": 4}, **MEANS},
        _mistral3,
        lambda tokenizer, settings: Expanding(
            tokenizer,
            pixtral.PixtralImageProcessorPil(**settings | {"patch_size": {"height": 8, "width": 8}}),
            PIXTRAL_MARKS[0],
            partial(_pixtral_places, side=8),
        ),
        package="fwk_models.mistral3",
        load="mistral3:Mistral3Processor",
        wanted=_without_padding,
    ),
    **{
        name: Kind(
            "InternVL",
            ("<IMG_CONTEXT>", "<img>", "</img>"),
            {
                "size": {"height": 16, "width": 16},
                "crop_to_patches": True,
                "min_patches": 1,
                "max_patches": 6,
                **MEANS,
            },
            partial(_internvl, name),
            lambda tokenizer, settings: Expanding(
                tokenizer, got_ocr2.GotOcr2ImageProcessorPil(**settings), "<IMG_CONTEXT>", _internvl_places
            ),
            package="fwk_models.internvl",
            load="internvl:InternVLProcessor",
        )
        for name in INTERNVL
    },
    "llava_onevision": Kind(
        "LlavaOnevision",
        ("<image>", "<video>"),
        {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": TILES, **MEANS},
        _onevision,
        lambda tokenizer, settings: Expanding(
            tokenizer, onevision.LlavaOnevisionImageProcessorPil(**settings), "<image>", _onevision_places(settings)
        ),
        package="fwk_models.llava_onevision",
        load="llava_onevision:OneVisionProcessor",
        pixels=lambda arrays: list(arrays["pixel_values"]),
        wanted=lambda found: [tile for image in found["pixel_values"] for tile in image if tile.any()],
    ),
    "gemma3": Kind(
        "Gemma3",
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        {"size": {"height": 16, "width": 16}, "do_pan_and_scan": None, "pan_and_scan_min_crop_size": 9, **MEANS},
        _gemma3,
        lambda tokenizer, settings: transformers.Gemma3Processor(
            gemma3.Gemma3ImageProcessorPil(**settings), tokenizer, image_seq_length=4
        ),
        ("\n\n", "\n\n\n", "\n\n\n\n"),
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        package="fwk_models.gemma3",
        load="gemma3:Gemma3Processor",
    ),
}


def write_seeing(folder: Path, name: str, **changes: Any) -> Any:
    """A checkpoint with a tokeniser of bytes, a template and the processor's settings; returns the reference.

    changes: of the settings.
    """
    kind = KINDS[name]
    torch.manual_seed(0)
    config = kind.config(kind.first)
    config.eos_token_id = None
    model = getattr(transformers, f"{kind.name}ForConditionalGeneration")(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, kind.marks, kind.longest)
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %}"
        "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}"
        "{{ part['text'] }}{% else %}" + kind.marks[0] + "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    )
    (folder / "preprocessor_config.json").write_text(json.dumps({**kind.settings, **changes}))
    return model


def reference_processor(folder: Path, name: str) -> Any:
    """transformers' own, with Pillow and numpy."""
    kind = KINDS[name]
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), extra_special_tokens=kind.named
    )
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    return kind.processor(tokenizer, {key: value for key, value in settings.items() if value is not None})


def greedy(
    model: Any, processor: Any, text: str, images: Sequence[Image.Image], count: int, first: int
) -> tuple[list[int], list[int], torch.Tensor]:
    """The prompt as transformers has it, the tokens that it generates, and the logarithms of their probabilities."""
    given = processor(text=text, images=list(images) or None, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(
            **given,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            suppress_tokens=list(range(first, VOCAB)),
            return_dict_in_generate=True,
            output_logits=True,
        )
    start = given["input_ids"].shape[1]
    tokens = out.sequences[0, start:]
    scores = torch.cat(out.logits).log_softmax(-1)[torch.arange(len(tokens)), tokens]
    return given["input_ids"][0].tolist(), tokens.tolist(), scores
