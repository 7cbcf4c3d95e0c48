"""Every key that llama.cpp's converter may write is read, harmless, or refused where it says something."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import pytest

from fwk.errors import ModelLoadError
from fwk_loaders.gguf.architectures import ARCHITECTURES
from fwk_loaders.gguf.config import read_config
from fwk_loaders.gguf.keys import HARMLESS, OF_ONE, ONLY, SAME, TOKENIZER, check_keys
from fwk_loaders.gguf.metadata import Metadata

BASE = {
    "block_count": 8, "embedding_length": 64, "feed_forward_length": 96, "context_length": 256,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_epsilon": 1e-5,
}  # fmt: skip
NEEDED = {"ssm.inner_size": 128, "ssm.time_step_rank": 8, "ssm.group_count": 2, "expert_used_count": 2}
"""Of keys that some architectures ask for; of all others 4."""
VALUES: tuple[Any, ...] = (7, 0.37, True)


def said(name: str) -> list[str]:
    """Full names of the keys in the gguf package's list that are an architecture's."""
    groups = [group for group in vars(gguf.Keys).values() if isinstance(group, type)]
    keys = [value for group in groups for value in vars(group).values() if isinstance(value, str)]
    return [key.replace("{arch}", name) for key in keys if key.startswith("{arch}.") and "{dense}" not in key]


def read(metadata: dict[str, Any], asked: set[str] | None = None) -> dict[str, Any]:
    """The config. asked: gets the names of the keys that were read."""
    tensor = SimpleNamespace(shape=(320, 64), type=SimpleNamespace(name="F32"))
    names = ("token_embd.weight", "blk.0.ffn_up.weight")
    file = SimpleNamespace(path=Path("a.gguf"), metadata=metadata, tensors=dict.fromkeys(names, tensor))
    found = Metadata(file)  # type: ignore[arg-type]
    config = read_config(found)
    check_keys(found, config)
    (set[str]() if asked is None else asked).update(found.read)
    return config


def base_of(name: str) -> dict[str, Any]:
    """The least that a file of the architecture says."""
    metadata: dict[str, Any] = {"general.architecture": name, **{f"{name}.{key}": value for key, value in BASE.items()}}
    if ARCHITECTURES[name].has_experts:
        metadata[f"{name}.expert_count"] = 8
    for _ in range(20):
        try:
            read(metadata)
        except ModelLoadError as error:
            missing = re.search(rf"({name}\.\S+) is missing", str(error))
            if missing is None:
                raise
            metadata[missing[1]] = NEEDED.get(missing[1].removeprefix(f"{name}."), 4)
        else:
            return metadata
    raise AssertionError(name)


def test_keys_of_every_architecture() -> None:
    for name in ARCHITECTURES:
        base = base_of(name)
        allowed = {**ONLY, **OF_ONE.get(name, {})}
        for full in sorted({*said(name), f"{name}.unheard_of"} - set(base)):
            key = full.removeprefix(name)
            for value in VALUES:
                asked: set[str] = set()
                try:
                    read({**base, full: value}, asked)
                except ModelLoadError:
                    continue
                is_known = key in HARMLESS or value in allowed.get(key, ()) or key in (".expert_weights_norm", *SAME)
                assert full in asked or is_known, f"{full} = {value!r} is read by nothing"


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("llama", "llama.unheard_of", 1),
        ("llama", "llama.final_logit_softcapping", 30.0),
        ("qwen3", "qwen3.attention.sliding_window", 7),
        ("qwen3moe", "qwen3moe.expert_weights_norm", False),
        ("llama", "llama.rope.freq_base_swa", 5.0),
        ("llama", "tokenizer.ggml.unheard_of", 1),
        ("llama", "tokenizer.ggml.add_sep_token", True),
        ("llama", "diffusion.shift_logits", True),
    ],
)
def test_what_is_not_read_is_refused_by_its_name(name: str, key: str, value: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"a.gguf: {key} is {value!r}: nothing here reads it"):
        read({**base_of(name), key: value})


def test_what_changes_nothing_is_no_hindrance() -> None:
    tokens = [key.removeprefix("tokenizer.ggml.") for key in vars(gguf.Keys.Tokenizer).values() if isinstance(key, str)]
    assert {key for key in tokens if "." not in key} <= TOKENIZER | {"add_sep_token"}
    more = {
        "llama.rope.freq_base_swa": 10_000.0, "llama.rope.freq_base": 10_000.0, "llama.attention.causal": True,
        "llama.vocab_size": 320, "llama.vision.block_count": 3, "tokenizer.ggml.add_sep_token": False,
        "general.name": "x", "quantize.imatrix.file": "y", "acme.note": "z", "llama.expert_weights_scale": 1.0,
    }  # fmt: skip
    assert read({**base_of("llama"), **more}) == read(base_of("llama"))


def test_a_window_makes_llama_mistral() -> None:
    found = read({**base_of("llama"), "llama.attention.sliding_window": 9})
    assert (found["architectures"], found["sliding_window"]) == (["MistralForCausalLM"], 9)
