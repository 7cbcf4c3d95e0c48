"""Tokenizers that explode: refused before they serve, by a process that can be ended; others are not tried at all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.tiny import save_llama
from tokenizers import Tokenizer

import fwk
from fwk.errors import InvalidRequest, ModelLoadError
from fwk.text import ModelText
from fwk_tokenizer import check
from fwk_tokenizer.bounds import MAX_STEPS, check_tokenizer_file
from fwk_tokenizer.check import KNOWN, check_tokenizer
from fwk_tokenizer.growth import MAX_FREE_CHARACTERS, GrowthLimit


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def replace(times: int, content: str) -> dict[str, Any]:
    one = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [one] * times}


def tokenizer(**parts: Any) -> Tokenizer:
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []}
    return Tokenizer.from_str(json.dumps({"version": "1.0", "model": model, "added_tokens": []} | parts))


def steps(count: int) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": [{"type": "Lowercase"}] * count}


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"pre_tokenizer": split("(a|a)*$")}, "retry-limit-in-match over"),
        ({"pre_tokenizer": split("(?:a?){30}a{30}$|(.*)*x")}, "CPU time|retry-limit"),
        ({"decoder": {"type": "Replace", "pattern": {"Regex": "(a|a)*$"}, "content": ""}}, "retry-limit-in-match over"),
    ],
    ids=["backtracking", "two patterns", "decoder"],
)
def test_slow_patterns_are_refused_in_a_sentence(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^folder: the tokenizer.*({why})[^\n]*--tokenizer-path$"):
        check_tokenizer(tokenizer(**parts), "folder")


def template(copies: int, num_ids: int) -> dict[str, Any]:
    text, mark = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "X", "type_id": 0}}
    special = {"X": {"id": "X", "ids": [0] * num_ids, "tokens": ["X"] * num_ids}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 0}}]
    return {
        "type": "TemplateProcessing",
        "single": [text] * copies + [mark] * 100,
        "pair": pair,
        "special_tokens": special,
    }


OLD = {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 24}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
WORDS = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "#", "vocab": {"a": 0}}
GROWING: dict[str, tuple[dict[str, Any], str]] = {
    "doubling 24 times": ({"normalizer": replace(24, "aa")}, "normalizer that can make a text 1.68e+07 times as long"),
    "as old files spell it": ({"normalizer": OLD}, "1.68e+07 times"),
    "by a pattern": ({"normalizer": {"type": "Replace", "pattern": {"Regex": "q"}, "content": "q" * 99}}, "100 charac"),
    "at both ends": ({"normalizer": {"type": "Prepend", "prepend": "q" * 99}}, "100 characters of one"),
    "bytes of bytes": ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 24}}, "times as l"),
    "in the splitter": ({"pre_tokenizer": {"type": "Sequence", "pretokenizers": [BYTES] * 24}}, "pre_tokenizer that"),
    "in the decoder": ({"decoder": {"type": "Sequence", "decoders": replace(24, "aa")["normalizers"]}}, "decoder that"),
    "the template repeats": ({"post_processor": template(9, 1)}, "repeats a text 9 times"),
    "the template adds": ({"post_processor": template(1, 1000)}, "100000 tokens around it"),
    "steps": ({"normalizer": steps(MAX_STEPS)}, f"{MAX_STEPS + 1} normalisers, splitters"),
    "added tokens": (
        {
            "normalizer": replace(12, "aa"),
            "added_tokens": [{"id": 1, "content": "a" * 2**15, "special": False, "normalized": True} | dict.fromkeys(
                ("single_word", "lstrip", "rstrip"), False)],
        },
        "added tokens of 32768 characters",
    ),
}  # fmt: skip


def test_what_grows_is_refused_before_it_is_built() -> None:
    whole = {"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    for name, (parts, why) in GROWING.items():
        with pytest.raises(ModelLoadError) as told:
            check_tokenizer_file(json.dumps(whole | parts).encode(), "folder")
        assert str(told.value).startswith("folder: the tokenizer has "), name
        assert why in str(told.value), (name, str(told.value))
    for damaged in (b"", b"[" * 10**6, b'{"normalizer": {"type": "?"}}', b'{"added_tokens": 1}', b"\xff"):
        with pytest.raises(ModelLoadError, match="folder: not a tokeniser"):
            check_tokenizer_file(damaged, "folder")


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (WORDS | {"max_input_chars_per_word": 10**9}, "words of 1000000000 characters"),
        ({"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["b" * 1000, -1.0]]}, "piece of 1000 characters"),
    ],
)
def test_models_that_search_far_are_refused(model: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError, match=why):
        check_tokenizer(tokenizer(model=model), "folder")
    small = model | ({"max_input_chars_per_word": 100} if model is not None and "unk_token" in model else {})
    if small != model:
        check_tokenizer(tokenizer(model=small), "folder")


def test_a_text_that_would_grow_is_refused() -> None:
    """Where a normaliser may make much of some texts, each is looked at before it is tokenised."""
    limit = GrowthLimit(tokenizer(normalizer=replace(12, "aa")))
    limit.check("b" * 2 * MAX_FREE_CHARACTERS)
    limit.check("a" * 200)
    for text in ("a" * 1000, "b" * MAX_FREE_CHARACTERS + "a" * 2000):
        with pytest.raises(InvalidRequest, match=r"makes more than [0-9]+ characters of this text"):
            limit.check(text)
    GrowthLimit(tokenizer(normalizer=replace(2, "aa"))).check("a" * 2 * MAX_FREE_CHARACTERS)


@pytest.mark.sweep
def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every character a little below the library's own limit: each search is quick, all of them are not."""
    monkeypatch.setattr(check, "CPU_SECONDS", 1)
    slow = tokenizer(pre_tokenizer=split("(?:a|a|b){16}(?!.)"))
    with pytest.raises(ModelLoadError, match=r"more than 1 seconds of CPU time|retry-limit"):
        check_tokenizer(slow, "folder")


