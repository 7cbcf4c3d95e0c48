"""BERT encoders against transformers: hidden states, pooling, batches, and what is refused."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from tests.helpers.lazy import lazy
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing

import fwk
from fwk.errors import ConfigError, InvalidRequest, ModelLoadError, PluginError
from fwk.types import Request, SamplingParams, TokenEvent
from fwk_features.pooling import Vector, Wanted

transformers = lazy("transformers")

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "the", "cat", "##s", "sat", "on", "a", "mat", "cafe", ",", "."]
SMALL = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "hidden_act": "gelu",
}
MODULES = [
    {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for i, (kind, path) in enumerate([("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")])
]
LENGTHS = [1, 7, 40, 2, 31, 7, 16, 3]


def write_modules(folder: Path, modules: Any = MODULES, mode: str | dict[str, Any] = "mean_tokens") -> None:
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    kinds = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "lasttoken")
    config = mode if isinstance(mode, dict) else {f"pooling_mode_{kind}": kind == mode for kind in kinds}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 48, **config}))


def write_model(folder: Path, **settings: Any) -> transformers.BertModel:
    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(**(SMALL | settings))).eval()
    for name, parameter in model.named_parameters():  # as they come, nearly zero, every sequence would look alike
        is_scale = name.endswith("LayerNorm.weight")
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=0.1 if parameter.ndim == 1 else 0.3)
    model.save_pretrained(folder)
    return model


def write_tokenizer(folder: Path) -> None:
    """With padding and truncation, as published ones have them."""
    tokenizer = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    tokenizer.post_processor = TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    tokenizer.add_special_tokens(WORDS[:4])
    tokenizer.enable_padding(length=12, pad_id=0, pad_token="[PAD]")
    tokenizer.enable_truncation(max_length=12)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.BertModel]:
    folder = tmp_path_factory.mktemp("bert")
    model = write_model(folder)
    write_tokenizer(folder)
    write_modules(folder)
    return folder, model


@pytest.fixture(scope="module")
def llm(reference: tuple[Path, transformers.BertModel]) -> Iterator[fwk.LLM]:
    with fwk.LLM(str(reference[0]), check_blocks=True, max_running_requests=8) as llm:
        yield llm


@pytest.fixture
def copy(tmp_path: Path, reference: tuple[Path, transformers.BertModel]) -> Path:
    """The folder, to be changed."""
    for path in reference[0].iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    write_modules(tmp_path)
    return tmp_path


def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, SMALL["vocab_size"], length).tolist() for length in LENGTHS]


def hidden(model: transformers.BertModel, ids: list[int]) -> torch.Tensor:
    """transformers' last hidden states of one sequence: [length, hidden_size]."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).last_hidden_state[0]


def expected(
    model: transformers.BertModel, batch: list[list[int]], kind: str = "mean", normalize: bool = True
) -> np.ndarray:
    rows = []
    for ids in batch:
        states = hidden(model, ids)
        row = {"mean": states.mean(0), "cls": states[0], "last": states[-1]}[kind]
        rows.append((row / row.norm() if normalize else row).numpy())
    return np.stack(rows)


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)


def test_embeddings_are_transformers(llm: fwk.LLM, reference: tuple[Path, transformers.BertModel]) -> None:
    found = llm.embed(prompts())
    want = expected(reference[1], prompts())
    assert found.shape == (len(LENGTHS), 48)
    assert found.dtype == np.float32
    assert cosines(found, want).min() > 0.999999
    np.testing.assert_allclose(found, want, atol=2e-6)
    assert cosines(want, want[::-1]).min() < 0.9, "the check would see a mix-up"


def test_alone_and_together_are_the_same(llm: fwk.LLM) -> None:
    together = llm.embed(prompts())
    alone = np.concatenate([llm.embed([ids]) for ids in prompts()])
    np.testing.assert_allclose(together, alone, atol=1e-6)
    np.testing.assert_allclose(llm.embed(prompts()[::-1])[::-1], together, atol=1e-6)


