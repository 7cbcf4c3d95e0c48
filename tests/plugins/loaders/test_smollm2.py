"""The real model: SmolLM2-135M-Instruct, Q4_1."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.helpers.lazy import lazy

from fwk.interfaces.loader import LoaderContext
from fwk_loaders.gguf.loader import GGUFLoader

gguf = lazy("gguf")

pytestmark = pytest.mark.model

TEXTS = [
    "Hello, world! How are you?",
    "In 2024, 1234567 people paid $3.50 (or 12,5 \u20ac) 007 times.",
    "  leading and trailing   spaces  \n\n\n\tand tabs\t\t",
    "na\u00efve caf\u00e9, \u00dcbergr\u00f6\u00dfe, \u0161\u010d\u0159\u017e",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8",
    "\u4e2d\u6587\uff0c\ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\U0001f600\U0001f44d\U0001f3fd family: \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u200b\ufeff",
    "def f(x: int) -> int:\n    return x**2  # it's they'll we've I'M\n",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<|endoftext|><repo_name>x",
    "",
    "\x00\x01\x7f",
]


@pytest.fixture(scope="module")
def checkpoint(smollm2: Path):
    return GGUFLoader(LoaderContext()).open(smollm2)


@pytest.fixture(scope="module")
def reader(smollm2: Path):
    return gguf.GGUFReader(smollm2)


def test_config(checkpoint):
    assert GGUFLoader.reads(checkpoint.path) is None
    config = checkpoint.config()
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    assert {name: config[name] for name in expected} == expected
    assert checkpoint.generation_config()["eos_token_id"] == [2]


@pytest.mark.sweep
def test_every_weight_against_the_reference(checkpoint, reader):
    """272 tensors: names of transformers' model, shapes, and numbers (Q and K put back in llama.cpp's order)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    given = {key: value for key, value in checkpoint.config().items() if key != "rope_scaling"}
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(LlamaConfig(**given)).named_parameters()}
    weights = checkpoint.weights()
    assert set(weights.names()) == set(shapes)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name in [name for name in shapes if "layers." not in name or ".0." in name or ".29." in name]:
        tensor = stored[weights._architecture.stored_name(name)]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shapes[name])
        found = weights.tensor(name, shapes[name]).numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = 9 if "q_proj" in name else 3
            found = found.reshape(heads, 2, 32, -1).swapaxes(1, 2).reshape(found.shape)
        np.testing.assert_array_equal(found, expected)


def test_loads_fast(checkpoint):
    """In CPU seconds of one thread, so that other work on the machine does not count."""
    weights = checkpoint.weights()
    shapes = {name: weights._find(name).shape for name in weights.names()}
    started = time.process_time()
    total = sum(weights.tensor(name, shape).numel() for name, shape in shapes.items())
    seconds = time.process_time() - started
    assert total == 134_515_008
    assert seconds < 1.5


GOLDEN = Path(__file__).with_name("smollm2_tokens.json")
"""What transformers makes of ``TEXTS``; the sweep makes it again."""


@pytest.mark.sweep
def test_the_tokens_are_those_of_transformers(smollm2: Path):
    from transformers import AutoTokenizer

    expected = AutoTokenizer.from_pretrained(str(smollm2.parent), gguf_file=smollm2.name)
    assert json.loads(GOLDEN.read_text()) == [expected(text)["input_ids"] for text in TEXTS]


@pytest.mark.sweep
def test_tokenizer_against_transformers(checkpoint):
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.get_vocab_size() == 49152
    for text, expected in zip(TEXTS, json.loads(GOLDEN.read_text()), strict=True):
        found = tokenizer.encode(text)
        assert found.ids == expected, text
        assert tokenizer.decode(found.ids, skip_special_tokens=False) == text
    assert tokenizer.encode("1234567").tokens == list("1234567")
    assert tokenizer.decode([1, 2, 0]) == ""


def test_special_tokens_and_chat_template(checkpoint):
    config = checkpoint.tokenizer_config()
    assert (config["bos_token"], config["eos_token"], config["pad_token"], config["unk_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
        "<|endoftext|>",
    )
    assert not config["add_bos_token"]
    template = checkpoint.chat_template()
    assert "<|im_start|>" in template
    assert "add_generation_prompt" in template
