"""The dummy loader."""

from pathlib import Path

import pytest
import torch

from fwk.errors import ModelLoadError
from fwk.interfaces.loader import LoaderContext
from fwk.plugins import build_config
from fwk.setup.checkpoint import open_model
from fwk_kit.testing.base import installed
from fwk_loaders.dummy import loaders
from fwk_loaders.dummy.loader import DummyLoader
from fwk_loaders.dummy.tokenizer import END_ID


def open_path(path: Path):
    return DummyLoader(LoaderContext()).open(path)


@pytest.fixture
def folder(tmp_path: Path, config, write_json) -> Path:
    write_json(tmp_path / "config.json", config)
    return tmp_path


def test_auto_never_takes_it():
    assert [spec.is_automatic for spec in loaders()] == [False]


def test_opens_a_folder_or_its_config(folder: Path):
    for path in (folder, folder / "config.json"):
        assert DummyLoader.reads(path) is None
        assert open_path(path).path == folder
        assert open_path(path).config()["hidden_size"] == 32
    with pytest.raises(ModelLoadError, match=r"needs a folder with a config\.json"):
        open_path(folder / "missing")
    (folder / "config.json").write_text("no")
    with pytest.raises(ModelLoadError, match=r"config\.json: not valid JSON"):
        open_path(folder).config()


def test_weights_depend_on_name_and_shape_only(folder: Path):
    first, second = open_path(folder).weights(), open_path(folder).weights()
    up = first.tensor("model.layers.0.mlp.up_proj.weight", (64, 32))
    first.tensor("model.layers.0.mlp.gate_proj.weight", (64, 32))
    torch.manual_seed(5)
    assert torch.equal(up, second.tensor("model.layers.0.mlp.up_proj.weight", (64, 32)))
    assert not torch.equal(up, second.tensor("model.layers.0.mlp.gate_proj.weight", (64, 32)))
    assert up.dtype == torch.bfloat16
    assert 0.015 < up.float().std() < 0.025
    assert torch.equal(first.tensor("model.norm.weight", (32,)), torch.ones(32, dtype=torch.bfloat16))
    assert not first.tensor("model.layers.0.mlp.up_proj.bias", (64,)).any()


def test_has_what_the_config_says(folder: Path, config, write_json):
    weights = open_path(folder).weights()
    assert weights.has("model.norm.weight")
    assert not weights.has("lm_head.weight")
    assert not weights.has("model.layers.0.self_attn.q_proj.bias")
    assert not weights.has("model.layers.0.mlp.up_proj.scales")
    assert list(weights.names()) == []
    write_json(folder / "config.json", {**config, "tie_word_embeddings": False, "model_type": "qwen2", "dtype": "int8"})
    weights = open_path(folder).weights()
    assert weights.has("lm_head.weight")
    assert weights.has("model.layers.0.self_attn.q_proj.bias")
    assert not weights.has("model.layers.0.self_attn.o_proj.bias")
    assert weights.tensor("lm_head.weight", (4, 4)).dtype == torch.float32


def test_activations_stay_finite(folder: Path):
    """Noise of this size neither grows nor dies through fifty layers with norms between them."""
    weights = open_path(folder).weights()
    x = torch.ones(2, 64)
    for layer in range(50):
        matrix = weights.tensor(f"model.layers.{layer}.mlp.up_proj.weight", (64, 64)).float()
        x = x + torch.nn.functional.rms_norm(x, (64,)) @ matrix.T
    assert torch.isfinite(x).all()
    assert x.abs().max() < 100


def test_byte_tokenizer(folder: Path):
    checkpoint = open_path(folder)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.get_vocab_size() == 300
    text = "Hi \u00e9\u65e5\U0001f600\n\x00"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert tokenizer.encode("a<|im_end|>").ids == [97, END_ID]
    assert tokenizer.decode([97, END_ID, 299]) == "a<299>", "every id is text, or special"
    assert checkpoint.generation_config()["eos_token_id"] == END_ID
    assert checkpoint.tokenizer_config()["eos_token"] == "<|im_end|>"


def test_chat_template(folder: Path):
    import jinja2

    checkpoint = open_path(folder)
    template = checkpoint.chat_template()
    assert template is not None
    messages = [{"role": "user", "content": "Hi"}]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("vocab_size", [258, 0, -1, "300", None, True])
def test_vocabulary_too_small_for_bytes(folder: Path, config, write_json, vocab_size: object):
    write_json(folder / "config.json", {**config, "vocab_size": vocab_size})
    with pytest.raises(ModelLoadError, match="'vocab_size' must be at least 259"):
        open_path(folder).tokenizer()


def test_the_folders_own_files_come_first(folder: Path, config, write_json):
    from tokenizers import Tokenizer, models

    write_json(folder / "config.json", {**config, "eos_token_id": 7})
    assert open_path(folder).generation_config()["eos_token_id"] == 7
    Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "a", "chat_template": "own"})
    checkpoint = open_path(folder)
    assert checkpoint.tokenizer().encode("a").ids == [0]
    assert checkpoint.tokenizer_config()["eos_token"] == "a"
    assert checkpoint.chat_template() == "own"


def test_a_nested_config_is_read_as_its_model_reads_it(tmp_path: Path, config, write_json):
    """Vocabulary, dtype and what is tied are the language model's, wherever the file has them."""
    outer = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}, "image_token_index": 300}
    inner = {**config, "model_type": "llama", "vocab_size": 320, "eos_token_id": None}
    write_json(tmp_path / "config.json", {**outer, "text_config": inner})
    plugins = installed()
    given = build_config(plugins, {"model": str(tmp_path), "load_format": "dummy"})
    opened = open_model(given, plugins, print)
    assert opened.checkpoint.tokenizer().get_vocab_size() == 320 == opened.config.vocab_size
    assert opened.eos_token_ids == (END_ID,)
    assert opened.checkpoint.weights().has("lm_head.weight") != config["tie_word_embeddings"]
