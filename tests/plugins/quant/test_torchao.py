"""torchao: its recipes, held against the package's own layers in a model of transformers."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.int8 import exact, int_mm, saturating
from tests.helpers.lazy import lazy

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, ModelLoadError
from fwk.interfaces.declaration import Facts
from fwk.interfaces.quant import LinearShape, QuantContext
from fwk.plugins import discover, find
from fwk_kit.testing import QuantizerSuite
from fwk_quant.torchao import TorchaoOptions

torchao = lazy("torchao")

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")

PROMPTS = [[3, 9, 27, 81, 143, 11], [200, 100, 50, 25], [5] * 20]
RECIPES = {
    "int8wo": "Int8WeightOnlyConfig",
    "int8dq": "Int8DynamicActivationInt8WeightConfig",
    "fp8wo": "Float8WeightOnlyConfig",
}


class TestInt8(QuantizerSuite):
    plugin = "torchao"
    max_error = 0.012


class TestInt8Activations(QuantizerSuite):
    plugin = "torchao"
    max_error = 0.02
    options = {"torchao_config": "int8dq"}
    serve_with = {"torchao_config": "int8dq"}


class TestFp8(QuantizerSuite):
    plugin = "torchao"
    max_error = 0.04
    options = {"torchao_config": "fp8wo"}
    serve_with = {"torchao_config": "fp8wo"}


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("flags", [{}, {"tensor_parallel_size": 2, "executor": "processes"}], ids=["one", "two ranks"])
def test_what_torchao_makes_of_a_model_of_transformers(name: str, flags: dict[str, Any], tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, "llama")
    torchao.quantization.quantize_(reference, getattr(torchao.quantization, RECIPES[name])())
    given = {"dtype": "float32", "max_total_tokens": 1024, "max_running_requests": 4, "load_format": "safetensors"}
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=1)
    with fwk.LLM(str(tmp_path), quantization="torchao", torchao_config=name, **given, **flags) as llm:
        done = llm.generate(PROMPTS, sampling)
        assert llm.engine.info.chosen["quant"] == "torchao"
    for prompt, ours in zip(PROMPTS, done, strict=True):
        with torch.no_grad(), int_mm(exact):
            logits = reference(torch.tensor([[*prompt, *ours.token_ids]])).logits[0, len(prompt) - 1 : -1].float()
        theirs = logits.log_softmax(-1)[range(len(ours.token_ids)), ours.token_ids]
        mine = torch.tensor([entry.logprob for entry in ours.logprobs or []])
        # Where activations are rounded, another order of a sum tips some of them to the next number.
        torch.testing.assert_close(mine, theirs, atol=0.5 if name == "int8dq" else 1e-3, rtol=1e-3)
        assert (mine - theirs).abs().median() < 0.15, "few of them"


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("product", [None, saturating], ids=["", "saturating"])
def test_products_are_the_packages_to_the_bit(name: str, dtype: torch.dtype, product: Any) -> None:
    """Those it has on a processor whose products of int8 are exact."""
    from fwk_quant.torchao.method import TorchaoMethod

    torch.manual_seed(1)
    layer = torch.nn.Linear(128, 64, dtype=dtype)
    x, weight, bias = torch.randn(5, 128, dtype=dtype), layer.weight.data.clone(), layer.bias.data
    options = TorchaoOptions.model_validate({"torchao_config": name})
    made = TorchaoMethod(QuantContext(torch.device("cpu"), dtype, {}, options))
    weights = made.finish(made.encode(weight, "m"), LinearShape(128, (64,), dtype, torch.device("cpu"), "m"))
    torchao.quantization.quantize_(layer, getattr(torchao.quantization, RECIPES[name])())
    with int_mm(exact):
        wanted = layer(x)
    with int_mm(product):
        assert torch.equal(made.apply(weights, x, bias), wanted)


def test_what_torchao_refuses_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fwk_quant.torchao import method

    def refuse(*args: Any) -> None:
        raise AssertionError("requires another processor")

    make_checkpoint(tmp_path, "llama")
    monkeypatch.setattr(method, "quantize_", refuse)
    with pytest.raises(ModelLoadError, match="--torchao-config fp8wo: torchao refuses it here: requires another"):
        fwk.LLM(str(tmp_path), quantization="torchao", torchao_config="fp8wo", load_format="safetensors")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"torchao_config": "int8wo"}, "select it with --quantization torchao"),
        (
            {"quantization": "torchao", "torchao_config": "int2wo"},
            "--torchao-config: .*'int8dq' or 'fp8wo'",
        ),
        ({"quantization": "torchao", "torchao_config": "int4wo-128"}, "int4wo-128: --quantization int4 .* makes"),
    ],
)
def test_what_cannot_be_asked(given: dict[str, Any], words: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=words):
        fwk.LLM(str(tmp_path), load_format="safetensors", **given)


def test_a_missing_package_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("fwk.interfaces.declaration.installed_version", missing)
    said = find(discover(), "quant", "torchao").declaration.refusal(Facts())
    assert said == "needs the package torchao>=0.18,<0.19: pip install 'torchao>=0.18,<0.19'"
