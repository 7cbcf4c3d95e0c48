"""Without a feature's entry point its request fields are refused, and the others are served."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import InvalidRequest
from fwk.plugins import discover
from fwk_kit.testing.serving import TINY

FIELDS: dict[str, tuple[str, Any, str, Any]] = {
    "hidden_states": ("return_hidden_states", True, "hidden_states", []),
    "prompt_logprobs": ("prompt_logprobs", 1, "prompt_logprobs", None),
}
"""By feature: a request's field and what asks by it, the reply's field and what is there without."""


@pytest.mark.parametrize("feature", FIELDS)
def test_requests_that_ask_are_refused(feature: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    field, value, told, nothing = FIELDS[feature]
    points: list[Any] = [point for point in entry_points(group="fwk") if point.name != f"features.{feature}"]
    plugins = discover(points=[point for point in points if point.dist.name == "fwk"])
    with fwk.LLM(str(tmp_path), plugins=plugins, load_format="dummy", max_total_tokens=512) as llm:
        with pytest.raises(InvalidRequest, match=f"{field} needs a feature that is not installed"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, **{field: value}))
        assert getattr(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0], told) == nothing
