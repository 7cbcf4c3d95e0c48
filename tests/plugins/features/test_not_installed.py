"""Without a feature's entry point its request fields are refused, and the others are served."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.checkpoints import make_checkpoint

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.errors import ConfigError, InvalidRequest
from fwk.interfaces.dialect import Frontend
from fwk.interfaces.multimodal import MediaItem
from fwk.plugins import PluginSet, discover
from fwk_kit.testing.serving import TINY

FIELDS: dict[str, tuple[str, Any, str, Any]] = {
    "hidden_states": ("return_hidden_states", True, "hidden_states", []),
    "prompt_logprobs": ("prompt_logprobs", 1, "prompt_logprobs", None),
}
"""By feature: a request's field and what asks by it, the reply's field and what is there without."""


def without(feature: str) -> PluginSet:
    """Our plugins but one."""
    points: list[Any] = [point for point in entry_points(group="fwk") if point.name != f"features.{feature}"]
    return discover(points=[point for point in points if point.dist.name == "fwk"])


def test_prompts_without_pooling(tmp_path: Path) -> None:
    """A model is not served to embed, its option is unknown, and one that generates has no such method."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("pooling"), "load_format": "dummy", "max_total_tokens": 512}
    with pytest.raises(ConfigError, match="--task embed: no feature that is installed and on makes anything of the"):
        fwk.LLM(str(tmp_path), task="embed", **options)
    with pytest.raises(ConfigError, match="unknown option --pooling-type"):
        fwk.LLM(str(tmp_path), pooling_type="mean", **options)
    with fwk.LLM(str(tmp_path), **options) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
        with pytest.raises(AttributeError, match="embed"):
            llm.embed([[1, 2, 3]])


def test_recurrent_models_without_options_of_states(tmp_path: Path) -> None:
    """Their options are unknown, and as many states are kept as ever."""
    make_checkpoint(tmp_path, "lfm2")
    options: dict[str, Any] = {"plugins": without("recurrent_states"), "max_total_tokens": 512}
    with pytest.raises(ConfigError, match="unknown option --max-mamba-cache-size"):
        fwk.LLM(str(tmp_path), max_mamba_cache_size=4, **options)
    with fwk.LLM(str(tmp_path), **options) as llm:
        found = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids
        kept = llm.engine.info.chosen["states"]
    with fwk.LLM(str(tmp_path), max_total_tokens=512) as llm:
        assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, temperature=0.0))[0].token_ids == found
        assert llm.engine.info.chosen["states"] == kept


def test_steps_without_options_of_their_planning(tmp_path: Path) -> None:
    """Its options are unknown, and steps are planned as ever, but that no gap between tokens is kept to."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("step_planning"), "load_format": "dummy", "max_total_tokens": 512}
    with pytest.raises(ConfigError, match="unknown option --schedule-conservativeness"):
        fwk.LLM(str(tmp_path), schedule_conservativeness=2.0, **options)
    with fwk.LLM(str(tmp_path), **options) as llm:
        without_it = llm.engine.scheduler.limits
    given = {"max_start_tokens": 3, "max_decode_gap": 0.0, "prefill_max_requests": 2, "enable_mixed_chunk": False}
    given |= {"schedule_conservativeness": 0.5, "num_continuous_decode_steps": 4}
    options.pop("plugins")
    with fwk.LLM(str(tmp_path), **options) as llm:
        assert replace(llm.engine.scheduler.limits, seed=without_it.seed, pace=None) == without_it
        assert llm.engine.scheduler.limits.pace is not None
    with fwk.LLM(str(tmp_path), **options, **given) as llm:
        told = llm.engine.scheduler.limits
    assert (told.max_start_tokens, told.max_decode_gap, told.max_prompts) == (3, None, 2)
    assert (told.is_mixed, told.conservativeness, told.admission_interval) == (False, 0.5, 4)


def test_decoders_without_what_verifies_their_drafts(tmp_path: Path) -> None:
    """They are refused with what to install; text that a grammar knows ahead is computed token by token."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 512}
    plugins = without("drafting")
    with pytest.raises(
        ConfigError, match="--speculative-algorithm ngram: no feature that is installed and on verifies"
    ):
        fwk.LLM(str(tmp_path), plugins=plugins, speculative_algorithm="ngram", **options)
    asked = SamplingParams(max_tokens=8, temperature=0.7, seed=3, ignore_eos=True)
    with fwk.LLM(str(tmp_path), plugins=plugins, **options) as llm:
        found = llm.generate([[1, 2, 3]], asked)[0].token_ids
        assert llm.engine.info.chosen["drafts"].startswith("none (no feature")
    with fwk.LLM(str(tmp_path), **options) as llm:
        assert llm.generate([[1, 2, 3]], asked)[0].token_ids == found
        assert "drafts" not in llm.engine.info.chosen


