"""Checkpoints that somebody made to harm who loads them, by a seed: each serves or is refused in one sentence, soon."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.hostile_files import Examiner, damaged, hostile_gguf, hostile_json, hostile_safetensors, many_tensors
from tests.helpers.tiny import save_llama

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError
from fwk_loaders._common.json_file import MAX_JSON_MEMBERS

Draw = Callable[[random.Random], dict[str, bytes]]
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENS: dict[str, Any] = {
    "tokenizer_class": "LlamaTokenizer",
    "add_prefix_space": False,
    "eos_token": {"content": "</s>", "special": True},
    "added_tokens_decoder": {"7": {"content": "a", "special": True, "lstrip": False, "normalized": False}},
    "extra_special_tokens": ["<x>"],
    "chat_template": "{{ messages[0].content }}",
    "model_max_length": 512,
}
KINDS = (WEIGHTS, INDEX, "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
NAMED = (".json", ".safetensors", "this fwk computes")
"""What an error says of which file is at fault, or of which setting of the model."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = save_llama(tmp_path_factory.mktemp("whole"), hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def drawing(kind: str, whole: dict[str, bytes]) -> Draw:
    """Draws the files of a folder of which one is hostile."""
    if kind == WEIGHTS:
        return lambda dice: whole | {WEIGHTS: hostile_safetensors(whole[WEIGHTS], dice)}
    if kind == INDEX:
        (size,) = struct.unpack("<Q", whole[WEIGHTS][:8])
        names = [name for name in json.loads(whole[WEIGHTS][8 : 8 + size]) if name != "__metadata__"]
        index = {"metadata": {"total_size": 5}, "weight_map": dict.fromkeys(names, "a.safetensors")}
        others = {name: data for name, data in whole.items() if name != WEIGHTS} | {"a.safetensors": whole[WEIGHTS]}
        return lambda dice: others | {INDEX: hostile_json(index, dice)}
    honest = TOKENS if kind == "tokenizer_config.json" else json.loads(whole[kind])
    return lambda dice: whole | {kind: hostile_json(honest, dice)}


def serve(path: Path) -> None:
    with fwk.LLM(str(path), device="cpu", max_total_tokens=64) as llm:
        llm.generate([[1, 2]], SamplingParams(max_tokens=2))


def examined(root: Path, draw: Draw, count: int, named: tuple[str, ...] = ()) -> Examiner:
    """named: what errors say, instead of the folder or of what is at fault in it."""
    examiner = Examiner()
    for seed in range(count):
        folder = root / f"m{seed}"
        folder.mkdir()
        for name, data in draw(random.Random(seed)).items():
            (folder / name).write_bytes(data)
        examiner.examine(f"seed {seed}", lambda folder=folder: serve(folder), named or (str(folder), *NAMED))
    return examiner


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_hostile_folders(tmp_path: Path, whole: dict[str, bytes], kind: str) -> None:
    examiner = examined(tmp_path, drawing(kind, whole), 4)
    assert not examiner.wrong, "\n".join(examiner.wrong)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", KINDS)
def test_many_hostile_folders(tmp_path: Path, whole: dict[str, bytes], kind: str) -> None:
    examiner = examined(tmp_path, drawing(kind, whole), 150)
    assert not examiner.wrong, "\n".join(examiner.wrong)
    assert min(examiner.served, examiner.refused) > 1, (examiner.served, examiner.refused)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [WEIGHTS, "tokenizer.json", "config.json"])
def test_many_damaged_folders(tmp_path: Path, whole: dict[str, bytes], kind: str) -> None:
    named = (*NAMED, str(tmp_path), "no model plugin serves", "the logits are not numbers")
    examiner = examined(tmp_path, lambda dice: whole | {kind: damaged(whole[kind], dice)}, 250, named)
    assert not examiner.wrong, "\n".join(examiner.wrong)
    assert min(examiner.served, examiner.refused) > 1, (examiner.served, examiner.refused)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != INDEX])
@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"\xff" * 100, b"{" * 100_000, b'{"a": 1e999}', b"7" * 5000])
def test_no_such_file_is_believed(tmp_path: Path, whole: dict[str, bytes], name: str, content: bytes) -> None:
    """A file of another kind altogether, in place of each: told by its name."""
    is_json = content == b'{"a": 1e999}' and name.endswith("config.json")  # what it lacks is said of the folder
    examiner = examined(
        tmp_path, lambda _: whole | {name: content}, 1, ("is missing", "a finite number") if is_json else (name,)
    )
    assert not examiner.wrong, "\n".join(examiner.wrong)
    assert examiner.refused or is_json


def gguf(root: Path, kit: Any, count: int) -> Examiner:
    examiner = Examiner()
    for seed in range(count):
        path = root / f"m{seed}.gguf"
        path.write_bytes(hostile_gguf(kit.tiny(), kit, random.Random(seed)))
        examiner.examine(f"seed {seed}", lambda path=path: serve(path), (path.name,))
    return examiner


def test_a_few_hostile_gguf_files(tmp_path: Path, kit: Any) -> None:
    examiner = gguf(tmp_path, kit, 6)
    assert not examiner.wrong, "\n".join(examiner.wrong)


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_many_hostile_gguf_files(tmp_path: Path, kit: Any) -> None:
    examiner = gguf(tmp_path, kit, 150)
    assert not examiner.wrong, "\n".join(examiner.wrong)
    assert min(examiner.served, examiner.refused) > 1, (examiner.served, examiner.refused)


def header(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


LARGE: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "tensors": (WEIGHTS, lambda: many_tensors(70_000), "more than 65536 tensors"),
    "header": (WEIGHTS, lambda: header(b" " * 40_000_000), "header is of 40000000 bytes"),
    "metadata": (WEIGHTS, lambda: header(b'{"__metadata__":{' + b'"":"",' * 10**6), "more members than any"),
    "a shape": (WEIGHTS, lambda: header(b'{"a":{"shape":[' + b"1," * 10**6), "more members than any"),
    "config": ("config.json", lambda: b'{"a":[' + b"[]," * (MAX_JSON_MEMBERS + 1) + b"1]}", "more than .* members"),
    "half a pair": ("tokenizer_config.json", lambda: b'{"eos_token": "\\uD800"}', "surrogates not allowed"),
}


def test_what_takes_far_more_than_its_file_is_refused_unread(tmp_path: Path, whole: dict[str, bytes]) -> None:
    for number, (name, (file, make, why)) in enumerate(LARGE.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        for other, data in (whole | {file: make()}).items():
            (folder / other).write_bytes(data)
        examiner = Examiner(seconds=1, megabytes=80)
        examiner.examine(name, lambda folder=folder: serve(folder), (file,))
        assert not examiner.wrong
        assert examiner.refused == 1, name
        with pytest.raises(ModelLoadError, match=why):
            serve(folder)
