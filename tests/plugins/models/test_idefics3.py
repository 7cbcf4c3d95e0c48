"""Idefics3 and SmolVLM through the whole engine against transformers in float32, on tiny random checkpoints."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import close
from tests.helpers.checkpoints import change_config
from tests.helpers.images import IMAGE_ID, VISION, encoded, greedy, noise, reference_processor, write_vision
from tests.helpers.lazy import lazy

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, InvalidRequest, ModelLoadError
from fwk.interfaces.multimodal import MediaItem
from fwk.setup import memory_need
from fwk_models.idefics3.model import Idefics3, ImageEncoder

transformers = lazy("transformers")

SMALL: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 4096, "page_size": 8, "check_blocks": True}
COUNT = 12
CHATS: dict[str, tuple[str, list[Image.Image]]] = {
    "text alone": ("User: What is this?<end_of_utterance>\nAssistant:", []),
    "image first": ("User:<image> What is this?<end_of_utterance>\nAssistant:", [noise(1)]),
    "text first": ("User: Look at this: <image><end_of_utterance>\nAssistant:", [noise(2, 20, 50)]),
    "two images": ("User:<image><image> Which?<end_of_utterance>\nAssistant:", [noise(3), noise(4, 16, 16)]),
    "two turns": (
        "User:<image> A?<end_of_utterance>\nAssistant: B.<end_of_utterance>\nUser: C?<image><end_of_utterance>\n",
        [noise(1), noise(5, 9, 60)],
    ),
    "prompt ends in it": ("User: What?<image>", [noise(6)]),
}


def ask(llm: fwk.LLM, chats: Sequence[tuple[str, list[Image.Image]]], **sampling: Any) -> list[Any]:
    prompts = [llm.text.encode(text, add_special_tokens=False) for text, _ in chats]
    media = [[MediaItem("image", encoded(image)) for image in images] for _, images in chats]
    settings = SamplingParams(**{"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "logprobs": 0, **sampling})
    return llm.generate(prompts, settings, media=media)


@pytest.fixture(scope="module", params=["idefics3", "smolvlm"])
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    return write_vision(folder, request.param), folder


def check(done: Sequence[Any], reference: transformers.PreTrainedModel, folder: Path, names: Sequence[str]) -> None:
    processor = reference_processor(folder)
    for name, found in zip(names, done, strict=True):
        tokens, scores = greedy(reference, processor, *CHATS[name], COUNT)
        assert found.token_ids == tokens, name
        close(torch.tensor([entry.logprob for entry in found.logprobs]), torch.tensor(scores))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"attention_backend": "torch", "operator_backend": "torch", "disable_cuda_graph": True},
    "defaults": {},
    "chunks": {"chunked_prefill_size": 7, "max_prefill_tokens": 24, "max_running_requests": 3},
    "tokens one by one": {"chunked_prefill_size": 1},
    "overlap": {"executor": "threaded"},
    "n-gram": {"speculative_algorithm": "ngram"},
    "no encoder cache": {"mm_encoder_cache_bytes": 0, "chunked_prefill_size": 7},
    "tiny encoder cache": {"mm_encoder_cache_bytes": 5000, "chunked_prefill_size": 7},
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_tokens_and_their_scores(
    pair: tuple[transformers.PreTrainedModel, Path], options: dict[str, Any]
) -> None:
    reference, folder = pair
    with fwk.LLM(str(folder), **{**SMALL, **options}) as llm:
        done = ask(llm, list(CHATS.values()))
    check(done, reference, folder, list(CHATS))


@pytest.mark.gate(1)
def test_after_a_pre_emption_media_are_inserted_again(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    reference, folder = pair
    names, processor = ["image first", "two images", "two turns"], reference_processor(folder)
    small = {"max_total_tokens": 384, "page_size": 4, "schedule_conservativeness": 0, "prefix_cache": "none"}
    with fwk.LLM(str(folder), **{**SMALL, **small}) as llm:
        done = ask(llm, [CHATS[name] for name in names], max_tokens=60)
        assert llm.engine.stats().preemptions > 0
    for name, found in zip(names, done, strict=True):
        assert found.token_ids == greedy(reference, processor, *CHATS[name], 60)[0]


class Encoded:
    """Counts the tiles that are encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, encode = 0, Idefics3.encode
        self.most = 0  # at once

        def counted(model: Idefics3, kind: str, items: Sequence[Any]) -> Sequence[torch.Tensor]:
            self.count += len(items)
            self.most = max(self.most, len(items))
            return encode(model, kind, items)

        monkeypatch.setattr(Idefics3, "encode", counted)

    def since(self) -> int:
        """And begin to count again."""
        count, self.count = self.count, 0
        return count


