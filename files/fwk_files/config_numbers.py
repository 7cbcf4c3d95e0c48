"""What numbers of a config.json may be: finite, and in the ranges of this one table.

A file that came with a model is not trusted, and JSON as Python reads it has NaN. What is wrong here would load, and
make NaN of every token, or fail in the middle of the first request.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, cast

from fwk_errors import ModelLoadError

MAX_NUMBER = 1e38
"""Larger ones fit into no tensor; ``model_max_length`` is 1e30 in many files."""

_EPS = (0.0, 1.0)
_BASE = (1.0, 1e15)
_FACTOR = (0.0, 1e6)
_DIVISOR = (1e-6, 1e6)
_SHARE = (0.0, 1.0)
_SCALE = (-1e9, 1e9)
_CAP = (0.0, 1e9)
_COUNT = (0, 2**31 - 1)
_STEP = (1, 2**31 - 1)
_TIMES = (0.01, 1e4)
RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(
        (
            "rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_eps", "norm_epsilon",
            "mixer_rms_eps", "block_norm_eps",
        ),
        _EPS,
    ),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq", "rotary_emb_base", "rope_ratio"), _BASE),
    **dict.fromkeys(
        (
            "factor", "low_freq_factor", "high_freq_factor", "attention_factor", "beta_fast", "beta_slow", "mscale",
            "mscale_all_dim", "floor_scale",
        ),
        _FACTOR,
    ),
    **dict.fromkeys(("short_factor", "long_factor"), _DIVISOR),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), _SHARE),
    **dict.fromkeys(
        (
            "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
            "attn_scale", "scale_emb", "scale_depth", "routed_scaling_factor", "ssm_multiplier",
        ),
        _SCALE,
    ),
    **dict.fromkeys(
        ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "clip_qkv"), _CAP
    ),
    **dict.fromkeys(
        (
            "sliding_window", "max_window_layers", "original_max_position_embeddings", "attention_chunk_size",
            "num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok", "topk_group", "n_group",
        ),
        _COUNT,
    ),
    **dict.fromkeys(("decoder_sparse_step", "no_rope_layer_interval", "chunk_size", "mamba_chunk_size"), _STEP),
    **dict.fromkeys(("expand", "mamba_expand"), _TIMES),
}  # fmt: skip
"""By name, at any depth, the least and the most; of a list, for each of its numbers."""

MAX_NAME, MAX_IDS = 256, 1024
"""Characters of an architecture's name; tokens that end a text."""

LISTS = frozenset({"short_factor", "long_factor"})
"""Of those, the ones of which there is a number for each angle."""

INFINITE = frozenset({"time_step_limit"})
"""Of which Mamba-2's files write that there is no limit."""


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Check what every reader of a config.json relies on. ``where`` names the file.

    Raises ``ModelLoadError`` naming the first field of another type, and the first number that cannot be meant.
    """
    names = config.get("architectures")
    if names is not None and not all(isinstance(name, str) and len(name) <= MAX_NAME for name in _items(names)):
        raise ModelLoadError(f"{where}: 'architectures' must be a list of names, not {names!r:.80}")
    for name in ("dtype", "torch_dtype", "model_type"):
        if not isinstance(config.get(name), str | None):
            raise ModelLoadError(f"{where}: {name!r} must be a name, not {config[name]!r:.80}")
    if not isinstance(config.get("quantization_config"), Mapping | None):
        raise ModelLoadError(f"{where}: 'quantization_config' must be an object")
    check_token_ids(config, where)
    for name, value in _values(config):
        if name in INFINITE:
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            _check_number(name, value, where)
        elif name in RANGES and value is not None and value is not False:
            raise ModelLoadError(f"{where}: {name!r} must be a number, not {value!r:.80}")


def check_token_ids(config: Mapping[str, Any], where: str) -> None:
    """``eos_token_id`` is a number or a list of some. Raises ``ModelLoadError``."""
    given = config.get("eos_token_id")
    ids = [given] if isinstance(given, int) else [] if given is None else _items(given)
    if len(ids) > MAX_IDS or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
        raise ModelLoadError(f"{where}: 'eos_token_id' must be the id of a token or a list of ids, not {given!r:.80}")


def _check_number(name: str, value: int | float, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ModelLoadError(f"{where}: {name!r} must be a finite number, not {value}")
    low, high = RANGES.get(name, (-MAX_NUMBER, MAX_NUMBER))
    if not low <= value <= high or (high == _COUNT[1] and value != int(value)):
        kind = "a whole number" if high == _COUNT[1] else "a number"
        raise ModelLoadError(f"{where}: {name!r} must be {kind} from {low:g} to {high:g}, not {value!s:.40}")


def _items(value: object) -> list[Any]:
    """Those of a list; something that is none holds one that nothing accepts."""
    return cast("list[Any]", value) if isinstance(value, list) else [None]


def _values(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every value within, by the name of its field; an object or a list itself only where a number is wanted."""
    found: list[tuple[str, Any]] = [("", config)]
    while found:
        name, value = found.pop()
        if isinstance(value, Mapping) and name not in RANGES:
            found.extend((str(key), item) for key, item in cast("Mapping[Any, Any]", value).items())
        elif isinstance(value, list | tuple) and (name not in RANGES or name in LISTS):
            found.extend((name, item) for item in cast("list[Any]", value))
        else:
            yield name, value
