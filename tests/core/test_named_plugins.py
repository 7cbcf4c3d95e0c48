"""A plugin asked for by name is used, with the model plugin there is without it, or refused as ``plugins why`` says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.rig import TINY

from fwk.config import Config
from fwk.errors import FwkError, PluginError
from fwk.plugins import FAMILIES, PluginSet, build_config, discover
from fwk.plugins.families import ORDER
from fwk.setup.checkpoint import OpenedModel, open_model
from fwk.setup.resolve import ModelSetup, resolve
from fwk_kit.cli import plugin_why

EXPERTS = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
GROUPS = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENTS = {**TINY, **EXPERTS, **LATENT, **GROUPS, "num_key_value_heads": 4, "routed_scaling_factor": 1.0}
SINKS = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 20}
MODELS: dict[str, dict[str, Any]] = {
    "llama": TINY,
    "deepseek_v3": {**LATENTS, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
    "deepseek_v2": {**LATENTS, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
    "gpt_oss": {**SINKS, "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"},
}


def opened(folder: Path, plugins: PluginSet, **given: Any) -> tuple[Config, OpenedModel]:
    config = build_config(plugins, {"model": str(folder), "load_format": "dummy", "dtype": "float32", **given})
    return config, open_model(config, plugins, lambda line: None)


@pytest.fixture(scope="module", params=list(MODELS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, PluginSet]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODELS[request.param]))
    return request.param, folder, discover()


def test_every_plugin_by_name_is_used_or_refused(served: tuple[str, Path, PluginSet]) -> None:
    name, folder, plugins = served
    native = resolve(*opened(folder, plugins), plugins).resolution.chosen["models"]
    assert native != "transformers", name
    found: dict[str, ModelSetup] = {}
    refused: dict[str, str] = {}
    for family in ORDER:
        option = FAMILIES[family].option
        for item in plugins.family(family) if family != "models" and option else ():
            given: dict[str, Any] = {str(option): item.name, "enable_lora": family == "lora"}
            try:
                config, model = opened(folder, plugins, **given)
                found[item.key] = resolve(config, model, plugins)
            except FwkError as error:
                refused[item.key] = str(error)
    swapped = {
        key: setup.resolution.chosen
        for key, setup in found.items()
        if setup.resolution.chosen["models"] != native
        or setup.resolution.chosen.get(key.partition(".")[0]) != key.partition(".")[2]
    }
    assert not swapped
    assert {"grammar.xgrammar", "cache.none", "samplers.torch"} <= found.keys()
    unnamed = {key: why for key, why in refused.items() if repr(key.partition(".")[2]) not in why and "--" not in why}
    assert not unnamed


def test_the_refusal_is_that_of_plugins_why(served: tuple[str, Path, PluginSet]) -> None:
    name, folder, plugins = served
    if name == "llama":
        pytest.skip("any attention serves it")
    for backend in ("cpu", "flex"):
        config, model = opened(folder, plugins, attention_backend=backend)
        with pytest.raises(PluginError, match=f"attention backend '{backend}' .* cannot be used: it ") as caught:
            resolve(config, model, plugins)
        assert "transformers" not in str(caught.value)
        assert plugin_why.why(plugins, "attention", config).error == str(caught.value)
    own, model = opened(folder, plugins, attention_backend="flex", model_impl="transformers")
    assert resolve(own, model, plugins).resolution.chosen["models"] == "transformers", "who asks for it gets it"