@pytest.mark.gate(1)
def test_the_prefix_cache_knows_images_by_content(
    pair: tuple[transformers.PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same image is found, another one of its size never is, nor the same one behind another."""
    reference, folder = pair
    encoded = Encoded(monkeypatch)
    text, [image] = CHATS["image first"]
    other = text, [noise(99)]
    both = text.replace("<image>", "<image><image>"), [noise(99), image]
    with fwk.LLM(str(folder), prefix_cache="radix", **SMALL) as llm:
        [first] = ask(llm, [(text, [image])])
        assert encoded.since() == 5
        [again] = ask(llm, [(text, [image])])
        assert (encoded.since(), again.token_ids) == (0, first.token_ids)
        assert again.cached_tokens > len(again.prompt_token_ids) - 8
        [found] = ask(llm, [other])
        assert found.prompt_token_ids == first.prompt_token_ids
        assert (encoded.since(), found.cached_tokens) == (5, before(llm, found))
        assert found.token_ids == greedy(reference, reference_processor(folder), *other, COUNT)[0]
        [found] = ask(llm, [both])
        assert encoded.since() == 0, "what is encoded is known by content, wherever it stands"
        assert found.token_ids == greedy(reference, reference_processor(folder), *both, COUNT)[0]


def before(llm: fwk.LLM, done: Any) -> int:
    """Tokens of whole blocks before the first that stands for an image."""
    return done.prompt_token_ids.index(IMAGE_ID) // 8 * 8


@pytest.mark.gate(1)
def test_a_chat_of_turns_encodes_each_image_once(
    pair: tuple[transformers.PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a prefix cache, too, which would hide it."""
    reference, folder = pair
    counted = Encoded(monkeypatch)
    question = {
        "role": "user",
        "content": [{"type": "text", "text": "A?"}, {"type": "image", "image": encoded(noise(1))}],
    }
    turn = {"role": "user", "content": [{"type": "image", "image": encoded(noise(7, 16, 16))}]}
    settings = SamplingParams(max_tokens=COUNT, temperature=0, ignore_eos=True)
    with fwk.LLM(str(folder), prefix_cache="none", **SMALL) as llm:
        one = llm.chat([question], settings)
        assert counted.since() == 5
        two = llm.chat([question, {"role": "assistant", "content": "B."}, turn], settings)
        assert counted.since() == 5  # a second image of one tile's size is scaled up, and has five as well
    assert counted.most == 1, "on a CPU a step encodes one tile of a prompt, so that others wait no longer"
    shown = "User: A?<image><end_of_utterance>\n"
    rest = "Assistant: B.<end_of_utterance>\nUser:<image><end_of_utterance>\nAssistant:"
    processor = reference_processor(folder)
    assert one.token_ids == greedy(reference, processor, shown + "Assistant:", [noise(1)], COUNT)[0]
    assert two.token_ids == greedy(reference, processor, shown + rest, [noise(1), noise(7, 16, 16)], COUNT)[0]


@pytest.mark.gate(1)
def test_samples_of_one_prompt_and_scores_of_its_tokens(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    reference, folder = pair
    name = "two images"
    processor = reference_processor(folder)
    given = processor(text=CHATS[name][0], images=CHATS[name][1], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        wanted = reference(**given).logits[0].log_softmax(-1)[:-1].gather(1, given["input_ids"][0, 1:, None])[:, 0]
    with fwk.LLM(str(folder), **SMALL) as llm:
        [done] = ask(llm, [CHATS[name]], prompt_logprobs=0)
        prompt = llm.text.encode(CHATS[name][0], add_special_tokens=False)
        media = [[MediaItem("image", encoded(image)) for image in CHATS[name][1]]]
        sampled = SamplingParams(max_tokens=8, temperature=1, seed=1, ignore_eos=True)
        three = llm.generate([prompt], sampled, n=3, media=media)
    close(torch.tensor([entry.logprob for entry in done.prompt_logprobs[1:]]), wanted)
    assert len({tuple(one.token_ids) for one in three}) == 3


@pytest.mark.sweep
def test_two_ranks_are_the_model(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    reference, folder = pair
    with fwk.LLM(str(folder), executor="processes", tensor_parallel_size=2, **SMALL) as llm:
        check(ask(llm, list(CHATS.values())), reference, folder, list(CHATS))


@pytest.mark.sweep
def test_other_weights_encode_anew(pair: tuple[transformers.PreTrainedModel, Path], tmp_path: Path) -> None:
    reference, folder = pair
    shutil.copytree(folder, tmp_path / "other")
    tensors = load_file(tmp_path / "other/model.safetensors")
    name = "model.connector.modality_projection.proj.weight"
    tensors[name] = -tensors[name]
    save_file(tensors, tmp_path / "other/model.safetensors", {"format": "pt"})
    chat = [CHATS["image first"]]
    with fwk.LLM(str(folder), **SMALL) as llm:
        [old] = ask(llm, chat)
        llm.update_weights(str(tmp_path / "other"))
        [new] = ask(llm, chat)
    with torch.no_grad():
        reference.get_parameter(name).neg_()
        wanted = greedy(reference, reference_processor(folder), *chat[0], COUNT)[0]
        reference.get_parameter(name).neg_()
    assert new.token_ids == wanted != old.token_ids


@pytest.mark.gate(1)
def test_text_alone_loads_no_encoder(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    reference, folder = pair
    chat = CHATS["text alone"]
    with fwk.LLM(str(folder), enable_multimodal=False, **SMALL) as llm:
        [done] = ask(llm, [chat])
        with pytest.raises(InvalidRequest, match="this server's model reads text only, not image"):
            ask(llm, [CHATS["image first"]])
    assert done.token_ids == greedy(reference, reference_processor(folder), *chat, COUNT)[0]


def test_limits_and_settings(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    _, folder = pair
    more = {"limit_mm_per_prompt": "image=1", "mm_processor_kwargs": '{"do_image_splitting": false}'}
    with fwk.LLM(str(folder), max_image_pixels=1000, **more, **SMALL) as llm:
        [done] = ask(llm, [CHATS["image first"]])
        assert done.prompt_token_ids.count(IMAGE_ID) == 4, "one tile of an image that is not split"
        with pytest.raises(InvalidRequest, match=r"has 2 images; this server takes at most 1 \(--limit-mm-per-prompt"):
            ask(llm, [CHATS["two images"]])
        with pytest.raises(InvalidRequest, match="image 1: the image of 50 x 21 pixels has more than the 1000"):
            ask(llm, [("<image>", [noise(1, 50, 21)])])
        with pytest.raises(InvalidRequest, match="the prompt has places for 0 images, and there are 1"):
            ask(llm, [("none", [noise(1)])])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit_mm_per_prompt": "picture=1"}, "picture=1 is no kind of media and its number"),
        ({"limit_mm_per_prompt": "image"}, "say image=4, or a JSON object"),
        ({"limit_mm_per_prompt": '{"image": -1}'}, "image=-1 is no kind of media and its number"),
    ],
)
def test_wrong_options(pair: tuple[transformers.PreTrainedModel, Path], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fwk.LLM(str(pair[1]), **options, **SMALL)


@pytest.mark.gate(1)
def test_the_same_bits_whatever_is_encoded_alongside(
    pair: tuple[transformers.PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of other sizes may round otherwise: each tile is a product of its own."""
    sizes: set[int] = set()
    encode = ImageEncoder.__call__

    def watched(encoder: ImageEncoder, tiles: torch.Tensor) -> torch.Tensor:
        sizes.add(len(tiles))
        return encode(encoder, tiles)

    monkeypatch.setattr(ImageEncoder, "__call__", watched)
    names = ["image first", "two images", "text first"]
    more = {"prefix_cache": "none", "mm_encoder_cache_bytes": 0, "max_start_tokens": 512, "mm_encoder_step_tokens": 512}
    with fwk.LLM(str(pair[1]), **more, **SMALL) as llm:
        ask(llm, [CHATS[name] for name in names])
    assert max(sizes) > 1, "steps encode tiles of several prompts"
    sizes.clear()
    with fwk.LLM(str(pair[1]), enable_deterministic_inference=True, **more, **SMALL) as llm:
        together = ask(llm, [CHATS[name] for name in names])
        for name, found in zip(names, together, strict=True):
            [alone] = ask(llm, [CHATS[name]])
            assert [entry.logprob for entry in alone.logprobs] == [entry.logprob for entry in found.logprobs]
    assert sizes == {1}


@pytest.mark.gate(1)
def test_memory_for_what_is_encoded_is_counted(
    pair: tuple[transformers.PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_need, "available_memory", lambda: 700 << 20)
    with pytest.raises(ConfigError, match=r"0\.7 GiB besides, but 0\.7 GiB of memory are free"):
        fwk.LLM(str(pair[1]), **SMALL)
    for options in ({"enable_multimodal": False}, {"mm_encoder_cache_bytes": 1 << 20}):
        fwk.LLM(str(pair[1]), **options, **SMALL).close()


def test_workers_on_other_machines_are_refused(pair: tuple[transformers.PreTrainedModel, Path], tmp_path: Path) -> None:
    """They have no file to read."""
    (tmp_path / "token").write_text("a secret of many letters, hard to guess")
    (tmp_path / "token").chmod(0o600)
    nodes = {"nnodes": 2, "dist_init_addr": "127.0.0.1:9", "dist_token_file": str(tmp_path / "token")}
    with pytest.raises(ConfigError, match="takes image, which workers read from files, and executor 'processes' has w"):
        fwk.LLM(str(pair[1]), executor="processes", tensor_parallel_size=2, **nodes, **SMALL)


@pytest.mark.gate(1)
def test_the_encoder_has_the_weight_formats_that_are_asked_for(
    pair: tuple[transformers.PreTrainedModel, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[torch.Tensor] = []
    encode = Idefics3.encode

    def watched(model: Idefics3, kind: str, items: Sequence[Any]) -> Sequence[torch.Tensor]:
        found = encode(model, kind, items)
        rows.extend(found)
        return found

    monkeypatch.setattr(Idefics3, "encode", watched)
    for options in ({}, {"quantization_layers": ["model.vision_model.*=int8"]}):
        with fwk.LLM(str(pair[1]), **options, **SMALL) as llm:
            ask(llm, [CHATS["image first"]], max_tokens=1)
    plain, rounded = torch.cat(rows[:5]), torch.cat(rows[5:])
    assert 0 < float((plain - rounded).norm() / plain.norm()) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_config": None}, "'text_config' and 'vision_config' must be objects"),
        ({"text_config": {"model_type": "qwen2"}}, "'model_type' is 'qwen2'; idefics3 computes 'llama'"),
        ({"scale_factor": 0}, "'scale_factor' must be a whole number of at least 1, not 0"),
        ({"vision_config": {**VISION, "patch_size": "4"}}, "vision_config's 'patch_size' must be a whole number"),
        ({"vision_config": {**VISION, "num_attention_heads": 3}}, "'hidden_size' is no multiple of"),
    ],
)
def test_wrong_settings_are_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_vision(tmp_path)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(tmp_path), **SMALL)