@pytest.mark.gate(1)
@pytest.mark.parametrize("regex", [*sorted(KNOWN), r"\p{L}+|\p{N}{1,3}|\s+|."])
def test_honest_patterns_pass_the_trial(monkeypatch: pytest.MonkeyPatch, regex: str) -> None:
    monkeypatch.setattr(check, "KNOWN", frozenset[str]())
    check_tokenizer(tokenizer(pre_tokenizer=split(regex), normalizer={"type": "NFC"}), "folder")


def test_honest_tokenizers_cost_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("tried")

    monkeypatch.setattr(subprocess, "run", never)
    marks = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    check_tokenizer(tokenizer(normalizer={"type": "Sequence", "normalizers": marks}), "folder")
    for regex in KNOWN:
        check_tokenizer(tokenizer(pre_tokenizer=split(regex)), "folder")
    check_tokenizer(tokenizer(), "folder")
    with pytest.raises(AssertionError, match="tried"):
        check_tokenizer(tokenizer(pre_tokenizer=split("x+")), "folder")


def test_a_model_with_one_is_not_loaded(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text()) if file.exists() else json.loads(tokenizer().to_str())
    file.write_text(json.dumps(content | {"pre_tokenizer": split("(a|a)*$")}))
    with pytest.raises(ModelLoadError, match="normaliser, splitter or decoder cannot be used"):
        fwk.LLM(str(folder), max_total_tokens=64)


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "model")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(200 << 30)  # no byte of it on the disk
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json is larger than 128 MB"):
        fwk.LLM(str(folder), tokenizer_path=str(tmp_path), max_total_tokens=64)


def test_a_panic_in_a_request_is_the_texts_fault() -> None:
    text = object.__new__(ModelText)
    text.tokenizer = tokenizer(pre_tokenizer=split("(a|a)*$"))
    text._growth = GrowthLimit(text.tokenizer)
    with pytest.raises(InvalidRequest, match="takes too long to split"):
        text.encode("a" * 40 + "b")
