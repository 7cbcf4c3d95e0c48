"""Sampling fields for requests that leave them out."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from fwk.config import ModelOptions
from fwk.errors import ConfigError, InvalidRequest
from fwk.types import SamplingParams
from fwk_peers.generation_config import FIELDS, recommended

FOLLOWED = "followed_generation_fields"

_PREFERRED = (*FIELDS, "presence_penalty", "frequency_penalty", "min_tokens", "max_tokens")


def sampling_defaults(
    options: ModelOptions, generation: Mapping[str, Any], vocab_size: int, followed: Collection[str] = ()
) -> dict[str, Any]:
    """By field. ``generation``: the checkpoint's generation_config. Raises ``ConfigError`` for wrong values.

    followed: its fields that whoever asks such a model follows by themselves (``FOLLOWED`` of a config).
    """
    found: dict[str, Any] = {}
    if options.sampling_defaults == "model":
        found = recommended({name: value for name, value in generation.items() if name not in followed})
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
    fields: dict[str, Any] = json.loads(text)
    if "max_new_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_new_tokens")
    unknown = next((name for name in fields if name not in _PREFERRED), None)
    if unknown is not None:
        raise ConfigError(f"--preferred-sampling-params: unknown field {unknown!r}; there are {', '.join(_PREFERRED)}")
    return fields
