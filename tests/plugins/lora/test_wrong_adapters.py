"""Adapters that cannot be served are refused in one line, and harm nobody; paths lead out of no told folder."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.adapters import make_adapter, make_base
from tests.helpers.hostile_files import Examiner, hostile_json, hostile_safetensors

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, InvalidRequest, ModelLoadError, PluginError
from fwk.interfaces.lora import LoRASourceContext
from fwk_lora._common import peft
from fwk_lora._common.module_pattern import matches
from fwk_lora.local import LocalAdapterOptions
from fwk_lora.local.source import LocalAdapters

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
KEY = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
HEAD = [f"base_model.model.lm_head.lora_{side}.weight" for side in "AB"]
Edit = Callable[[Path], None]


@pytest.fixture(scope="module")
def llm(folders: Path) -> Iterator[fwk.LLM]:
    options: dict[str, Any] = {"max_total_tokens": 1024, "enable_lora": True, "max_lora_rank": 8}
    with fwk.LLM(str(folders / "base"), **options) as made:
        yield made


def config(**changes: Any) -> Edit:
    def edit(folder: Path) -> None:
        whole = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(whole | changes))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Edit:
    def edit(folder: Path) -> None:
        held = load_file(folder / WEIGHTS)
        change(held)
        save_file({name: x.contiguous() for name, x in held.items()}, folder / WEIGHTS)

    return edit


def put(name: str, tensor: torch.Tensor) -> Edit:
    return tensors(lambda held: held.update({name: tensor}))


def truncate(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 3000)


def sparse(folder: Path) -> None:
    os.truncate(folder / WEIGHTS, 200 * 2**30)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "adapter_model.bin")


WRONG: dict[str, tuple[Edit, str]] = {
    "no config": (lambda f: (f / CONFIG).unlink(), "adapter_config.json is missing"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "adapter_model.safetensors is missing"),
    "pickle": (pickled, r"adapter_model.bin is not read: it can hold code"),
    "not json": (lambda f: (f / CONFIG).write_text("{"), "adapter_config.json is not JSON"),
    "a list": (lambda f: (f / CONFIG).write_text("[]"), "does not hold an object"),
    "huge config": (
        lambda f: (f / CONFIG).write_text(" " * 2**21),
        "2097152 bytes, more than the 1048576 that may be read",
    ),
    "truncated": (truncate, "adapter_model.safetensors is damaged"),
    "sparse": (sparse, "adapter_model.safetensors has 214748364800 bytes, more than the [0-9]+ that may be read"),
    "other method": (config(peft_type="IA3"), "of type 'IA3'; only LORA"),
    "dora": (config(use_dora=True), "adapters with DoRA are not supported"),
    "bias": (config(bias="all"), "trained biases are not supported"),
    "whole modules": (config(modules_to_save=["lm_head"]), "whole modules alongside the adapter"),
    "lora bias": (config(lora_bias=True), "'lora_bias' is True"),
    "unknown": (config(use_new_thing=3), "'use_new_thing' is 3"),
    "pissa": (config(init_lora_weights="pissa_niter_16"), "changes the base model's weights"),
    "no rank": (config(r=None), "r must be a positive number, not None"),
    "no alpha": (config(lora_alpha="x"), "lora_alpha must be a positive number, not 'x'"),
    "other rank": (config(r=3), r"lora_A \(4, 64\) and lora_B \(64, 4\), but adapter_config.json says rank 3"),
    "slow pattern": (config(alpha_pattern={"(a+)+": 1}), "repetitions are not read"),
    "bad pattern": (config(rank_pattern={"(": 1}), "rank_pattern: '[(]' cannot be used"),
    "half a pair": (tensors(lambda held: held.pop(KEY)), "q_proj has lora_B, but not the other one"),
    "nan": (put(KEY, torch.full((4, 64), float("nan"))), "holds numbers that are not finite"),
    "integers": (put(KEY, torch.ones((4, 64), dtype=torch.int8)), "not a matrix of floats"),
    "no tensors": (tensors(lambda held: held.clear()), "holds no tensor"),
    "lm head": (
        tensors(
            lambda held: held.update({f"base_model.model.lm_head.lora_{x}.weight": torch.ones(4, 4) for x in "AB"})
        ),
        "it changes lm_head, which .* is no linear layer adapters can change",
    ),
    "embedding": (put("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 320)), "is not part of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_damaged_or_unsupported(llm: fwk.LLM, folders: Path, tmp_path: Path, case: str) -> None:
    edit, message = WRONG[case]
    folder = shutil.copytree(folders / "narrow", tmp_path / "bad")
    edit(folder)
    with pytest.raises(InvalidRequest, match=message) as raised:
        llm.load_adapter("bad", str(folder))
    assert "\n" not in str(raised.value)
    assert str(tmp_path) not in str(raised.value), "a client must not learn of the server's folders"
    assert str(raised.value).startswith("LoRA adapter 'bad' cannot be loaded: ")
    assert llm.engine.call_feature("lora", "adapters", ()) == []


def served(llm: fwk.LLM, folder: Path) -> None:
    llm.load_adapter("hostile", str(folder))
    try:
        llm.generate([[5, 6]], SamplingParams(max_tokens=2), adapter="hostile")
    finally:
        llm.unload_adapter("hostile")


@pytest.mark.parametrize(
    "count", [40, pytest.param(600, marks=[pytest.mark.sweep, pytest.mark.timeout(300)])], ids=["few", "many"]
)
@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_hostile_adapters(llm: fwk.LLM, folders: Path, tmp_path: Path, file: str, count: int) -> None:
    """Drawn by a seed: each serves or is refused in one sentence, soon and in little memory."""
    examiner, folder = Examiner(), shutil.copytree(folders / "narrow", tmp_path / "hostile")
    whole = (folder / file).read_bytes()
    for seed in range(count):
        dice = random.Random(seed)
        data = hostile_json(json.loads(whole), dice) if file == CONFIG else hostile_safetensors(whole, dice)
        (folder / file).write_bytes(data)
        examiner.examine(f"seed {seed}", lambda: served(llm, folder), ("LoRA adapter 'hostile' cannot be loaded: ",))
    assert not examiner.wrong, "\n".join(examiner.wrong)
    assert min(examiner.served, examiner.refused) > 0, (examiner.served, examiner.refused)


def test_made_for_something_else(llm: fwk.LLM, folders: Path, tmp_path: Path) -> None:
    wider = make_base(tmp_path / "wider", hidden_size=96)
    deeper = make_base(tmp_path / "deeper", num_hidden_layers=3)
    cases = [
        (wider, {}, "made for another model: its .*q_proj goes from 96 to 96 features, this model's from 64 to 64"),
        (deeper, {}, r"it changes model.layers.2.self_attn.[qv]_proj, .*which this model does not have"),
        (folders / "base", {"r": 9}, "its rank is 9, more than --max-lora-rank 8"),
    ]
    for i, (base, settings, message) in enumerate(cases):
        folder = make_adapter(base, tmp_path / f"adapter{i}", **settings)
        with pytest.raises(InvalidRequest, match=message):
            llm.load_adapter("bad", str(folder))
    llm.load_adapter("good", str(folders / "narrow"))
    assert llm.generate([[5, 6]], SamplingParams(max_tokens=2), adapter="good")
    llm.unload_adapter("good")


def test_patterns_match_as_regular_expressions_do() -> None:
    names = ["model.layers.0.mlp.up_proj", "model.layers.11.mlp.up_proj", "up_proj", "xup_proj", "a.b", "aab", "a_b"]
    patterns = [
        "up_proj", "mlp.up_proj", r"layers\.1\.mlp\.(up|down)_proj", r"layers\.\d\d\.mlp\.(up|down)_proj",
        r"^up_proj", r"^(model|x)\.layers.(0|1|11).(mlp.(up|gate)_proj|x)", "(a|aa)(b|)",
        r"a\wb", r"a.b", "|a", "(|x)up_proj",
    ]  # fmt: skip
    for pattern in patterns:
        for name in names:
            assert matches(pattern, name) == bool(re.fullmatch(rf"(.*\.)?({pattern})", name)), (pattern, name)


def test_patterns_times_modules_are_bounded(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = shutil.copytree(folders / "narrow", tmp_path / "bad")
    config(alpha_pattern={"x" * 100: 1})(folder)
    assert peft.read(folder) is not None
    monkeypatch.setattr(peft, "MAX_MATCHING", 399)
    with pytest.raises(ModelLoadError, match="alpha_pattern has too many patterns for 4 modules"):
        peft.read(folder)


@pytest.mark.parametrize(
    "pattern", ["(a", "a)", "a\\", r"\b", "", "a" * 1025, "(" * 20 + ")" * 20, "a{2}", "[ab]", "a?"]
)
def test_patterns_that_are_not_read(pattern: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        matches(pattern, "a")


def test_a_pattern_takes_no_time_whoever_wrote_it() -> None:
    started = time.monotonic()
    assert not matches("(a|a|a)" * 140, "a" * 140 + "b")
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("name", ["", "a b", "a:b", "../a", "a\n", "a\0", "x" * 129])
def test_names(llm: fwk.LLM, folders: Path, name: str) -> None:
    with pytest.raises(InvalidRequest, match="lora_name must be"):
        llm.load_adapter(name, str(folders / "narrow"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lora_paths": ["a=/x"]},
            "--lora-paths belongs to features.lora, which is off: turn it on with",
        ),
        ({"max_lora_rank": 8}, "--max-lora-rank belongs to features.lora, which is off: turn it on with --enable-lora"),
        ({"lora_dirs": ["/tmp"]}, "--lora-dirs belongs to lora_sources.local, which is not used: add --enable-lora"),
        ({"enable_lora": True, "lora_paths": ["justapath"]}, "'justapath' is not NAME=FOLDER"),
        ({"enable_lora": True, "lora_paths": ["a=/x", "a=/y"]}, "the name 'a' is given twice"),
        ({"enable_lora": True, "lora_paths": ["a=/x", "b=/y"], "max_loaded_loras": 1}, "--max-loaded-loras is 1"),
        (
            {"enable_lora": True, "lora_paths": ["a=/nowhere"]},
            "--lora-paths a=/nowhere: .*is missing",
        ),
        ({"enable_lora": True, "lora_dirs": ["/nowhere"]}, "--lora-dirs: /nowhere is not a folder"),
        ({"enable_lora": True, "lora_backend": "nosuch"}, "unknown LoRA backend 'nosuch'"),
    ],
)
def test_options(folders: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        fwk.LLM(str(folders / "base"), max_total_tokens=256, **options)


@pytest.fixture
def told(folders: Path, tmp_path: Path) -> Path:
    """A folder to load from, alongside one that is not."""
    shutil.copytree(folders / "narrow", tmp_path / "told/mine")
    shutil.copytree(folders / "narrow", tmp_path / "told/threads/other")
    shutil.copytree(folders / "narrow", tmp_path / "secret")
    (tmp_path / "told/link").symlink_to(tmp_path / "secret")
    (tmp_path / "told/inner").symlink_to(tmp_path / "told/mine")
    (tmp_path / "told/circle").symlink_to(tmp_path / "told/circle")
    (tmp_path / "told/files").mkdir()
    for name in (CONFIG, WEIGHTS):
        (tmp_path / "told/files" / name).symlink_to(tmp_path / "secret" / name)
    return tmp_path / "told"


def test_folders_that_were_told_of(told: Path) -> None:
    source = LocalAdapters(LoRASourceContext(LocalAdapterOptions(lora_dirs=(str(told),))))
    assert source.is_open
    assert source.find("mine") == source.find(str(told / "mine")) == source.find("inner") == told / "mine"
    assert source.find("threads/other") == told / "threads/other"
    outside = [
        "", ".", "nothing", "link", "files", "circle", "../secret", "mine/../../secret", "mine/../mine", "/etc", "/",
        str(told), str(told.parent / "secret"), f"{told}/../secret", "mine\0", "x" * 5000, f"{told}-more",
    ]  # fmt: skip
    for name in outside:
        assert source.find(name) is None, name
    closed = LocalAdapters(LoRASourceContext(LocalAdapterOptions()))
    assert not closed.is_open
    assert closed.find(str(told / "mine")) is None
