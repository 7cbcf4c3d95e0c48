"""Tiny random checkpoints of the Qwen-VL family, written by transformers' own classes."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from tests.helpers.checkpoints import EXPERTS, SMALL, VOCAB, greedy_of, randomise, write_tokenizer
from tests.helpers.images import noise
from tests.helpers.lazy import lazy

av = lazy("av")
transformers = lazy("transformers")
image_processing_pil_qwen2_vl = lazy("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")

SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|im_start|>", "<|im_end|>")
FIRST = VOCAB - len(SPECIALS)
IMAGE_ID = FIRST + 2
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's, in short."""
PREPROCESSOR: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 200, "longest_edge": 2400},
    "image_mean": [0.5, 0.4, 0.6],
    "image_std": [0.5, 0.25, 0.3],
}
VIDEOS: dict[str, Any] = {"size": {"shortest_edge": 400, "longest_edge": 4000}, "image_mean": [0.4, 0.5, 0.6]}
PLANES = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
EYES: dict[str, Any] = {"depth": 3, "num_heads": 2, "patch_size": 4, "in_channels": 3}
DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2, "head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
    "rope_parameters": {**PLANES, "mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5},
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen2VL": ("Qwen2VL", {**EYES, "embed_dim": 32, "hidden_size": SMALL["hidden_size"], "mlp_ratio": 2}),
    "Qwen2_5_VL": (
        "Qwen2_5_VL",
        {**EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": SMALL["hidden_size"],
         "window_size": 24, "fullatt_block_indexes": [1]},
    ),
    "Qwen3VL": (
        "Qwen3VL",
        {**EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": SMALL["hidden_size"],
         "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
    ),
    "Qwen3VLMoe": (
        "Qwen3VLMoe",
        {**EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": SMALL["hidden_size"],
         "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 2]},
    ),
    "Qwen3_5": (
        "Qwen3_5",
        {**EYES, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": SMALL["hidden_size"],
         "num_position_embeddings": 36},
    ),
}  # fmt: skip


def write_qwen_vl(folder: Path, kind: str, **changes: Any) -> Any:
    """A checkpoint with a tokeniser of bytes, a template and the processor's settings; returns the reference.

    changes: of the text model's config.
    """
    name, vision = KINDS[kind]
    torch.manual_seed(0)
    text = {**SMALL, "rms_norm_eps": 1e-5, "rope_parameters": PLANES, "num_hidden_layers": 4, **changes}
    if kind.startswith("Qwen3"):
        text["head_dim"] = 32
    if kind == "Qwen3VLMoe":
        text |= {**EXPERTS, "mlp_only_layers": [1]}
    if kind == "Qwen3_5":
        text |= DELTA
    tokens = {"vision_start_token_id": FIRST, "vision_end_token_id": FIRST + 1, "video_token_id": FIRST + 3}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, image_token_id=IMAGE_ID, attn_implementation="eager", **tokens
    )
    config.eos_token_id = None
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    write_tokenizer(folder, SPECIALS)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEOS))
    return model


def video(seed: int, count: int, rate: int, width: int = 40, height: int = 24) -> bytes:
    """An MP4 file of so many frames, which no other seed makes."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=rate)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(count):
            frame = av.VideoFrame.from_image(noise(seed + number, width, height))
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def reference_images(images: Sequence[Image.Image], **changes: Any) -> Any:
    """What transformers makes of them: ``pixel_values`` and ``image_grid_thw``."""
    settings = {**copy.deepcopy(PREPROCESSOR), **changes}  # of which transformers changes the sizes
    processor = image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil(**settings)
    return processor(images=list(images), return_tensors="pt")


def reference_inputs(prompt: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
    """The model's inputs for a prompt with a place for each image."""
    made = reference_images(images) if images else {}
    lengths = iter([int(grid.prod()) // 4 for grid in made["image_grid_thw"]] if images else [])
    ids = [i for token in prompt for i in ([token] * (next(lengths) if token == IMAGE_ID else 1))]
    kinds = [int(token == IMAGE_ID) for token in ids]
    given = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.int64)}
    return {**given, **made, "mm_token_type_ids": torch.tensor([kinds], dtype=torch.int32)}


def greedy(model: Any, prompt: Sequence[int], images: Sequence[Image.Image], count: int) -> tuple[list[int], Any]:
    """The tokens that transformers chooses, and their log-probabilities: for each, everything is computed anew."""
    return greedy_of(model, reference_inputs(prompt, images), count, FIRST)
