"""Tokens of a folder's files together are those of transformers' tokenizer."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fwk.errors import ModelLoadError
from fwk_loaders._common.folder import ModelFolder
from fwk_loaders._common.tokens import LOWERS, OF_BERT, ONLY, PREFIXES
from fwk_loaders.dummy.tokenizer import build_tokenizer

WORDS = ["<|a|>", "<|b|>", "<|c|>", "[D]"]
TEXT = "x <|a|> y<|b|>z <|c|>  <|d|>[D] <|b|><|endoftext|>"
HARMLESS = {
    "add_bos_token", "add_eos_token", "auto_map", "backend", "chat_template",
    "clean_up_tokenization_spaces", "is_local", "legacy", "local_files_only", "model_input_names",
    "model_max_length", "name_or_path", "pad_to_multiple_of", "pad_token_type_id", "padding_side", "processor_class",
    "special_tokens_map_file", "stride", "tokenizer_class",
    "truncation_side", "truncation_strategy", "use_default_system_prompt", "use_fast", "max_length", "sp_model_kwargs",
    "spaces_between_special_tokens", "errors", "response_schema", "response_template", "verbose", "padding",
    "truncation", "return_token_type_ids", "added_tokens_decoder_hash",
}  # fmt: skip


def described(text: str, random_flags: random.Random) -> dict[str, Any]:
    flags = {name: random_flags.random() < 0.3 for name in ("lstrip", "rstrip", "special", "normalized")}
    return {"content": text, "single_word": False, **flags}


def files_of(rng: random.Random) -> dict[str, Any]:
    """A tokenizer.json and the files next to it: each token in some of the places where one can be."""
    tokenizer = json.loads(build_tokenizer(320, "tests").to_str())
    vocabulary: dict[str, int] = tokenizer["model"]["vocab"]
    ids = {text: vocabulary.pop(f"<{310 + index}>") for index, text in enumerate(WORDS)}
    vocabulary |= ids
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    listed, extra, legacy = {}, [], {}
    for text, index in ids.items():
        if rng.random() < 0.4:
            tokenizer["added_tokens"].append({"id": index, **described(text, rng)})
        if rng.random() < 0.4:
            listed[str(index)] = described(text, rng)
        if rng.random() < 0.3:
            extra.append(text)
        if rng.random() < 0.3:
            config[rng.choice(["bos_token", "eos_token", "image_token"])] = text
        if rng.random() < 0.3:
            legacy[text] = index
    if rng.random() < 0.3:
        listed["320"] = described("<|d|>", rng)
    if rng.random() < 0.6:
        config["added_tokens_decoder"] = listed
    if extra:
        config[rng.choice(["extra_special_tokens", "additional_special_tokens"])] = extra
    return {"tokenizer": tokenizer, "tokenizer_config": config, "added_tokens": legacy, "config": {}}


def write(folder: Path, files: dict[str, Any]) -> Path:
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_tokens_of_all_files_together(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    wrong = []
    for seed in range(200):
        files = files_of(random.Random(seed))
        folder = write(tmp_path / str(seed), files)
        reference, found = PreTrainedTokenizerFast.from_pretrained(folder), ModelFolder(folder).tokenizer()
        ids = reference(TEXT)["input_ids"]
        wanted = ids, reference.decode(ids, skip_special_tokens=True)
        read = found.encode(TEXT).ids, found.decode(ids, skip_special_tokens=True)
        if read != wanted:
            wrong.append(f"{seed}: {read} {wanted} {files['tokenizer_config']} {files['added_tokens']}")
    assert not wrong, "\n".join([str(len(wrong)), *wrong[:5]])


SPLIT = ["Hello wörld", " É 中文 hello", "hello  <s> hello"]


def trained(kind: str) -> Any:
    """A small tokenizer: of bytes, of words with their blanks (as transformers has it, or as files of old), of BERT."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    named = ["<unk>", "<s>", "[PAD]", "[CLS]", "[SEP]", "[MASK]"]
    if kind == "bert":
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=200, special_tokens=named)
        tokenizer.decoder = decoders.WordPiece()
    elif kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer, tokenizer.decoder = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            decoders.ByteLevel(),
        )
        letters = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=named, initial_alphabet=letters)
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=named)
    tokenizer.train_from_iterator([*SPLIT, "Hello hello wörld É ▁ 中文"] * 3, trainer)
    if kind == "old":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.Sequence(steps), None  # type: ignore[assignment]
    return tokenizer