@pytest.mark.gate(1)
@pytest.mark.parametrize("options", [{"max_prefill_tokens": 64}, {"executor": "threaded"}, {"max_running_requests": 1}])
def test_every_prompt_is_computed_whole(
    reference: tuple[Path, transformers.BertModel], options: dict[str, Any]
) -> None:
    """In steps of 64 tokens the eight prompts take two at least; a chunked prefill would see half of each."""
    settings = {"chunked_prefill_size": 8, "page_size": 4, "max_running_requests": 8} | options
    with fwk.LLM(str(reference[0]), check_blocks=True, **settings) as llm:
        np.testing.assert_allclose(llm.embed(prompts()), expected(reference[1], prompts()), atol=2e-6)
        stats = llm.engine.stats()
        assert stats.finished == len(LENGTHS)
        assert stats.generation_tokens == stats.num_running == stats.num_held_blocks == stats.cached_prompt_tokens == 0
        if "max_prefill_tokens" in options:
            assert stats.steps >= 2


@pytest.mark.gate(4)
@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("mean_tokens", "mean"),
        ("cls_token", "cls"),
        ("lasttoken", "last"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling_as_the_model_says(
    copy: Path, reference: tuple[Path, transformers.BertModel], mode: Any, kind: str, normalize: bool
) -> None:
    write_modules(copy, MODULES if normalize else MODULES[:2], mode)
    with fwk.LLM(str(copy), max_running_requests=8) as llm:
        want = expected(reference[1], prompts(), kind, normalize)
        np.testing.assert_allclose(llm.embed(prompts()), want, atol=2e-5, rtol=1e-5)
        assert llm.engine.info.reasons == []


def test_a_bare_model_is_pooled_by_the_mean_and_says_so(
    copy: Path, reference: tuple[Path, transformers.BertModel]
) -> None:
    (copy / "modules.json").unlink()
    with fwk.LLM(str(copy), max_running_requests=8) as llm:
        want = expected(reference[1], prompts(), normalize=False)
        np.testing.assert_allclose(llm.embed(prompts()), want, atol=2e-5, rtol=1e-5)
        assert "there is no modules.json" in llm.engine.info.reasons[0]
    with pytest.raises(PluginError, match=r"--strict: .*modules\.json"):
        fwk.LLM(str(copy), strict=True)


def test_text_is_lower_cased_framed_and_neither_padded_nor_cut(llm: fwk.LLM) -> None:
    text = "The CATS sat on a Café mat, the cat sat on a mat."
    ids = [2, 4, 5, 6, 7, 8, 9, 11, 10, 12, 4, 5, 7, 8, 9, 10, 13, 3]
    assert llm.text.encode(text) == ids
    assert llm.text.encode("a mat") == [2, 9, 10, 3]
    np.testing.assert_array_equal(llm.embed(text), llm.embed([ids]))
    np.testing.assert_allclose(llm.embed([text, "a mat"])[1], llm.embed("a mat")[0], atol=2e-6, rtol=1e-5)


@pytest.mark.gate(1)
@pytest.mark.parametrize("act", ["gelu", "gelu_pytorch_tanh", "silu"])
def test_variants(tmp_path: Path, act: str) -> None:
    model = write_model(tmp_path, hidden_act=act, type_vocab_size=1, layer_norm_eps=1e-3, num_attention_heads=3)
    write_modules(tmp_path)
    write_tokenizer(tmp_path)
    with fwk.LLM(str(tmp_path), max_running_requests=8) as llm:
        np.testing.assert_allclose(llm.embed(prompts()), expected(model, prompts()), atol=2e-6)


def test_bfloat16(reference: tuple[Path, transformers.BertModel]) -> None:
    with fwk.LLM(str(reference[0]), dtype="bfloat16", max_running_requests=8) as llm:
        assert cosines(llm.embed(prompts()), expected(reference[1], prompts())).min() > 0.999


# Requests that are wrong, or go away.


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([[1] * 65], "the input has 65 tokens; this server takes at most 64"),
        ([[]], "the input is empty"),
        ([[1, 40]], "input: token id 40 is outside the vocabulary"),
        ([[1], [-1]], "input: token id -1 is outside the vocabulary"),
    ],
)
def test_wrong_inputs(llm: fwk.LLM, texts: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.embed(texts)
    assert not llm.engine.has_work


def test_the_longest_input(llm: fwk.LLM, reference: tuple[Path, transformers.BertModel]) -> None:
    batch = [[5] * 64]
    np.testing.assert_allclose(llm.embed(batch), expected(reference[1], batch), atol=2e-6)


def test_a_step_has_room_for_long_prompts(llm: fwk.LLM) -> None:
    """They are never cut; a model that generates has smaller steps on a CPU."""
    assert llm.engine.scheduler.limits.max_step_tokens == 2048


def test_no_longer_than_the_model_was_made_for_or_a_step(copy: Path) -> None:
    (copy / "sentence_bert_config.json").write_text('{"max_seq_length": 20}')
    with fwk.LLM(str(copy)) as llm, pytest.raises(InvalidRequest, match="at most 20"):
        llm.embed([[1] * 21])
    with fwk.LLM(str(copy), context_length=50) as llm:
        assert llm.embed([[1] * 50]).shape == (1, 48)
    with fwk.LLM(str(copy), max_prefill_tokens=10) as llm, pytest.raises(InvalidRequest, match="at most 10"):
        llm.embed([[1] * 11])


def test_it_generates_nothing(llm: fwk.LLM) -> None:
    for call in (llm.generate, lambda text: list(llm.stream(text))):
        with pytest.raises(InvalidRequest, match="makes embeddings and generates no text: use /v1/embeddings"):
            call("the cat")
    wrong = Request(request_id="wrong", prompt_token_ids=[1], sampling=SamplingParams(max_tokens=1))
    [event] = llm.engine.add(wrong)
    assert event.finish_reason == "error"
    assert "another kind" in (event.error or "")


def test_a_model_that_generates_makes_no_embeddings(tiny_folder: Path) -> None:
    with fwk.LLM(str(tiny_folder), load_format="dummy", max_total_tokens=512) as generating:
        with pytest.raises(InvalidRequest, match="generates text and makes no embeddings"):
            generating.embed("a")
        [event] = generating.engine.add(nothing("wrong", [1]))
        assert event.finish_reason == "error"


def nothing(request_id: str, ids: list[int]) -> Request:
    asks = {"pooling": msgspec.Raw(msgspec.msgpack.encode(Wanted()))}
    return Request(request_id=request_id, prompt_token_ids=ids, sampling=SamplingParams(max_tokens=0), features=asks)


def made(event: TokenEvent) -> bytes:
    return msgspec.msgpack.decode(event.features["pooling"], type=Vector).data


@pytest.mark.parametrize("executor", ["inprocess", "threaded"])
def test_cancelled_requests(reference: tuple[Path, transformers.BertModel], executor: str) -> None:
    """Waiting ones and, where steps are planned ahead, one that is being computed; the others are not touched."""
    with fwk.LLM(str(reference[0]), check_blocks=True, max_running_requests=2, executor=executor) as llm:
        engine, batch = llm.engine, prompts()
        for i, ids in enumerate(batch):
            assert engine.add(nothing(str(i), ids)) == []
        events = [*engine.abort("5"), *engine.step()]
        events += engine.abort("1") + engine.abort("6")
        while engine.has_work:
            events += engine.step()
        found = {event.request_id: event for event in events}
        assert len(events) == len(found) == len(batch)
        aborted = {key for key, event in found.items() if event.finish_reason == "abort"}
        assert {"5", "6"} <= aborted <= {"1", "5", "6"}
        want = expected(reference[1], batch)
        for key in found.keys() - aborted:
            vector = np.frombuffer(made(found[key]), "<f4")
            np.testing.assert_allclose(vector, want[int(key)], atol=2e-6)
        assert engine.stats().num_held_blocks == 0


def test_numbers_that_are_none_fail_their_request_alone(
    copy: Path, reference: tuple[Path, transformers.BertModel]
) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(copy / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][17] = float("nan")
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    batch = [[1, 2], [17, 2], [3, 4]]
    with fwk.LLM(str(copy), max_running_requests=8) as llm:
        for i, ids in enumerate(batch):
            llm.engine.add(nothing(str(i), ids))
        events = {event.request_id: event for event in llm.engine.step()}
    assert "finite" in (events["1"].error or "")
    for key in ("0", "2"):
        vector = np.frombuffer(made(events[key]), "<f4")
        np.testing.assert_allclose(vector, expected(reference[1], [batch[int(key)]])[0], atol=2e-6)


# Models and options that are refused.


@pytest.mark.parametrize(
    ("modules", "mode", "message"),
    [
        ([*MODULES[:2], {"path": "2_Dense", "type": "x.Dense"}], "mean_tokens", "Transformer, Pooling, Dense are not"),
        (MODULES[:1], "mean_tokens", "the modules Transformer are not known"),
        ([], "mean_tokens", "the modules of none are not known"),
        ({"a": 1}, "mean_tokens", "not a list of modules"),
        ([{"type": "x.Transformer", "path": "../other"}], "mean_tokens", "not the name of a folder next to it"),
        (MODULES, "max_tokens", "pooling by max_tokens is not known; mean, cls and lasttoken are"),
        (MODULES, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "cls_token and mean_tokens is"),
        (MODULES, {}, "pooling by nothing is not known"),
    ],
)
def test_modules_nobody_computes(copy: Path, modules: Any, mode: Any, message: str) -> None:
    write_modules(copy, modules, mode)
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(copy))


