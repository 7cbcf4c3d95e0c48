"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL through the whole engine against transformers in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.helpers.architectures import close
from tests.helpers.checkpoints import greedy_of
from tests.helpers.images import encoded, noise
from tests.helpers.qwen_vl import (
    FIRST,
    IMAGE_ID,
    KINDS,
    PREPROCESSOR,
    VIDEOS,
    greedy,
    image_processing_pil_qwen2_vl,
    reference_images,
    reference_inputs,
    video,
    write_qwen_vl,
)

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest, ModelLoadError
from fwk.interfaces.multimodal import POSITION_PLANES, Media, MediaItem, MultimodalContext, Placed
from fwk.types import ModelConfig
from fwk_kit.testing.fake_frontend import ByteText
from fwk_multimodal._common import videos
from fwk_multimodal._common.videos import Video
from fwk_multimodal.media.worker import PromptPlanes
from fwk_multimodal.qwen_vl.joined import Joined
from fwk_multimodal.qwen_vl.processor import QwenProcessor

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
COUNT = 10
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
CHATS: dict[str, tuple[str, list[Image.Image]]] = {
    "text alone": ("What is this?", []),
    "image first": (f"{SEEN}What is this?", [noise(1)]),
    "long and wide": (f"Look: {SEEN} and {SEEN} now", [noise(2, 20, 60), noise(3, 70, 12)]),
    "one after another": (f"{SEEN}{SEEN}", [noise(4, 33, 33), noise(5, 9, 9)]),
    "the first again": (f"Again {SEEN} here", [noise(1)]),
}


def ask(llm: fwk.LLM, chats: Sequence[tuple[str, list[Image.Image]]], **sampling: Any) -> list[Any]:
    prompts = [llm.text.encode(text, add_special_tokens=False) for text, _ in chats]
    media = [[MediaItem("image", encoded(image)) for image in images] for _, images in chats]
    no_marks = dict.fromkeys(range(FIRST, FIRST + 6), -100.0)
    settings = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 0, "logit_bias": no_marks}
    return llm.generate(prompts, SamplingParams(**{**settings, **sampling}), media=media)


Pair = tuple[Any, Path, dict[str, tuple[list[int], Any]]]


SOME = [pytest.param(kind, marks=[pytest.mark.sweep] * (kind == "Qwen3VL")) for kind in KINDS]
"""The one with experts has layers without, too."""


