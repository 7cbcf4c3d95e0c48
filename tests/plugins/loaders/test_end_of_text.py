"""Which tokens end an answer: what config.json, generation_config.json and the tokenizer's files say, together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, models

from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.setup.checkpoint import open_model
from fwk_kit.testing.serving import TINY
from fwk_loaders._common.folder import ModelFolder

END = "<|im_end|>"
SILENT = {key: value for key, value in TINY.items() if key != "eos_token_id"}


@pytest.mark.gate(7)
@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"config": {**TINY, "eos_token_id": 3}, "tokenizer_config": {"eos_token": END}}, (3, 7)),
        ({"config": {**TINY, "eos_token_id": [3, 7]}, "tokenizer_config": {"eos_token": {"content": END}}}, (3, 7)),
        ({"config": TINY, "tokenizer_config": {"eos_token": "b"}}, (1,)),
        ({"config": TINY, "tokenizer_config": {"eos_token": None}}, ()),
        ({"config": TINY, "tokenizer_config": {"eos_token": "nowhere"}}, ()),
        ({"config": TINY, "tokenizer_config": {}, "special_tokens_map": {"eos_token": {"content": END}}}, (7,)),
        ({"config": TINY, "special_tokens_map": {"eos_token": END}, "generation_config": {"eos_token_id": 5}}, (5, 7)),
        (
            {
                "config": TINY,
                "tokenizer_config": {"eos_token": END, "added_tokens_decoder": {"9": {"content": END}}},
                "generation_config": {"eos_token_id": [5, 9]},
            },
            (5, 9),
        ),
        ({"config": SILENT}, (2,)),
        ({"config": SILENT, "generation_config": {"eos_token_id": 5}}, (5,)),
        ({"config": SILENT, "tokenizer_config": {"eos_token": END}}, (7,)),
        ({"config": {**SILENT, "architectures": ["Qwen2ForCausalLM"]}}, ()),
        ({"config": {**SILENT, "architectures": ["GlmForCausalLM"], "vocab_size": 151_552}}, (151329, 151336, 151338)),
        ({"config": {**TINY, "architectures": ["GlmForCausalLM"], "vocab_size": 151_330}}, (151329,)),
    ],
)
def test_tokens_that_end_an_answer(files: dict[str, dict[str, Any]], wanted: tuple[int, ...], tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    save_file({"model.norm.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate("abcdefg")}, merges=[]))
    tokenizer.add_special_tokens([AddedToken(END)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    plugins = discover()
    options = {"model": str(tmp_path), "load_format": "safetensors"}
    assert open_model(build_config(plugins, options), plugins, print).eos_token_ids == wanted


def test_fields_of_generation_that_only_config_json_has(tmp_path: Path) -> None:
    """As checkpoints had them before there was a generation_config.json: next to one, they say nothing."""
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "repetition_penalty": 1.3, "do_sample": False}))
    found = ModelFolder(tmp_path).generation_config()
    assert (found["repetition_penalty"], found["do_sample"]) == (1.3, False)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))
    assert ModelFolder(tmp_path).generation_config() == {"top_p": 0.5}
