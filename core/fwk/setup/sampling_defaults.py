"""Sampling fields for requests that leave them out."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from fwk.config import ModelOptions
from fwk.errors import ConfigError, InvalidRequest
from fwk.types import SamplingParams

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Those of generation_config.json that mean the same here."""

_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],), "begin_suppress_tokens": ([],), "constraints": (), "diversity_penalty": (0,),
    "dola_layers": (), "encoder_no_repeat_ngram_size": (0,), "encoder_repetition_penalty": (1,),
    "epsilon_cutoff": (0,), "eta_cutoff": (0,), "exponential_decay_length_penalty": (), "force_words_ids": (),
    "guidance_scale": (0, 1), "max_time": (), "min_length": (0,), "mirostat": (0,), "no_repeat_ngram_size": (0,),
    "num_beam_groups": (0, 1), "num_beams": (1,), "num_return_sequences": (1,), "penalty_alpha": (0,),
    "penalty_last_n": (-1, 0, 64), "renormalize_logits": (False,), "sequence": ("",), "sequence_bias": (),
    "stop_strings": ([],), "suppress_tokens": ([],), "token_healing": (False,), "top_h": (), "typical_p": (1,),
    "watermarking_config": (), "xtc_probability": (0,),
}  # fmt: skip
"""Fields that would choose other tokens and that no default here stands for, and the values at which they do nothing.

What is left of transformers' fields and GGUF's keys says how to compute or what to return, or bounds a length that a
request bounds itself.
"""

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
        found = _recommended({name: value for name, value in generation.items() if name not in followed})
    found |= preferred_sampling(options.preferred_sampling_params)
    try:
        msgspec.convert(found, SamplingParams).check(vocab_size)
    except (msgspec.ValidationError, InvalidRequest) as error:
        raise ConfigError(
            f"sampling defaults: {error} (--preferred-sampling-params, or the model's generation_config.json, which "
            "--sampling-defaults openai leaves out)"
        ) from None
    return found


def _recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """By the names of fields here. Raises ``ConfigError`` for a recommendation that cannot be followed."""
    said = {name: value for name, value in generation.items() if value is not None}
    for name, values in NEUTRAL.items():
        if name in said and said[name] not in values:
            raise ConfigError(
                f"sampling defaults: the model's makers recommend {name} {str(said[name])[:60]}, which no default here "
                "stands for; --sampling-defaults openai leaves their recommendations out"
            )
    found = {name: said[name] for name in FIELDS if name in said}
    found |= {ours: said[theirs] for theirs, ours in _RENAMED.items() if theirs in said}
    return found | ({"temperature": 0.0} if said.get("do_sample") is False else {})


def preferred_sampling(text: str) -> dict[str, Any]:
    """By field, those of ``--preferred-sampling-params``."""
    fields: dict[str, Any] = json.loads(text)
    if "max_new_tokens" in fields:
        fields["max_tokens"] = fields.pop("max_new_tokens")
    unknown = next((name for name in fields if name not in _PREFERRED), None)
    if unknown is not None:
        raise ConfigError(f"--preferred-sampling-params: unknown field {unknown!r}; there are {', '.join(_PREFERRED)}")
    return fields
