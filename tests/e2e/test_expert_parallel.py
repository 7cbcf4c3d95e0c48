"""Two ranks with half of the experts each say what one says, and what cannot be divided is refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fwk
import fwk_native as native
from fwk import MoERunnerSpec, SamplingParams, hookimpl
from fwk.errors import ConfigError, FwkError, ModelLoadError, PluginError
from fwk.features.declared import declared
from fwk.interfaces.declaration import Facts
from fwk.plugins import PluginFactory, build_config, choose, discover
from fwk_kit.testing.serving import MIXTURE, TINY
from tests.helpers.checkpoints import make_checkpoint, reference_greedy, token_ids

PROMPTS = [token_ids(n, n) for n in (3, 40, 17)]
SAMPLING = SamplingParams(max_tokens=10, temperature=0.0, logprobs=1, prompt_logprobs=0, ignore_eos=True)
SMALL: dict[str, Any] = {"max_total_tokens": 512, "check_blocks": True, "chunked_prefill_size": 16}
DIVIDED = {"tensor_parallel_size": 2, "ep_size": 2}


def generated(folder: Path, **options: Any) -> tuple[list[list[int]], list[float], dict[str, str]]:
    """Tokens, all log-probabilities, and what was chosen."""
    with fwk.LLM(str(folder), **SMALL, **options) as llm:
        found = llm.generate(PROMPTS, SAMPLING)
        chances = [x.logprob for done in found for x in (*(done.logprobs or ()), *(done.prompt_logprobs or ())) if x]
        return [done.token_ids for done in found], chances, dict(llm.engine.info.chosen)


@pytest.mark.sweep  # a pair of tests/contracts/test_pairs.py has two ranks, and plugins/moe the numbers
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v2"])
def test_two_ranks_say_what_one_and_transformers_say(kind: str, tmp_path: Path) -> None:
    """The latter has shared experts, which stay divided in themselves."""
    reference = make_checkpoint(tmp_path, kind)
    one, chances, _ = generated(tmp_path, dtype="float32")
    two, found, chosen = generated(tmp_path, dtype="float32", **DIVIDED)
    assert one == two == [reference_greedy(reference, prompt, 10) for prompt in PROMPTS]
    assert found == pytest.approx(chances, abs=1e-4)
    assert chosen["executors"] == "processes"
    assert chosen["moe"] == ("cpu" if native.refusal() is None else "torch")


@pytest.mark.sweep
@pytest.mark.skipif(native.refusal() is not None, reason="native kernels pack weights")
def test_a_rank_packs_its_own_experts_and_finds_them_again(tmp_path: Path) -> None:
    """Files of packed weights are as large as the parts of all experts, and others than those."""
    make_checkpoint(tmp_path / "model", "qwen3_moe", moe_intermediate_size=512)
    options: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8"}
    sizes: dict[str, list[int]] = {}
    known: set[Path] = set()
    for name, given in (("one", {}), ("parts", {"tensor_parallel_size": 2}), ("whole", DIVIDED)):
        options["weights_cache"] = str(tmp_path / "cache")
        first = generated(tmp_path / "model", **options, **given)
        files = set((tmp_path / "cache").iterdir()) - known
        sizes[name] = sorted(file.stat().st_size for file in files)
        known |= files
        if name == "whole":
            assert generated(tmp_path / "model", **options, **given)[:2] == first[:2]
            assert set((tmp_path / "cache").iterdir()) == known
    assert len(sizes["one"]) == 1
    assert len(sizes["parts"]) == len(sizes["whole"]) == 2
    assert sizes["whole"] == pytest.approx(sizes["parts"], rel=0.05)
    assert sizes["whole"] == pytest.approx([sizes["one"][0] / 2] * 2, rel=0.1)


def folder_of(tmp_path: Path, config: dict[str, Any]) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("config", "options", "error", "message"),
    [
        (
            MIXTURE,
            {"tensor_parallel_size": 2, "ep_size": 3},
            ConfigError,
            "--expert-parallel-size 3 does not divide --tensor-parallel-size 2, whose ranks compute the experts",
        ),
        (MIXTURE, {"ep": 2}, ConfigError, "--expert-parallel-size 2 does not divide --tensor-parallel-size 1, whose"),
        (
            {**MIXTURE, "num_experts": 5},
            DIVIDED,
            ModelLoadError,
            r"mlp\.experts: 5 experts do not divide by 2; choose an --expert-parallel-size that divides 5",
        ),
        (TINY, DIVIDED, ConfigError, "--expert-parallel-size 2: this model has no layers of experts to divide"),
        (TINY, {"enable_expert_parallel": True, "tp": 2}, ConfigError, "--expert-parallel-size 2: this model has no"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    config: dict[str, Any], options: dict[str, Any], error: type[FwkError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        fwk.LLM(folder_of(tmp_path, config), load_format="dummy", **SMALL, **options)
    assert "\n" not in str(caught.value)


class OldRunner:
    """A plugin of before there were other ranks' experts."""

    @hookimpl
    def moe_runners(self) -> list[MoERunnerSpec]:
        return [MoERunnerSpec(name="old", load="fwk_moe.torch_loop.runner:TorchRunner", rank=1000)]


def test_a_runner_that_computes_all_experts_is_passed_over_or_refused(tmp_path: Path) -> None:
    plugins, folder = discover(), folder_of(tmp_path, MIXTURE)
    plugins.register(OldRunner(), "acme.old", "acme", "1.0", ())
    options: dict[str, Any] = {"load_format": "dummy", "plugins": plugins, **SMALL}
    with fwk.LLM(folder, **options) as llm:
        assert llm.engine.info.chosen["moe"] == "old"
    why = "computes all experts of a layer, and --expert-parallel-size 2 leaves others to other ranks"
    with pytest.raises(PluginError, match=rf"MoE runner 'old' \(acme\) cannot be used: it {why}"):
        fwk.LLM(folder, moe_runner_backend="old", **DIVIDED, **options)
    found = choose(plugins, "moe", "auto", Facts(tp_size=2, ep_size=2))
    assert found.chosen is not None
    assert found.chosen.name != "old"
    assert why in found.reasons()[0]


def test_random_weights_are_the_same_however_experts_are_divided(tmp_path: Path) -> None:
    folder_of(tmp_path, MIXTURE)
    one, two = (generated(tmp_path, load_format="dummy", **given) for given in ({}, DIVIDED))
    assert one[0] == two[0]
    assert one[1] == pytest.approx(two[1], abs=1e-4)


@pytest.mark.parametrize("name", ["enable_expert_parallel", "enable_ep_moe"])
def test_switches_of_other_servers_divide_by_all_ranks(name: str) -> None:
    for ranks in (1, 4):
        assert divided({name: True, "tensor_parallel_size": ranks}) == ranks
    assert divided({"tp": 4, "ep-size": 0}) == 4
    assert divided({"tp": 4}) == 1


def divided(given: dict[str, Any]) -> int:
    """By how many ranks experts are."""
    plugins = discover()
    config = build_config(plugins, given)
    facts = Facts(tp_size=config.engine.tensor_parallel_size)
    for _, spec, options in declared(PluginFactory(plugins, config.plugin_options)):
        facts = spec.known(facts, options)
    return facts.ep_size
