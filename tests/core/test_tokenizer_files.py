"""Vocabulary files without a tokenizer.json, against the libraries that they belong to."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
from tests.helpers.tiny import save_llama
from tokenizers import Tokenizer

import fwk
from fwk.config import ModelOptions
from fwk.errors import ModelLoadError
from fwk.text import ModelText
from fwk_jobs import tokenizers as conversion

TEXTS = (
    "The quick brown fox",
    "Grüße 東京 hello\n é world 7",
    "  two  spaces ",
    "def f(x):\n    return x",
    "",
    "\U0001f98a",
)
CORPUS = [f"The quick brown fox number {i} jumps over the lazy dog; Grüße {i * 7} hello world" for i in range(200)]
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
RANKS = {
    piece: i
    for i, piece in enumerate(
        [*(bytes([i]) for i in range(256)), b"he", b"ll", b"hell", b"hello", b" w", b"or", b" wor", b"ld", b" world"]
    )
}


class _Checkpoint:
    """As much of a checkpoint as ``ModelText`` reads."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.path / "tokenizer.json"))

    def tokenizer_config(self) -> dict[str, Any]:
        return {}

    def chat_template(self) -> str | None:
        return None


def text_of(folder: Path, vocab_size: int = 1024, **options: Any) -> ModelText:
    return ModelText(_Checkpoint(folder), ModelOptions(**options), vocab_size)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this module: a conversion takes a process a second, and tests convert the same file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))


def sentencepiece_folder(folder: Path, kind: str = "bpe") -> Path:
    folder.mkdir(exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=400,
        model_type=kind,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})
    )
    return folder


def tiktoken_folder(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [f"{base64.b64encode(piece).decode()} {rank}" for piece, rank in RANKS.items()]
    (folder / "tokenizer.model").write_text("\n".join(lines))
    added = {str(len(RANKS)): {"content": "<|end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added})
    )
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.usefixtures("own_cache")
def test_sentencepiece_files_give_the_librarys_ids(tmp_path: Path, kind: str) -> None:
    folder = sentencepiece_folder(tmp_path / "model", kind)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    text = text_of(folder)
    for one in TEXTS:
        ids = reference.encode(one)
        assert text.encode(one, add_special_tokens=False) == ids
        assert text.decode(ids) == reference.decode(ids)
    assert text.encode("</s>", parse_special=True) == [reference.eos_id()]
    assert len(text.encode("</s>", add_special_tokens=False, parse_special=False)) > 1


@pytest.mark.sweep
@pytest.mark.usefixtures("own_cache")
def test_tiktoken_files_give_the_librarys_ids(tmp_path: Path) -> None:
    text = text_of(tiktoken_folder(tmp_path / "model"))
    reference = tiktoken.Encoding("tiny", pat_str=SPLIT, mergeable_ranks=RANKS, special_tokens={"<|end|>": len(RANKS)})
    for one in (*TEXTS, "hello world hell"):
        assert text.encode(one) == reference.encode(one)
        assert text.decode(text.encode(one)) == one
    assert text.encode("hello<|end|>") == [RANKS[b"hello"], len(RANKS)]


@pytest.mark.sweep
@pytest.mark.usefixtures("own_cache")
def test_modes_choose_between_the_two_files(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path / "model")
    converted = text_of(folder).tokenizer
    converted.add_tokens(["quick"])
    converted.save(str(folder / "tokenizer.json"))
    ids = {mode: text_of(folder, tokenizer_mode=mode).encode("quick") for mode in ("auto", "fast", "slow")}
    assert ids["auto"] == ids["fast"] != ids["slow"]


@pytest.mark.sweep
@pytest.mark.usefixtures("own_cache")
def test_a_path_may_be_the_vocabulary_file(tmp_path: Path) -> None:
    folder, empty = sentencepiece_folder(tmp_path / "model"), tmp_path / "empty"
    empty.mkdir()
    for path in (folder, folder / "tokenizer.model"):
        assert text_of(empty, tokenizer_path=str(path)).encode("fox") == text_of(folder).encode("fox")
    with pytest.raises(
        ModelLoadError, match=r"--tokenizer-mode slow: .*empty has no vocabulary file \(tokenizer.model"
    ):
        text_of(empty, tokenizer_mode="slow")


def test_a_conversion_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = sentencepiece_folder(tmp_path / "model")
    calls: list[Path] = []
    convert = conversion.convert

    def counted(contents: Mapping[str, bytes], kept: Path) -> None:
        calls.append(kept)
        convert(contents, kept)

    monkeypatch.setattr(conversion, "convert", counted)
    first = text_of(folder).encode("fox")
    assert text_of(folder).encode("fox") == first
    assert len(calls) == 1
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<pad>"}))
    assert "<pad>" in text_of(folder).vocabulary.special_texts
    assert len(calls) == 2


@pytest.mark.usefixtures("own_cache")
def test_what_cannot_be_converted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.model").write_bytes(b"\x07 no vocabulary")
    with pytest.raises(
        ModelLoadError, match=r"tokenizer.model cannot be converted to a tokenizer: .*--tokenizer-path$"
    ):
        text_of(folder)
    monkeypatch.setattr(conversion, "PACKAGES", ("transformers", "sentencepiece_of_nobody"))
    with pytest.raises(ModelLoadError, match=r"it needs sentencepiece_of_nobody: pip install 'fwk\[tokenizers\]'$"):
        text_of(folder)


@pytest.mark.sweep
def test_a_model_with_a_vocabulary_file_generates(tmp_path: Path) -> None:
    folder = save_llama(sentencepiece_folder(tmp_path / "model"), vocab_size=400)
    (folder / "tokenizer.json").unlink()
    with fwk.LLM(str(folder), max_total_tokens=256) as llm:
        done = llm.generate("The quick fox", fwk.SamplingParams(max_tokens=4, temperature=0.0))[0]
    assert len(done.token_ids) == 4
    reference = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    assert done.prompt_token_ids == reference.encode("The quick fox")
