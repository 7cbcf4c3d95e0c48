"""Every field of PEFT's configuration is read, refused when it says something, or harmless."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields

import pytest

from fwk.errors import ModelLoadError
from fwk_lora._common.peft import _config

READ = {"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "peft_type", "init_lora_weights", "bias"}
SHOWN_BY_THE_TENSORS = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
OF_TRAINING = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "fan_in_fan_out",
    "inference_mode", "loftq_config", "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core",
    "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
}  # fmt: skip


def test_fields() -> None:
    from peft import LoraConfig

    for item in fields(LoraConfig):
        default = item.default if item.default is not MISSING else None
        said = {"peft_type": "LORA", "init_lora_weights": True, item.name: "something"}
        if item.name in SHOWN_BY_THE_TENSORS | OF_TRAINING | READ - {"peft_type", "init_lora_weights", "bias"}:
            _config(json.dumps(said).encode())
            continue
        with pytest.raises(ModelLoadError, match=item.name if item.name != "peft_type" else "of type 'something'"):
            _config(json.dumps(said).encode())
        if item.name not in READ:
            _config(json.dumps({**said, item.name: default}).encode())
