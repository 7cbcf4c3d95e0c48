"""Models that embed, classify and rerank against transformers: decoders, BERT and RoBERTa classifiers, ColBERT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tests.helpers.architectures import SMALL
from tests.helpers.lazy import lazy
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

import fwk
from fwk.errors import ConfigError, InvalidRequest, ModelLoadError
from fwk_loaders.dummy.tokenizer import build_tokenizer

transformers = lazy("transformers")

PROMPTS = [[7 * i % 300 + 3 for i in range(n)] for n in (1, 9, 40, 3, 70)]
ENCODER = {
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 1,
}
WORDS = [
    "[UNK]",
    "[PAD]",
    "[CLS]",
    "[SEP]",
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "mat",
    "dog",
    "ran",
    "[unused0]",
    "[unused1]",
]
PAIRS = [("the cat", "cat sat on the mat"), ("a dog ran", "the mat"), ("cat", "[SEP] on [SEP] dog")]


def filled(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name.lower() and name.endswith("weight")
            parameter.normal_(float(is_norm), 0.25)
    return model.float().eval()


def write(folder: Path, model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    filled(model).save_pretrained(folder)
    build_tokenizer(SMALL["vocab_size"], str(folder)).save(str(folder / "tokenizer.json"))
    return model


def write_words(folder: Path) -> None:
    tokenizer = Tokenizer(WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens([*WORDS[:4], *WORDS[-2:]])
    tokenizer.save(str(folder / "tokenizer.json"))


def change(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def last_states(model: transformers.PreTrainedModel) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in PROMPTS]


def same(actual: np.ndarray, wanted: torch.Tensor) -> None:
    assert actual.dtype == np.float32
    torch.testing.assert_close(
        torch.from_numpy(actual.copy()), wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4
    )


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("qwen3", {"head_dim": 16}),
        ("gpt2", {"n_inner": None, "num_key_value_heads": 4, "intermediate_size": 256}),
        ("mistral", {"sliding_window": 20}),
        ("gemma2", {"head_dim": 16, "sliding_window": 20}),
    ],
)
def test_a_decoder_without_its_head_embeds(tmp_path: Path, kind: str, changes: dict[str, Any]) -> None:
    """Names without ``model.``; prompts of one step do not see each other."""
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **changes})
    model = write(tmp_path, transformers.AutoModel.from_config(config, attn_implementation="eager"))
    wanted = last_states(model)
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=1024) as llm:
        same(llm.embed(PROMPTS), torch.stack([F.normalize(x[-1], dim=0) for x in wanted]))
        with pytest.raises(InvalidRequest, match="makes embeddings and generates no text"):
            llm.generate("Hi")
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=1024, pooling_type="token") as llm:
        same(llm.embed(PROMPTS), torch.cat([F.normalize(x, dim=-1) for x in wanted]))


def test_a_decoder_with_its_head_embeds_when_asked(tmp_path: Path) -> None:
    """Pooling as modules.json says; packed weights embed, too."""
    model = write(
        tmp_path,
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3", **SMALL, head_dim=16)),
    )
    wanted = last_states(model.model)
    with fwk.LLM(str(tmp_path), dtype="float32", task="embed", pooling_type="mean", max_total_tokens=1024) as llm:
        same(llm.embed(PROMPTS), torch.stack([F.normalize(x.mean(0), dim=0) for x in wanted]))
    modules = [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=1024) as llm:
        same(llm.embed(PROMPTS), torch.stack([x[-1] for x in wanted]))
    with fwk.LLM(str(tmp_path), dtype="float32", quantization="int8", max_total_tokens=1024) as llm:
        found = torch.from_numpy(llm.embed(PROMPTS).copy())
        assert F.cosine_similarity(found, torch.stack([x[-1] for x in wanted])).min() > 0.99


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gpt2"])
def test_a_decoder_classifies(tmp_path: Path, kind: str) -> None:
    own = {"n_inner": None, "num_key_value_heads": 4, "intermediate_size": 256} if kind == "gpt2" else {}
    config = transformers.AutoConfig.for_model(kind, **{**SMALL, **own}, num_labels=3)
    model = write(tmp_path, transformers.AutoModelForSequenceClassification.from_config(config))
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([ids])).logits for ids in PROMPTS])
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=1024) as llm:
        same(llm.classify(PROMPTS), wanted)


@pytest.mark.sweep
def test_tensor_parallel_ranks_classify_alike(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model("llama", **SMALL, num_labels=1)
    model = write(tmp_path, transformers.AutoModelForSequenceClassification.from_config(config))
    with torch.no_grad():
        wanted = torch.cat([model(torch.tensor([ids])).logits for ids in PROMPTS])
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=1024, tensor_parallel_size=2) as llm:
        same(llm.classify(PROMPTS), wanted)


def test_the_logits_of_tokens_score(tmp_path: Path) -> None:
    """As Qwen3-Reranker is used: yes against no."""
    model = write(
        tmp_path,
        transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("qwen3", **SMALL, head_dim=16)),
    )
    with torch.no_grad():
        logits = torch.stack([model(torch.tensor([ids])).logits[0, -1] for ids in PROMPTS])
    settings: dict[str, Any] = {"dtype": "float32", "task": "classify", "max_total_tokens": 1024}
    with fwk.LLM(str(tmp_path), **settings, classifier_from_token=("n", "y")) as llm:
        no, yes = (llm.text.encode(word)[0] for word in "ny")
        same(llm.classify(PROMPTS), logits[:, [yes]] - logits[:, [no]])
    with fwk.LLM(str(tmp_path), **settings, classifier_from_token=("y",)) as llm:
        same(llm.classify(PROMPTS), logits[:, [yes]])
    with pytest.raises(ConfigError, match="'yes' is 3 tokens"):
        fwk.LLM(str(tmp_path), **settings, classifier_from_token=("yes",))
    with pytest.raises(ConfigError, match="no layer to classify with"):
        fwk.LLM(str(tmp_path), **settings)


@pytest.mark.gate(3)
@pytest.mark.parametrize("kind", ["bert", "roberta", "xlm-roberta"])
@pytest.mark.parametrize("num_labels", [1, 3])
def test_cross_encoders(tmp_path: Path, kind: str, num_labels: int) -> None:
    """The second text's tokens are of the second segment where the model has two."""
    config = transformers.AutoConfig.for_model(
        kind, **ENCODER, type_vocab_size=2 if kind == "bert" else 1, num_labels=num_labels
    )
    model = filled(transformers.AutoModelForSequenceClassification.from_config(config))
    model.save_pretrained(tmp_path)
    write_words(tmp_path)
    with fwk.LLM(str(tmp_path), dtype="float32") as llm:
        wanted: list[torch.Tensor] = []
        for first, second in PAIRS:
            ids, start = llm.text.encode_pair(first, second)
            segments = torch.tensor([[int(0 < start <= i) for i in range(len(ids))]])
            assert start == 2 + len(first.split())
            assert ids.count(3) == 2  # what a text says of separators is text
            with torch.no_grad():
                kinds = {"token_type_ids": segments} if kind == "bert" else {}
                wanted.append(model(torch.tensor([ids]), **kinds).logits)
        same(llm.classify_pairs(PAIRS), torch.cat(wanted))