def test_keys_that_a_class_writes_over_the_file(tmp_path: Path) -> None:
    """Of each such class, each key at each value; PreTrainedTokenizerFast ignores them all."""
    from transformers import AutoTokenizer, logging

    logging.set_verbosity_error()
    prefix, no_prefix = {"add_prefix_space": True}, {"add_prefix_space": False}
    cases = [("bytes", name, prefix) for name in (*PREFIXES, "PreTrainedTokenizerFast")]
    cases += [("blanks", "LlamaTokenizerFast", prefix), ("blanks", "LlamaTokenizer", no_prefix)]
    cases += [("old", "LlamaTokenizer", no_prefix), ("bert", "BertTokenizerFast", dict.fromkeys(OF_BERT, True))]
    cases += [("bert", "BertTokenizer", {key: False}) for key in OF_BERT]
    cases += [("bert", name, dict.fromkeys(OF_BERT, False)) for name in (*LOWERS, "PreTrainedTokenizerFast")]
    wrong, made = [], {kind: trained(kind) for kind in ("bytes", "blanks", "old", "bert")}
    for number, (kind, name, keys) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        made[kind].save(str(folder / "tokenizer.json"))
        said = {"tokenizer_class": name, "bos_token": "<s>", "unk_token": "<unk>", **keys}
        (folder / "tokenizer_config.json").write_text(json.dumps(said))
        (folder / "config.json").write_text(json.dumps({"model_type": "bert" if kind == "bert" else "llama"}))
        reference, found = AutoTokenizer.from_pretrained(folder), ModelFolder(folder).tokenizer()
        for text in SPLIT:
            ids = reference(text, add_special_tokens=False)["input_ids"]
            read = found.encode(text, add_special_tokens=False).ids
            if read != ids or found.decode(ids, skip_special_tokens=False) != reference.decode(ids):
                wrong.append(f"{kind} {said} {text!r}: {read} {ids}")
    assert not wrong, "\n".join(wrong)


def test_keys_that_are_not_read(tmp_path: Path) -> None:
    """What transformers writes is read, harmless, or refused where it says something."""
    from transformers import PreTrainedTokenizerFast

    written = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(320, "tests"), eos_token="<|endoftext|>")
    written.save_pretrained(tmp_path / "written")
    said = json.loads((tmp_path / "written" / "tokenizer_config.json").read_text())
    assert {name for name in said if not name.endswith("_token")} <= HARMLESS | set(ONLY) | {
        *OF_BERT,
        "add_prefix_space",
    }
    files = files_of(random.Random(0))
    for number, name in enumerate(ONLY):
        folder = write(tmp_path / str(number), {**files, "tokenizer_config": {name: True}})
        with pytest.raises(ModelLoadError, match=f"'{name}' is True.*give another tokenizer"):
            ModelFolder(folder).tokenizer()


@pytest.mark.parametrize("listed", [{"x": {"content": "a"}}, {"1": "a"}, {"1": {"text": "a"}}, {"1": {"content": 3}}])
def test_a_damaged_list_is_named(listed: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {**files_of(random.Random(0)), "tokenizer_config": {"added_tokens_decoder": listed}})
    with pytest.raises(ModelLoadError, match="added_tokens_decoder is damaged"):
        ModelFolder(folder).tokenizer()
