"""What fields of generation_config.json, transformers' name for recommendations of a model's makers, mean here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fwk_errors import ConfigError

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


def recommended(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of sampling, by their names here. Raises ``ConfigError`` for a recommendation that cannot be followed."""
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