@pytest.mark.parametrize("value", ["long", 0, 1.5])
def test_a_wrong_longest_input(copy: Path, value: Any) -> None:
    (copy / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": value}))
    with pytest.raises(ModelLoadError, match="'max_seq_length' must be a number of tokens"):
        fwk.LLM(str(copy))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "only encoders with absolute positions"),
        ({"is_decoder": True}, "only encoders with absolute positions"),
        ({"hidden_act": "relu6"}, "activation 'relu6' is not known"),
        ({"num_hidden_layers": 2}, "tensors belong to no layer of bert"),
        ({"num_hidden_layers": 4}, "encoder.layer.3"),
    ],
)
def test_configurations_nobody_computes(copy: Path, change: dict[str, Any], message: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(copy))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("speculative_algorithm", "ngram", "--speculative-algorithm ngram"),
        ("kv_cache_dtype", "int8", "--kv-cache-dtype int8"),
        ("prefix_cache", "hierarchical", "--prefix-cache hierarchical"),
        ("cache_tiers", ["host"], "--cache-tiers host"),
    ],
)
def test_what_an_encoder_could_only_ignore_is_refused(copy: Path, option: str, value: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}: .* makes embeddings"):
        fwk.LLM(str(copy), **{option: value})


def test_adapters_are_for_models_of_text(copy: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--enable-lora: .* not embed: adapters are for models of text"):
        fwk.LLM(str(copy), enable_lora=True)


def test_it_is_no_longer_than_its_positions(copy: Path) -> None:
    with pytest.raises(ConfigError, match="--context-length 65 is longer than the model's 64 positions"):
        fwk.LLM(str(copy), context_length=65)


# The real model.


TEXTS = [
    "Hello World",
    "That is a happy person",
    "That is a very happy person",
    "ÜBER Straße, naïve café 東京 😀 [SEP] and more",
    "x",
    "The three laws of thermodynamics are as follows. " * 15,
    " ".join(f"Item {i} costs {i * 7 % 13} dollars." for i in range(20)),
]


@pytest.mark.sweep
@pytest.mark.model
def test_minilm() -> None:
    """Cosine 0.9999 with the mean of transformers' hidden states, in float32, of text tokenised by transformers."""
    with fwk.LLM("all-minilm-l6-v2", max_running_requests=8) as llm:
        found = llm.embed(TEXTS)
        folder = llm.opened_path
        assert (llm.engine.info.max_model_len, llm.engine.info.reasons) == (256, [])
        lengths = [len(llm.text.encode(text)) for text in TEXTS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokenizer, model = (
            transformers.AutoTokenizer.from_pretrained(folder),
            transformers.AutoModel.from_pretrained(folder).eval().float(),
        )
    ids = [tokenizer(text, truncation=False, padding=False)["input_ids"] for text in TEXTS]
    assert [len(one) for one in ids] == lengths
    want = expected(model, ids)
    assert cosines(found, want).min() >= 0.9999
    np.testing.assert_allclose(found, want, atol=1e-5)
    assert found[1] @ found[2] > 0.9 > 0.2 > found[0] @ found[5]