@pytest.mark.parametrize("kind", ["roberta", "xlm-roberta"])
def test_roberta_embeds(tmp_path: Path, kind: str) -> None:
    model = filled(
        transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **ENCODER), add_pooling_layer=False)
    )
    model.save_pretrained(tmp_path)
    write_words(tmp_path)
    prompts = [[2, 5, 6, 3], [2, *range(4, 12), 3] * 6, [9]]
    with torch.no_grad():
        wanted = torch.stack([model(torch.tensor([ids])).last_hidden_state[0].mean(0) for ids in prompts])
    with fwk.LLM(str(tmp_path), dtype="float32") as llm:
        same(llm.embed(prompts), wanted)
        with pytest.raises(InvalidRequest, match="takes at most 62"):
            llm.embed([5] * 63)


def test_colbert_makes_a_vector_of_each_token(tmp_path: Path) -> None:
    model = filled(transformers.BertModel(transformers.BertConfig(**ENCODER), add_pooling_layer=False))
    shorter = torch.randn(16, 48)
    tensors = {f"bert.{name}": x for name, x in model.state_dict().items()} | {"linear.weight": shorter}
    model.config.save_pretrained(tmp_path)
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    change(tmp_path, architectures=["HF_ColBERT"], dim=16)
    write_words(tmp_path)
    prompts = [[2, 5, 6, 3], [2, *range(4, 12), 3]]
    with torch.no_grad():
        states = [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]
    with fwk.LLM(str(tmp_path), dtype="float32") as llm:
        same(llm.embed(prompts), torch.cat([F.normalize(x @ shorter.T, dim=-1) for x in states]))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    write(
        tmp_path, transformers.AutoModel.from_config(transformers.AutoConfig.for_model("qwen3", **SMALL, head_dim=16))
    )
    with pytest.raises(ModelLoadError, match="no model plugin serves 'Qwen3Model'"):
        fwk.LLM(str(tmp_path), task="generate")
    for settings, reason in (
        ({"prefix_cache": "radix", "pooling_type": "mean"}, "needs the hidden states of all tokens"),
        ({"enable_lora": True}, "adapters are for models of text"),
        ({"classifier_from_token": ("y",)}, "with --task classify"),
    ):
        with pytest.raises(ConfigError, match=reason):
            fwk.LLM(str(tmp_path), **settings)
    for key, value in (("is_causal", False), ("use_bidirectional_attention", True)):
        change(tmp_path, **{key: value})
        with pytest.raises(ModelLoadError, match=f"{key} is {str(value).lower()}: every token"):
            fwk.LLM(str(tmp_path))
        change(tmp_path, **{key: None})
    write(tmp_path, transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model("llama", **SMALL)))
    with pytest.raises(ConfigError, match="--pooling-type: this model generates text"):
        fwk.LLM(str(tmp_path), pooling_type="mean")
