"""What sampling fields are that a request leaves out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fwk.config import ModelOptions
from fwk.errors import ConfigError
from fwk.setup.sampling_defaults import sampling_defaults

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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "must be a JSON object"),
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