@pytest.fixture(scope="module", params=SOME)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The reference, its folder, and what it says to each chat."""
    folder = tmp_path_factory.mktemp("model")
    reference = write_qwen_vl(folder, request.param)
    with fwk.LLM(str(folder), **SMALL) as llm:
        prompts = {name: llm.text.encode(text, add_special_tokens=False) for name, (text, _) in CHATS.items()}
    return reference, folder, {name: greedy(reference, prompts[name], CHATS[name][1], COUNT) for name in CHATS}


def check(done: Sequence[Any], pair: Pair, names: Sequence[str]) -> None:
    for name, found in zip(names, done, strict=True):
        tokens, scores = pair[2][name]
        assert found.token_ids == tokens, name
        close(torch.tensor([entry.logprob for entry in found.logprobs]), scores)


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "plain": {"attention_backend": "torch", "operator_backend": "torch", "disable_cuda_graph": True},
    "chunks": {"chunked_prefill_size": 7, "max_prefill_tokens": 24, "max_running_requests": 3},
    "n-gram": {"speculative_algorithm": "ngram"},
    "overlap": {"executor": "threaded", "mm_encoder_cache_bytes": 0},
    "tokens one by one": {"chunked_prefill_size": 1},
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_tokens_and_their_scores(pair: Pair, options: dict[str, Any]) -> None:
    """Twice: the second time prompts come from the prefix cache, and go on in the right planes."""
    with fwk.LLM(str(pair[1]), prefix_cache="radix", **{**SMALL, **options}) as llm:
        check(ask(llm, list(CHATS.values())), pair, list(CHATS))
        again = ask(llm, list(CHATS.values()))
    check(again, pair, list(CHATS))
    assert max(done.cached_tokens for done in again) > 0


@pytest.mark.gate(1)
def test_after_a_pre_emption_planes_go_on(pair: Pair) -> None:
    names = ["image first", "long and wide", "one after another"]
    small = {"max_total_tokens": 192, "page_size": 4, "schedule_conservativeness": 0, "prefix_cache": "none"}
    with fwk.LLM(str(pair[1]), **{**SMALL, **small}) as llm:
        done = ask(llm, [CHATS[name] for name in names], max_tokens=45)
        assert llm.engine.stats().preemptions > 0
        prompts = [llm.text.encode(CHATS[name][0], add_special_tokens=False) for name in names]
    for name, prompt, found in zip(names, prompts, done, strict=True):
        assert found.token_ids == greedy(pair[0], prompt, CHATS[name][1], 45)[0], name


@pytest.mark.gate(1)
def test_scores_of_a_prompt_and_samples_of_it(pair: Pair) -> None:
    with fwk.LLM(str(pair[1]), **SMALL) as llm:
        [done] = ask(llm, [CHATS["long and wide"]], prompt_logprobs=0)
        prompt = llm.text.encode(CHATS["long and wide"][0], add_special_tokens=False)
        media = [[MediaItem("image", encoded(image)) for image in CHATS["long and wide"][1]]]
        three = llm.generate([prompt], SamplingParams(max_tokens=8, seed=1, ignore_eos=True), n=3, media=media)
        content = [{"type": "image", "image": encoded(noise(1))}, {"type": "text", "text": "What is this?"}]
        chat = llm.chat([{"role": "user", "content": content}], SamplingParams(max_tokens=2, temperature=0))
    given = reference_inputs(prompt, CHATS["long and wide"][1])
    assert done.prompt_token_ids == given["input_ids"][0].tolist()
    with torch.no_grad():
        scores = pair[0](**given).logits[0].log_softmax(-1)[:-1].gather(1, given["input_ids"][0, 1:, None])[:, 0]
    close(torch.tensor([entry.logprob for entry in done.prompt_logprobs[1:]]), scores)
    assert len({tuple(one.token_ids) for one in three}) == 3
    assert len(chat.token_ids) == 2


@pytest.mark.gate(1)
def test_text_alone_loads_no_encoder(pair: Pair) -> None:
    with fwk.LLM(str(pair[1]), enable_multimodal=False, **SMALL) as llm:
        check(ask(llm, [CHATS["text alone"]]), pair, ["text alone"])
        with pytest.raises(InvalidRequest, match="this server's model reads text only, not image"):
            ask(llm, [CHATS["image first"]])


@pytest.mark.sweep
def test_two_ranks_are_the_model(pair: Pair) -> None:
    with fwk.LLM(str(pair[1]), **SMALL, tensor_parallel_size=2, executor="processes") as llm:
        check(ask(llm, list(CHATS.values())), pair, list(CHATS))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": "bfloat16"}])
def test_other_formats_say_the_same_in_chunks(pair: Pair, options: dict[str, Any]) -> None:
    found: list[list[list[int]]] = []
    for chunk in (512, 7):
        with fwk.LLM(str(pair[1]), **{**SMALL, **options}, chunked_prefill_size=chunk) as llm:
            found.append([done.token_ids for done in ask(llm, list(CHATS.values()))])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL"])
def test_a_config_as_it_was_published(kind: str, tmp_path: Path) -> None:
    """The text model's keys at the top, and its positions' kind named ``mrope``."""
    reference = write_qwen_vl(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    text |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    text.pop("model_type")
    (tmp_path / "config.json").write_text(json.dumps({**text, **config}))
    with fwk.LLM(str(tmp_path), **SMALL) as llm:
        [done] = ask(llm, [CHATS["image first"]])
        prompt = llm.text.encode(CHATS["image first"][0], add_special_tokens=False)
    assert done.token_ids == greedy(reference, prompt, CHATS["image first"][1], COUNT)[0]


FRAMED = "<|vision_start|><|video_pad|><|vision_end|>"
WITH_VIDEOS = ["Qwen3VLMoe", "Qwen3VL", "Qwen3_5"]


def equals(reference: Any, placed: Placed, found: list[Any], **more: torch.Tensor) -> None:
    """A video and a picture behind it, asked for twice: what transformers says, and the second time from the cache."""
    *frames, image = (piece.arrays for piece in placed.media)
    ids = placed.token_ids
    kinds = [{IMAGE_ID: 1, IMAGE_ID + 1: 2}.get(token, 0) for token in ids]
    given = {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.int64),
        "mm_token_type_ids": torch.tensor([kinds], dtype=torch.int32),
        "pixel_values": torch.tensor(image["pixel_values"]),
        "image_grid_thw": torch.tensor([[1, *image["grid"]]]),
        "pixel_values_videos": torch.cat([torch.tensor(one["pixel_values"]) for one in frames]),
        "video_grid_thw": torch.tensor([[len(frames), *frames[0]["grid"]]]),
    }
    tokens, scores = greedy_of(reference, given | more, COUNT, FIRST)
    for done in found:
        assert done.prompt_token_ids == ids
        assert done.token_ids == tokens
        close(torch.tensor([entry.logprob for entry in done.logprobs or ()]), scores)
    assert found[1].cached_tokens > 0


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", WITH_VIDEOS)
def test_videos_alongside_images(kind: str, tmp_path: Path) -> None:
    """Nine frames of four a second are seen as four, two at a time, behind the time of their middle."""
    reference = write_qwen_vl(tmp_path, kind)
    items = [MediaItem("video", video(1, 9, 4)), MediaItem("image", encoded(noise(2)))]
    with fwk.LLM(str(tmp_path), chunked_prefill_size=16, **SMALL) as llm:
        prompt = llm.text.encode(f"Look: {FRAMED} and {SEEN}", add_special_tokens=False)
        placer = QwenProcessor(replace(context(kind, image=IMAGE_ID, video_processor=VIDEOS), text=llm.text))
        placed = placer.process(prompt, items)
        no_marks = dict.fromkeys(range(FIRST, FIRST + 6), -100.0)
        sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=0, logit_bias=no_marks)
        found = [done for _ in range(2) for done in llm.generate([prompt], sampling, media=[items])]
        text = llm.text.decode(placed.token_ids, skip_special_tokens=False)
    *frames, _ = (piece.arrays for piece in placed.media)
    assert [piece.item for piece in placed.media] == [0, 0, 1]
    shown = ["<|video_pad|>" * (len(one["pixel_values"]) // 4) for one in frames]
    shown = [
        f"<{at} seconds><|vision_start|>{pads}<|vision_end|>" for at, pads in zip(("0.4", "1.6"), shown, strict=True)
    ]
    assert text.startswith("Look: " + "".join(shown) + " and <|vision_start|><|image_pad|>")
    equals(reference, placed, found)


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["Qwen2VL", "Qwen2_5_VL"])
def test_videos_as_one_run_of_tokens(kind: str, tmp_path: Path) -> None:
    """Nine frames of four a second are seen as four: positions count from the first, by pieces or by seconds."""
    reference = write_qwen_vl(tmp_path, kind)
    items = [MediaItem("video", video(1, 9, 4)), MediaItem("image", encoded(noise(2)))]
    no_marks = dict.fromkeys(range(FIRST, FIRST + 6), -100.0)
    sampling = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True, logprobs=0, logit_bias=no_marks)
    with fwk.LLM(str(tmp_path), chunked_prefill_size=7, **SMALL) as llm:
        prompt = llm.text.encode(f"Look: {FRAMED} and {SEEN}", add_special_tokens=False)
        name = f"{kind}ForConditionalGeneration"
        placer = QwenProcessor(context(kind, image=IMAGE_ID, architecture=name, video_processor=VIDEOS))
        placed = placer.process(prompt, items)
        found = [done for _ in range(2) for done in llm.generate([prompt], sampling, media=[items])]
    *frames, _ = (piece.arrays for piece in placed.media)
    assert [piece.item for piece in placed.media] == [0, 0, 1]
    rows, columns = frames[0]["grid"].tolist()
    ids, first = placed.token_ids, prompt.index(IMAGE_ID + 1)
    length = len(frames) * rows * columns // 4
    assert ids[: first + length + 1] == [*prompt[:first], *[IMAGE_ID + 1] * length, prompt[first + 1]]
    more = {"second_per_grid_ts": torch.tensor([2 / (4 / 9 * 4)])} if kind == "Qwen2_5_VL" else {}
    equals(reference, placed, found, **more)


@pytest.mark.parametrize(
    ("video", "count", "indices", "size"),
    [
        (Video(9, 4.0, 40, 24), 4, [0, 2, 4, 6], (40, 24)),
        (Video(1, 30.0, 9, 9), 1, [0], (24, 24)),
        (Video(3, 30.0, 9, 9), 2, [0, 1], (24, 24)),
        (Video(300, 30.0, 64, 64), 20, list(range(0, 300, 15)), (56, 56)),
        (Video(5, 29.97, 500, 333), 4, [0, 1, 2, 3], (72, 48)),
        (Video(100_000, 30.0, 640, 480), 768, [int(i * 100_000 / 768) for i in range(768)], (72, 48)),
    ],
)
def test_frames_and_sizes_of_earlier_models(
    video: Video, count: int, indices: list[int], size: tuple[int, int]
) -> None:
    """As transformers' ``sample_frames`` and ``smart_resize``: 400 to 4000 pixels a frame, in squares of 8."""
    kind, name = "Qwen2_5_VL", "Qwen2_5_VLForConditionalGeneration"
    sample = QwenProcessor(context(kind, architecture=name, video_processor=VIDEOS))._sampled(video)
    assert len(indices) == count
    assert (list(sample.indices), (sample.width, sample.height)) == (indices, size)


