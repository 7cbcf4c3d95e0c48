"""Adapters as PEFT saves them: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.lora import AdapterWeights, LoRAMatrices
from fwk_files.regular import open_regular
from fwk_lora._common.module_pattern import matches

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
MAX_WEIGHT_BYTES = 16 * 2**30
MAX_HEADER_BYTES = 16 * 2**20
MAX_MEMBERS = 2**19
"""Commas in the header of the weights, which takes ten times its size once it is read; a tensor has six."""
DEFAULT = 8
"""PEFT's ``r`` and ``lora_alpha`` where a file says nothing."""
MAX_MATCHING = 2**24
"""Characters of a setting's patterns, times modules: each is matched with each."""

_IGNORED = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern",
    "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_config",
    "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision",
    "runtime_config", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
"""Fields that are read below, that matter in training or merging only, or that the tensors themselves show."""

_NAMES = {"use_dora": "DoRA", "modules_to_save": "whole modules alongside the adapter", "bias": "trained biases"}
_KEEPS_BASE = (True, False, None, "gaussian", "eva", "orthogonal")
"""Ways to start training that leave the base model's weights alone."""

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def read(folder: Path) -> AdapterWeights | None:
    """The adapter in ``folder``, or None when there is no ``adapter_config.json``. Raises ``ModelLoadError``."""
    if not (folder / CONFIG).is_file():
        return None
    if not (folder / WEIGHTS).is_file():
        found = " (adapter_model.bin is not read: it can hold code)" if (folder / "adapter_model.bin").exists() else ""
        raise ModelLoadError(f"{WEIGHTS} is missing{found}")
    text, data = _bytes(folder / CONFIG, MAX_CONFIG_BYTES), _bytes(folder / WEIGHTS, _max_weight_bytes())
    config = _config(text)
    size = int.from_bytes(data[:8], "little")
    if size > MAX_HEADER_BYTES or data.count(b",", 8, 8 + size) > MAX_MEMBERS:
        raise ModelLoadError(f"{WEIGHTS} is damaged: its header is larger than that of any adapter")
    try:
        tensors = load_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{WEIGHTS} is damaged: {error}") from None
    digest = hashlib.blake2b(len(text).to_bytes(8, "big"), digest_size=16)
    digest.update(text)
    digest.update(data)
    return AdapterWeights(digest.hexdigest(), _modules(config, tensors))


def _max_weight_bytes() -> int:
    """Half of the memory that is free, at most: reading a file and unpacking it takes twice its size."""
    free = next((line for line in _memory_lines() if line.startswith("MemAvailable:")), None)
    return MAX_WEIGHT_BYTES if free is None else min(MAX_WEIGHT_BYTES, int(free.split()[1]) * 1024 // 2)


def _memory_lines() -> list[str]:
    """What the system tells about its memory; nothing where it is not Linux."""
    try:
        return Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []


def _bytes(path: Path, limit: int) -> bytes:
    """A file's content, if the size it declares is within ``limit``; nothing is read of one that is larger."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(limit + 1) if size <= limit else b""
    except OSError as error:
        raise ModelLoadError(f"{path.name} cannot be read: {error.strerror}") from None
    if max(size, len(data)) > limit:
        raise ModelLoadError(f"{path.name} has {max(size, len(data))} bytes, more than the {limit} that may be read")
    return data


def _config(text: bytes) -> Mapping[str, Any]:
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{CONFIG} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelLoadError(f"{CONFIG} does not hold an object")
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelLoadError(f"{CONFIG}: the adapter is of type {_shown(kind)}; only LORA is computed here")
    start = config.get("init_lora_weights")
    if not any(start is known or (isinstance(known, str) and start == known) for known in _KEEPS_BASE):
        raise ModelLoadError(
            f"{CONFIG}: init_lora_weights {_shown(start)} changes the base model's weights; convert the adapter to "
            "plain LoRA when saving it (path_initial_model_for_weight_conversion)"
        )
    for name, value in config.items():
        if name in _IGNORED or not value or (name == "bias" and value == "none"):
            continue
        raise ModelLoadError(
            f"{CONFIG}: {_shown(name)} is {_shown(value)}; adapters with {_NAMES.get(name, 'it')} are not supported"
        )
    return config


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _modules(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, LoRAMatrices]:
    pairs: dict[str, dict[str, Tensor]] = {}
    for name, tensor in sorted(tensors.items()):  # the reader's own order differs from run to run
        found = _KEY.fullmatch(name)
        if found is None:
            raise ModelLoadError(f"{WEIGHTS}: tensor {_shown(name)} is not part of a linear layer's LoRA")
        if tensor.ndim != 2 or 0 in tensor.shape or not tensor.is_floating_point():
            raise ModelLoadError(f"{WEIGHTS}: {name} is {tensor.dtype} {tuple(tensor.shape)}, not a matrix of floats")
        if not torch.isfinite(tensor).all():
            raise ModelLoadError(f"{WEIGHTS}: {name} holds numbers that are not finite")
        pairs.setdefault(found[1], {})[found[2]] = tensor
    if not pairs:
        raise ModelLoadError(f"{WEIGHTS} holds no tensor")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = config.get(name) or {}
        if not isinstance(patterns, dict):
            raise ModelLoadError(f"{CONFIG}: {name} must be an object")
        if len(pairs) * sum(map(len, patterns)) > MAX_MATCHING:
            raise ModelLoadError(f"{CONFIG}: {name} has too many patterns for {len(pairs)} modules")
    return {prefix: _matrices(config, prefix, pair) for prefix, pair in pairs.items()}


def _matrices(config: Mapping[str, Any], prefix: str, pair: Mapping[str, Tensor]) -> LoRAMatrices:
    if len(pair) != 2:
        raise ModelLoadError(f"{WEIGHTS}: {prefix} has lora_{next(iter(pair))}, but not the other one")
    a, b = pair["A"], pair["B"]
    rank = _setting(config, "r", "rank_pattern", prefix)
    if not a.shape[0] == b.shape[1] == rank:
        raise ModelLoadError(
            f"{WEIGHTS}: {prefix} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, but {CONFIG} says rank "
            f"{rank:g}"
        )
    alpha = _setting(config, "lora_alpha", "alpha_pattern", prefix)
    return LoRAMatrices(a, b, alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank)


def _setting(config: Mapping[str, Any], name: str, pattern_name: str, prefix: str) -> float:
    """A number of the configuration, or what the first pattern that matches the module says instead."""
    value = config.get(name, DEFAULT)
    for pattern, number in (config.get(pattern_name) or {}).items():
        try:
            is_match = matches(pattern, prefix)
        except ValueError as error:
            raise ModelLoadError(f"{CONFIG}: {pattern_name}: {_shown(pattern)} cannot be used: {error}") from None
        if is_match:
            name, value = pattern_name, number
            break
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 2**31:
        raise ModelLoadError(f"{CONFIG}: {name} must be a positive number, not {_shown(value)}")
    return float(value)