def test_grammars_without_what_masks_by_them(tmp_path: Path) -> None:
    """A backend that is named is refused, requests with a grammar are, and others are served."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("grammar_masks"), "load_format": "dummy", "max_total_tokens": 512}
    with pytest.raises(ConfigError, match="--grammar-backend llguidance: no feature that is installed and on masks by"):
        fwk.LLM(str(tmp_path), grammar_backend="llguidance", **options)
    with fwk.LLM(str(tmp_path), **options) as llm:
        assert llm.engine.info.chosen["grammar"] == "none"
        with pytest.raises(InvalidRequest, match=r"no grammar backend.* and the feature that masks by it"):
            llm.generate([[1, 2, 3]], SamplingParams(grammar=GrammarRequest("regex", "a+")))
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_caches_without_tiers(tmp_path: Path) -> None:
    """The option is unknown, a prefix cache that needs them is refused, and others serve."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("cache_tiers"), "load_format": "dummy", "max_total_tokens": 512}
    with pytest.raises(ConfigError, match="unknown option --cache-tiers"):
        fwk.LLM(str(tmp_path), cache_tiers=["file"], **options)
    with pytest.raises(ConfigError, match="--prefix-cache hierarchical keeps K/V in cache tiers, and no feature that"):
        fwk.LLM(str(tmp_path), prefix_cache="hierarchical", **options)
    with fwk.LLM(str(tmp_path), prefix_cache="radix", **options) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.parametrize(
    ("feature", "option"),
    [("piecewise_graphs", "enable_piecewise_cuda_graph"), ("around_captures", "enable_profile_cuda_graph")],
)
def test_graphs_without_options_of_features(feature: str, option: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    with pytest.raises(ConfigError, match=f"unknown option --{option.replace('_', '-')}"):
        fwk.LLM(str(tmp_path), plugins=without(feature), **{option: True})


def test_one_attention_backend_for_all_steps(tmp_path: Path) -> None:
    """The options that name two are unknown, and one serves."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("attention_pair"), "load_format": "dummy", "max_total_tokens": 512}
    with pytest.raises(ConfigError, match="unknown option --decode-attention-backend"):
        fwk.LLM(str(tmp_path), decode_attention_backend="torch", **options)
    with fwk.LLM(str(tmp_path), attention_backend="torch", **options) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


def test_plugins_stay_without_their_switch(tmp_path: Path) -> None:
    """An order is refused, and the model serves; what a server says to one is in tests/plugins/server/test_tgi.py."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("plugin_switch"), "load_format": "dummy", "max_total_tokens": 512}
    with fwk.LLM(str(tmp_path), **options) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
        with pytest.raises(InvalidRequest, match="no feature 'plugin_switch'"):
            llm.engine.call_feature("plugin_switch", "switch", [1, "schedulers", "lpm", {}, True])


def test_weights_without_their_update(tmp_path: Path) -> None:
    """Neither ``fwk.LLM`` nor a server's route exchanges them, and the model serves."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("weight_update"), "load_format": "dummy", "max_total_tokens": 512}
    with fwk.LLM(str(tmp_path), **options) as llm:
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
        with pytest.raises(AttributeError, match="update_weights"):
            llm.update_weights(str(tmp_path))
    frontend: Any = SimpleNamespace(service=lambda kind: None)
    with pytest.raises(InvalidRequest, match="takes no other weights while it runs: no feature that is installed"):
        asyncio.run(Frontend.update_weights(frontend, str(tmp_path)))


def test_media_without_the_feature(tmp_path: Path) -> None:
    """They are refused with what to install, their options are unknown, and text is served."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options: dict[str, Any] = {"plugins": without("media"), "load_format": "dummy", "max_total_tokens": 512}
    with pytest.raises(ConfigError, match="unknown option --max-image-pixels"):
        fwk.LLM(str(tmp_path), max_image_pixels=9, **options)
    with fwk.LLM(str(tmp_path), **options) as llm:
        with pytest.raises(InvalidRequest, match="media needs the feature 'media': none of that name is installed"):
            llm.generate([[1, 2, 3]], media=[[MediaItem("image", b"x")]])
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2


@pytest.mark.parametrize("feature", FIELDS)
def test_requests_that_ask_are_refused(feature: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    field, value, told, nothing = FIELDS[feature]
    plugins = without(feature)
    with fwk.LLM(str(tmp_path), plugins=plugins, load_format="dummy", max_total_tokens=512) as llm:
        with pytest.raises(InvalidRequest, match=f"{field} needs a feature that is not installed"):
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, **{field: value}))
        assert getattr(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))[0], told) == nothing
