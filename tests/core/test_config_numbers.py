"""A config.json whose numbers cannot be meant is refused before anything is built of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk.errors import ModelLoadError
from fwk.types import ModelConfig
from fwk_files.config_numbers import MAX_NUMBER, RANGES, check_config
from fwk_kit.testing.serving import TINY

NAN, INFINITY = float("nan"), float("inf")
WRONG: list[tuple[dict[str, Any], str]] = [
    *(({name: value}, name) for name in RANGES for value in (NAN, INFINITY, -1e12, 10**400, "1", True, {}, ["x"])),
    *(({"text_config": {"vision": [{name: NAN}]}}, name) for name in ("rms_norm_eps", "anything")),
    *(({"rope_scaling": {"rope_type": "yarn", "factor": value}}, "factor") for value in (NAN, -1, "x", [1])),
    *(
        ({name: bad}, name)
        for name in ("decoder_sparse_step", "chunk_size", "expand", "mamba_expand")
        for bad in (0, -1)
    ),
    ({"rope_theta": 0}, "rope_theta"),
    ({"sliding_window": -1}, "sliding_window"),
    ({"sliding_window": 1.5}, "sliding_window"),
    ({"partial_rotary_factor": 2}, "partial_rotary_factor"),
    ({"anything": 10**60}, "anything"),
    *(({"architectures": value}, "architectures") for value in ("LlamaForCausalLM", [1], {"a": 1}, 5)),
    *(({"eos_token_id": value}, "eos_token_id") for value in ("x", [1, "x"], 1.5, {}, True, [[1]])),
    ({"architectures": ["x" * 10**6]}, "architectures"),
    ({"eos_token_id": list(range(10**5))}, "eos_token_id"),
    ({"quantization_config": [1]}, "quantization_config"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [0]}}, "long_factor"),
    ({"dtype": 5}, "dtype"),
    ({"num_key_value_heads": 2 * TINY["num_attention_heads"]}, "num_key_value_heads"),
    ({"num_hidden_layers": 60_000}, "num_hidden_layers"),
]
RIGHT: list[dict[str, Any]] = [
    {"rms_norm_eps": 1e-12, "rope_theta": 5e8, "sliding_window": None, "max_window_layers": 28},
    {"sliding_window": False, "time_step_limit": [0.0, INFINITY], "model_max_length": int(1e30)},
    {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0, 1], "long_factor": [64.5, 2]}},
    {"eos_token_id": [1, 2], "architectures": None, "logit_scale": 0.0625, "original_max_position_embeddings": 4096.0},
    {"sliding_window_pattern": "LLLG", "image_size": [224, 224], "bias": -MAX_NUMBER},
]


def test_each_is_refused_by_its_name() -> None:
    wrong: list[str] = []
    for bad, name in WRONG:
        try:
            ModelConfig.from_dict({**TINY, **bad}, "folder")
        except ModelLoadError as error:
            if name not in str(error) or "\n" in str(error) or len(str(error)) > 250:
                wrong.append(f"{str(bad)[:80]}: {error}")
        else:
            wrong.append(f"{str(bad)[:80]}: accepted")
    assert not wrong, "\n".join(wrong)


def test_what_real_files_hold_passes() -> None:
    for config in RIGHT:
        check_config(config, "folder")


@pytest.mark.parametrize("bad", [{"rms_norm_eps": NAN}, {"architectures": 5}, {"rope_theta": [1]}])
def test_a_model_with_one_is_not_loaded(tmp_path: Path, bad: dict[str, Any]) -> None:
    """Before the plugin of its architecture reads the file."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | bad))
    with pytest.raises(ModelLoadError, match=next(iter(bad))):
        fwk.LLM(str(tmp_path), load_format="dummy", max_total_tokens=64)


def test_ids_that_end_a_text_are_ids_in_every_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, "x"]}))
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: 'eos_token_id' must be the id of a token"):
        fwk.LLM(str(tmp_path), load_format="dummy", max_total_tokens=64)
