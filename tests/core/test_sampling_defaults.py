"""What sampling fields are that a request leaves out."""

from __future__ import annotations

import json
from typing import Any

import gguf
import pytest

from fwk.config import ModelOptions
from fwk.errors import ConfigError
from fwk.setup.sampling_defaults import sampling_defaults
from fwk_peers.generation_config import FIELDS, NEUTRAL

SAMPLING = "general.sampling."
DECODER_STARTS = {"decoder_start_token_id", "forced_bos_token_id"}
HARMLESS = {
    "_from_model_config", "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "bos_token_id", "cache_config", "cache_implementation", "compile_config",
    "continuous_batching_config", "disable_compile", "early_stopping", "forced_eos_token_id", "is_assistant",
    "length_penalty", "low_memory", "max_cache_len", "max_length", "max_matching_ngram_size", "mirostat_eta",
    "mirostat_tau", "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id", "prefill_chunk_size",
    "prompt_lookup_num_tokens", "remove_invalid_values", "return_dict_in_generate", "speculation_type",
    "target_lookbehind", "transformers_version", "use_cache", "use_mtp", "xtc_threshold",
}  # fmt: skip
"""How to compute, what to return, or what only beams and settings that are refused read."""

GENERATION = {"temperature": 0.2, "top_p": 0.9, "eos_token_id": 2, "do_sample": True, "top_k": None}


def made(generation: dict[str, Any] = GENERATION, **options: Any) -> dict[str, Any]:
    return sampling_defaults(ModelOptions(**options), generation, 256)


def test_the_models_own_and_what_goes_before_them() -> None:
    assert made() == {"temperature": 0.2, "top_p": 0.9}
    assert made(sampling_defaults="openai") == {}
    preferred = json.dumps({"temperature": 0.5, "max_new_tokens": 7})
    assert made(preferred_sampling_params=preferred) == {"temperature": 0.5, "top_p": 0.9, "max_tokens": 7}
    assert made(preferred_sampling_params=preferred, sampling_defaults="openai") == {
        "temperature": 0.5,
        "max_tokens": 7,
    }


def test_every_field_of_a_generation_config_is_read_refused_or_harmless() -> None:
    """By transformers' list of them, and by the keys of GGUF files (``general.sampling``)."""
    from transformers import GenerationConfig

    keys = [value.split(".")[-1] for value in vars(gguf.Keys.General).values() if str(value).startswith(SAMPLING)]
    fields = {*GenerationConfig().to_dict(), *keys} - {"temp", "penalty_repeat"}
    read = {*FIELDS, "max_new_tokens", "min_new_tokens", "do_sample", "eos_token_id", *DECODER_STARTS}
    assert not fields - read - set(NEUTRAL) - HARMLESS
    for name, values in NEUTRAL.items():
        assert made({name: None}) == {}
        assert all(made({name: value}) == {} for value in values)
        with pytest.raises(ConfigError, match=f"recommend {name} \\[7\\].*--sampling-defaults openai leaves"):
            made({name: [7]})
        assert made({name: [7]}, sampling_defaults="openai") == {}
    assert made({"max_new_tokens": 9, "min_new_tokens": 2}) == {"max_tokens": 9, "min_tokens": 2}
    assert made({"do_sample": False, "temperature": 0.7}) == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ('{"temprature": 1}', "unknown field 'temprature'; there are temperature"),
        ('{"temperature": -1}', "temperature must be between 0 and 100, not -1"),
        ('{"top_p": "much"}', "top_p"),
    ],
)
def test_wrong_ones_are_refused_before_serving(given: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(preferred_sampling_params=given)


def test_wrong_ones_of_the_model_name_the_way_out() -> None:
    with pytest.raises(ConfigError, match="--sampling-defaults openai leaves out"):
        made({"temperature": "hot"})
    assert made({"temperature": "hot"}, sampling_defaults="openai") == {}
