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
from fwk.text import ModelText, tokenizer_check
from fwk.text.tokenizer_check import KNOWN, MAX_STEPS, check_tokenizer


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


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"pre_tokenizer": split("(a|a)*$")}, "retry-limit-in-match over"),
        ({"pre_tokenizer": split("(?:a?){30}a{30}$|(.*)*x")}, "CPU time|retry-limit"),
        ({"normalizer": replace(6, "aaaaaaaaaa")}, "more than 1024 MB of memory|CPU time"),
        ({"normalizer": steps(MAX_STEPS)}, f"{MAX_STEPS + 1} normalisers and splitters"),
    ],
    ids=["backtracking", "two patterns", "growth", "steps"],
)
def test_what_explodes_is_refused_in_a_sentence(parts: dict[str, Any], why: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"^folder: the tokenizer.*({why})[^\n]*--tokenizer-path$"):
        check_tokenizer(tokenizer(**parts), "folder")


def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every character a little below the library's own limit: each search is quick, all of them are not."""
    monkeypatch.setattr(tokenizer_check, "CPU_SECONDS", 1)
    slow = tokenizer(pre_tokenizer=split("(?:a|a|b){16}(?!.)"))
    with pytest.raises(ModelLoadError, match=r"more than 1 seconds of CPU time|retry-limit"):
        check_tokenizer(slow, "folder")


@pytest.mark.parametrize("regex", [*sorted(KNOWN), r"\p{L}+|\p{N}{1,3}|\s+|."])
def test_honest_patterns_pass_the_trial(monkeypatch: pytest.MonkeyPatch, regex: str) -> None:
    monkeypatch.setattr(tokenizer_check, "KNOWN", frozenset[str]())
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
    with pytest.raises(ModelLoadError, match="normaliser or splitter cannot be used"):
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
    with pytest.raises(InvalidRequest, match="takes too long to split"):
        text.encode("a" * 40 + "b")