@pytest.mark.parametrize("count", [4, 300, 768])
def test_all_frames_of_a_video_have_a_bound(count: int) -> None:
    """As transformers' ``cap_pixels_per_frame`` has it."""
    least, most = 128 * 784, 768 * 784
    sample = Joined(28, 2, None).sample(Video(2000, 30.0, 1920, 1080), count, least, most)
    bound = max(min(most, int(128_000 * 784 * 0.9) * 2 // count), int(least * 1.05))
    wanted = image_processing_pil_qwen2_vl.smart_resize(1080, 1920, 28, least, bound)
    assert (sample.height, sample.width) == wanted


def test_positions_of_a_long_video() -> None:
    """What comes after it begins behind its largest position, as the models were trained."""
    pieces = [{POSITION_PLANES: np.indices((1, 2, 3)).reshape(3, -1)} for _ in range(5)]
    Joined(8, 2, 2.0).place(pieces, Video(40, 8.0, 24, 16), 10)
    found = PromptPlanes(
        [Media(bytes(32), "video", 3 + 6 * i, 6, "", i) for i in range(5)], [piece[POSITION_PLANES] for piece in pieces]
    )
    places = found.shift(0, 35) + np.arange(35)
    whole = np.indices((5, 2, 3)).reshape(3, -1)
    whole[0] *= 2
    assert (places[:, :3] == np.arange(3)).all()
    assert (places[:, 3:33] == whole + 3).all()
    assert places[:, 33:].tolist() == [[3 + 8 + 1, 3 + 8 + 2]] * 3


@pytest.mark.parametrize(
    ("video", "indices", "size"),
    [
        (Video(9, 4.0, 40, 24), [0, 3, 5, 8], (40, 24)),
        (Video(1, 30.0, 9, 9), [0], (24, 24)),
        (Video(300, 30.0, 64, 64), [round(i * 299 / 19) for i in range(20)], (8, 8)),
        (Video(8, 1.0, 7, 300), [0, 1, 2, 3, 4, 5, 6, 7], (8, 144)),
        (Video(5, 29.97, 500, 333), [0, 1, 3, 4], (32, 24)),
    ],
)
def test_frames_and_sizes(video: Video, indices: list[int], size: tuple[int, int]) -> None:
    """As transformers' ``sample_frames`` and ``smart_resize`` have them, which cannot be imported without torchvision.

    Two frames a second, four at least and no more than there are; 400 to 4000 pixels in all, in squares of 8.
    """
    sample = QwenProcessor(context("Qwen3VL", video_processor=VIDEOS))._sampled(video)
    assert (list(sample.indices), (sample.width, sample.height)) == (indices, size)


def test_what_is_no_film_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(data: bytes, kind: str = "video", **changes: Any) -> None:
        given = replace(context("Qwen3VL", video_processor=VIDEOS, **changes), text=ByteText())
        QwenProcessor(given).process([FIRST + 3], [MediaItem(kind, data, "it")])

    whole = video(1, 4, 4)
    read(whole)
    for data, message in (
        (b"GIF89a" + bytes(99), "it is no MP4, MOV, WebM, Matroska or AVI file"),
        (whole[:200], "it: the video is damaged or cut short"),
        (video(1, 2, 4, 2000, 2), "more than 200 times as long as wide"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            read(data)
    with pytest.raises(InvalidRequest, match="it: the video of 40 x 24 pixels has more than the 959"):
        read(whole, limit=959)
    with pytest.raises(InvalidRequest, match="it: the chat template has a place for another kind of media"):
        read(encoded(noise(1)), "image")
    with pytest.raises(ModelLoadError, match="fps must be up to 1000, and min_frames and max_frames 1 to 768"):
        read(whole, max_frames=1000)
    monkeypatch.setattr(videos, "av", None)
    with pytest.raises(
        InvalidRequest, match=r"it: this server decodes no videos \(pip install 'fwk\[audio\]'\): send fra"
    ):
        read(whole)


def context(
    kind: str = "Qwen2_5_VL", limit: int = 2**20, image: int = 300, architecture: str = "x", **changes: Any
) -> MultimodalContext:
    raw = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 320}
    raw |= {"image_token_id": image, "vision_config": KINDS[kind][1], "architectures": [architecture]}
    raw |= {"vision_start_token_id": FIRST, "vision_end_token_id": FIRST + 1, "video_token_id": FIRST + 3}
    return MultimodalContext(ModelConfig.from_dict(raw, ""), {**PREPROCESSOR, **changes}, None, limit)  # type: ignore[arg-type]


SIZES = [(4, 4), (8, 8), (9, 90), (400, 2), (40, 24), (2, 2), (333, 222), (60, 61)]


@pytest.mark.parametrize(
    "changes", [{}, {"min_pixels": 64, "max_pixels": 640}, {"resample": 2, "rescale_factor": 0.01}]
)
def test_patches_are_those_of_transformers(changes: dict[str, Any]) -> None:
    processor = QwenProcessor(context(**changes))
    for number, size in enumerate(SIZES):
        image = noise(number, *size)
        placed = processor.process([5, 300, 6], [MediaItem("image", encoded(image))])
        wanted = reference_images([image], **changes)
        [piece] = placed.media
        np.testing.assert_array_equal(piece.arrays["pixel_values"], wanted["pixel_values"])
        assert [1, *piece.arrays["grid"]] == wanted["image_grid_thw"][0].tolist()
        assert placed.token_ids == [5, *[300] * piece.length, 6]
        assert piece.length == len(piece.arrays["pixel_values"]) // 4 == piece.arrays[POSITION_PLANES].shape[1]


def test_what_cannot_be_read_is_refused() -> None:
    def read(image: Image.Image, **changes: Any) -> None:
        QwenProcessor(context(**changes)).process([300], [MediaItem("image", encoded(image), "it")])

    with pytest.raises(InvalidRequest, match="it: the image of 402 x 2 is more than 200 times as long as wide: crop"):
        read(noise(1, 402, 2))
    with pytest.raises(InvalidRequest, match="of 50 x 50 pixels has more than the 2499"):
        read(noise(1, 50, 50), limit=2499)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"patch_size": 8}, "cuts images by 8, and config.json's 'patch_size' is 4"),
        ({"size": {"shortest_edge": -1}}, "a number of pixels must be 1 to"),
        ({"do_resize": False}, "with do_resize true only"),
    ]
    for changes, message in wrong:
        with pytest.raises(ModelLoadError, match=message):
            QwenProcessor(context(**changes))


