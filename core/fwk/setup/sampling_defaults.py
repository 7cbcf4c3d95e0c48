"""Sampling fields for requests that leave them out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from fwk.config import ModelOptions
from fwk.errors import ConfigError, InvalidRequest
from fwk.types import SamplingParams

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Those of generation_config.json that mean the same here."""

_PREFERRED = (*FIELDS, "presence_penalty", "frequency_penalty", "min_tokens", "max_tokens")


def sampling_defaults(options: ModelOptions, generation: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    """By field. ``generation``: the checkpoint's generation_config. Raises ``ConfigError`` for wrong values."""
    found: dict[str, Any] = {}
    if options.sampling_defaults == "model":
        found = {name: generation[name] for name in FIELDS if generation.get(name) is not None}
    found |= preferred_sampling(options.preferred_sampling_params)
    try:
        msgspec.convert(found, SamplingParams).check(vocab_size)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(
            f"sampling defaults: {error} (--preferred-sampling-params, or the model's generation_config.json, which "
            "--sampling-defaults openai leaves out)"
        ) from None
    return found


def preferred_sampling(text: str) -> dict[str, Any]:
    """By field, those of ``--preferred-sampling-params``."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--preferred-sampling-params is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError("--preferred-sampling-params must be a JSON object")
    fields = cast(dict[str, Any], value)
    if "max_new_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_new_tokens")
    unknown = next((name for name in fields if name not in _PREFERRED), None)
    if unknown is not None:
        raise ConfigError(f"--preferred-sampling-params: unknown field {unknown!r}; there are {', '.join(_PREFERRED)}")
    return fields
