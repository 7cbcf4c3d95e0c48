"""What ``auto`` had to leave is told wherever something is chosen, and ``--strict`` makes it an error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.fake_plugins import declare
from tests.helpers.packages import import_path, write_package
from tests.helpers.tiny import TINY
from tests.helpers.zygote import run_fwk

import fwk
from fwk import (
    GrammarBackendSpec,
    Limit,
    LoaderSpec,
    LogitsProcessorSpec,
    MoERunnerSpec,
    Needs,
    QuantizerSpec,
    ToolParserSpec,
)
from fwk.errors import PluginError
from fwk.interfaces.declaration import Declaration
from fwk.plugins import FAMILIES, PluginSet, discover
from fwk.plugins.options import build_config
from fwk.server.parsers import select_parser
from fwk.setup.checkpoint import open_model
from fwk_kit.testing.serving import MIXTURE

LACKING = Needs(packages=("rocket>=3",))
REMEDY = "it needs the package rocket>=3: pip install 'rocket>=3'"
SMALL: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 512, "max_running_requests": 2}


def alongside(*specs: Declaration) -> PluginSet:
    """Our plugins, and a package that declares these."""
    plugins, module = discover(), ModuleType("acme")
    for family in {spec.family for spec in specs}:
        declare(module, FAMILIES[family].hook, [spec for spec in specs if spec.family == family])
    plugins.register(module, "acme", "acme", "1")
    return plugins


def model(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_a_runner_of_experts_is_settled_with_the_quantizer(tmp_path: Path) -> None:
    spec = MoERunnerSpec(
        name="fused",
        load="fwk_moe.torch_loop.runner:TorchRunner",
        rank=99,
        limits=(Limit("quant", ("none",), "fused"),),
    )
    plugins, path = alongside(spec), model(tmp_path, MIXTURE)
    told = "MoE runner 'fused' was not taken: it serves quant none only, not int8: fused"
    with fwk.LLM(path, plugins=plugins, quantization="none", **SMALL) as llm:
        assert llm.engine.info.chosen["moe"] == "fused"
    with fwk.LLM(path, plugins=plugins, quantization="int8", **SMALL) as llm:
        assert llm.engine.info.chosen["moe"] == "cpu"
        assert llm.engine.info.reasons == [told]
        assert llm.engine.info.refused["moe"] == {"fused": "it serves quant none only, not int8: fused"}
    with pytest.raises(PluginError, match=f"--strict: {told}"):
        fwk.LLM(path, plugins=plugins, quantization="int8", strict=True, **SMALL)


def test_what_the_run_has_no_use_for_is_not_chosen(tmp_path: Path) -> None:
    with fwk.LLM(model(tmp_path, TINY), grammar_backend="none", **SMALL) as llm:
        assert "moe" not in llm.engine.info.chosen
        assert llm.engine.info.chosen["grammar"] == "none"


def test_a_grammar_backend_that_cannot_go_back_is_no_choice_beside_drafts(tmp_path: Path) -> None:
    spec = GrammarBackendSpec(
        name="onward", load="a:b", rank=99, kinds=frozenset({"regex"}), limits=(Limit("speculative", ("none",)),)
    )
    options: dict[str, Any] = {"plugins": alongside(spec), "speculative_algorithm": "ngram", **SMALL}
    with fwk.LLM(model(tmp_path, TINY), **options) as llm:
        assert llm.engine.info.chosen["grammar"] == "llguidance"
        assert "'onward' was not taken: it serves speculative none only, not ngram" in llm.engine.info.reasons[0]
    with pytest.raises(PluginError, match=r"'onward' .acme. cannot be used: it serves speculative none only"):
        fwk.LLM(model(tmp_path, TINY), grammar_backend="onward", **options)


def test_a_quantizer_that_layers_cannot_have_is_told_once(tmp_path: Path) -> None:
    plain = QuantizerSpec(name="swift", load="a:b", rank=99, api=2, layouts=("plain",), exact=("plain",), needs=LACKING)
    with fwk.LLM(model(tmp_path, TINY), plugins=alongside(plain), **SMALL) as llm:
        assert llm.engine.info.reasons == [f"quantizer 'swift' was not taken: {REMEDY}"]


def test_a_logits_processor_that_cannot_join_ends_the_start(tmp_path: Path) -> None:
    spec = LogitsProcessorSpec(name="careful", load="a:b", limits=(Limit("drafts", ("none",), "it keeps a history"),))
    why = "logits processor 'careful' .acme. cannot be used: it serves drafts none only, not chain: it keeps a history"
    with pytest.raises(PluginError, match=why):
        fwk.LLM(
            model(tmp_path, TINY),
            plugins=alongside(spec),
            enable_plugin=["careful"],
            speculative_algorithm="ngram",
            **SMALL,
        )


def test_a_loader_that_lacks_something_is_told(tmp_path: Path) -> None:
    save_file({"model.embed_tokens.weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    plugins = alongside(LoaderSpec(name="swift", load="a:b", rank=99, needs=LACKING))
    opened = open_model(build_config(plugins, {"model": model(tmp_path, TINY)}), plugins, print)
    assert opened.reasons == (f"loader 'swift' was not taken: {REMEDY}",)


def test_a_parser_that_lacks_something_is_told_if_the_template_is_of_its_kind() -> None:
    swift = ToolParserSpec(name="swift", load="a:b", rank=99, template_marks=("<tool_call>",), needs=LACKING)
    other = ToolParserSpec(name="other", load="a:b", rank=99, template_marks=("[CALL]",), needs=LACKING)
    found = select_parser("tool_parsers", "auto", alongside(swift, other), '<tool_call> "arguments" </tool_call>')
    assert found.chosen is not None
    assert found.chosen.name == "hermes"
    assert found.reasons() == [f"tool parser 'swift' was not taken: {REMEDY}"]
    assert found.refusals()["other"] == "it reads [CALL], which the chat template does not have"
    assert select_parser("tool_parsers", "none", alongside(swift), "<tool_call>").chosen is None


@pytest.mark.sweep
def test_a_strict_server_takes_no_second_best_balancer(tmp_path: Path) -> None:
    source = """
from fwk import LoadBalancerSpec, Needs, hookimpl
@hookimpl
def load_balancers():
    return [LoadBalancerSpec(name="swift", load="a:b", rank=99, needs=Needs(packages=("rocket>=3",)))]
"""
    write_package(tmp_path / "site", "acme", {"swift": source})
    words = ["serve", model(tmp_path, TINY), "--load-format", "dummy", "--strict", "--port", "0", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": import_path(tmp_path / "site")}
    done = run_fwk(*words, "--data-parallel-size", "2", environment=environment)
    assert done.returncode == PluginError.exit_code
    assert [line for line in done.stderr.splitlines() if "error" in line] == [
        f"fwk: error: --strict: load balancer 'swift' was not taken: {REMEDY}. Choose by name, or leave --strict out"
    ]
