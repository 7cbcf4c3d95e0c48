"""What model plugins may say of themselves: their configuration's form, their task, and what their layers need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.checkpoints import make_checkpoint, token_ids
from tests.helpers.models import RunnableModel, make_context
from tests.helpers.tiny import save_llama

import fwk
from fwk import ModelSpec, SamplingParams, hookimpl
from fwk.errors import ConfigError, ModelLoadError, PluginError
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.declaration import Facts
from fwk.interfaces.model import AttentionNeeds
from fwk.plugins import PluginSet, discover, find
from fwk.setup.resolve import check_layers
from fwk.types import ModelConfig
from fwk_kit.testing.weights import Tensors
from fwk_layers import Attention

SAMPLING = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)


class Wrapped(ModelSpec):
    """Llama below ``text_config``, as models of several parts have it."""

    def normalised(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return {**raw["text_config"], "architectures": raw["architectures"]}


class Sinking(ModelSpec):
    def attention_needs(self, config: ModelConfig) -> AttentionNeeds:
        needs = super().attention_needs(config)
        return replace(needs, features=needs.features | {"sinks"})


def alongside(spec: ModelSpec) -> PluginSet:
    """The installed plugins and one of the test's."""

    class Plugin:
        @hookimpl
        def models(self) -> list[ModelSpec]:
            return [spec]

    plugins = discover()
    plugins.register(Plugin(), "models.test", "fwk-test", "1")
    return plugins


def test_a_nested_config_is_read_by_the_plugin(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "config.json"
    inner = json.loads(path.read_text())
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=256) as llm:
        wanted = llm.generate([token_ids(9)], SAMPLING)[0].token_ids
    path.write_text(json.dumps({"architectures": ["WrappedLlama"], "text_config": inner}))
    with pytest.raises(ModelLoadError, match=r"no model plugin serves 'WrappedLlama'.*\(text_config\)"):
        fwk.LLM(str(tmp_path))
    spec = Wrapped(name="wrapped", load="fwk_models.llama.model:Llama", architectures=("WrappedLlama",))
    with fwk.LLM(str(tmp_path), plugins=alongside(spec), dtype="float32", max_total_tokens=256) as llm:
        assert llm.generate([token_ids(9)], SAMPLING)[0].token_ids == wanted


def test_a_task_nobody_does_is_named(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"--task: no installed plugin offers 'paint'; auto, .*generate are"):
        fwk.LLM(str(tmp_path), task="paint")


def test_a_runner_is_one_that_there_is() -> None:
    spec = ModelSpec(name="one", load="a:b", architectures=("A",), task="classify")
    assert spec.runner == "pool"
    assert ModelSpec(name="one", load="a:b", architectures=("A",)).runner == "generate"
    with pytest.raises(ValueError, match="runner must be generate or pool, not 'jog'"):
        ModelSpec(name="one", load="a:b", architectures=("A",), runner="jog")
    assert not spec.is_meant_for(Facts(architecture="A", task="generate"))
    assert spec.is_meant_for(Facts(architecture="A", task="classify"))


def test_auto_leaves_a_backend_that_lacks_what_a_layer_needs(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    spec = Sinking(name="sinking", load="fwk_models.llama.model:Llama", architectures=("LlamaForCausalLM",), rank=1)
    with fwk.LLM(str(tmp_path), plugins=alongside(spec), dtype="float32", max_total_tokens=256) as llm:
        assert llm.engine.info.chosen["attention"] == "torch"
        assert any("'cpu' was not taken: it lacks sinks" in reason for reason in llm.engine.info.reasons)
    with pytest.raises(PluginError, match="lacks sinks"):
        fwk.LLM(str(tmp_path), plugins=alongside(spec), attention_backend="cpu", model_impl="sinking")


class Recording:
    """A backend that is asked with, and without, tensors of the step."""

    calls: list[tuple[Any, ...]]

    def __init__(self) -> None:
        self.calls = []

    def forward(self, *arguments: Any) -> torch.Tensor:
        self.calls.append(arguments[5:])
        return arguments[0]


def test_layers_say_what_they_need(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    model = RunnableModel(tmp_path)
    weights = Tensors({"a.k_scale": torch.tensor([0.5]), "a.v_proj.v_scale": torch.tensor([[2.0], [3.0]])})
    context = make_context(model.context.config, weights)
    backend = Recording()
    context.attention = backend  # type: ignore[assignment]
    layer = Attention(context, 4, 2, extras={"sinks": torch.zeros(4)}, needs=frozenset({"odd"}), prefix="a", soft_cap=1)
    assert layer.layer.features == {"sinks", "odd", "soft_cap"}
    assert (layer.layer.k_scale, layer.layer.v_scale) == (0.5, 3.0)
    q, batch, extra = torch.zeros(1, 4, 32), SimpleNamespace(), {"indices": torch.zeros(1)}
    layer(q, q, q, batch)  # type: ignore[arg-type]
    layer(q, q, q, batch, extra)  # type: ignore[arg-type]
    assert backend.calls == [(), (extra,)]  # a backend of before may leave the argument out
    assert AttentionBackend.forward.__defaults__ == (None,)


def test_layers_beyond_the_backend_are_named() -> None:
    layer = AttentionLayer(3, 4, 2, 32, 1.0, needs=frozenset({"odd"}), prefix="model.layers.3.self_attn")
    with pytest.raises(ConfigError, match=r"layer 3 \(model\.layers\.3\.self_attn\) of this model: it lacks odd"):
        check_layers([layer], find(discover(), "attention", "torch"), Facts(dtype="float32"))


def test_a_checkpoint_with_scales_of_its_kv_cache(tmp_path: Path) -> None:
    """They are for backends that keep K and V in fewer bits by a constant; others serve it as one without."""
    tokens: list[list[int]] = []
    for scale in (None, 0.5, 0.0):
        folder = save_llama(tmp_path / str(scale), num_hidden_layers=2)
        if scale is not None:
            tensors = load_file(folder / "model.safetensors")
            scales = {f"model.layers.{i}.self_attn.{of}_scale": torch.tensor(scale) for i in (0, 1) for of in "kv"}
            save_file(tensors | scales, folder / "model.safetensors")
        if scale == 0:
            with pytest.raises(ModelLoadError, match="scale of a KV cache is a positive number, not 0"):
                fwk.LLM(str(folder), device="cpu", max_total_tokens=256)
            continue
        with fwk.LLM(str(folder), device="cpu", max_total_tokens=256) as llm:
            tokens.append(llm.generate([[1, 7, 3, 9]], SAMPLING)[0].token_ids)
    assert tokens[0] == tokens[1]