def test_planes_of_a_prompt() -> None:
    """Text, an image of 2 x 3 tokens, text, one of a single token, and what comes after."""
    planes = [np.indices((1, 2, 3)).reshape(3, -1), np.zeros((3, 1), np.int64)]
    media = [Media(b"", "image", start, length, "", 0) for start, length in ((2, 6), (9, 1))]
    table = PromptPlanes(media, planes)
    found = np.arange(14) + table.shift(0, 14)
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 7, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]
    for start in range(12):
        np.testing.assert_array_equal(start + np.arange(3) + table.shift(start, 3), found[:, start : start + 3])


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("Qwen2_5_VL", {"window_size": 4}, "'window_size' is less than a square of patches"),
        ("Qwen2_5_VL", {"fullatt_block_indexes": [3]}, "'fullatt_block_indexes' must list blocks from 0 to 2"),
        ("Qwen2_5_VL", {"num_heads": 5}, "heads must have a multiple of 4 numbers"),
        ("Qwen3VL", {"num_position_embeddings": 48}, "'num_position_embeddings' is no square"),
        ("Qwen3VL", {"patch_size": "4"}, "'patch_size' must be a whole number, not '4'"),
    ],
)
def test_wrong_configs_are_named(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_qwen_vl(tmp_path, kind)
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(tmp_path), **SMALL)
