"""What a plugin wrongly answers in a step ends the step's requests, in the plugin's name, and not the engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.images import IMAGE_ID, encoded, noise, write_vision

import fwk
from fwk import SamplingParams
from fwk.errors import PluginFault, RequestFailed
from fwk.interfaces.multimodal import MediaItem, Placed
from fwk.interfaces.speculative import Drafts
from fwk.plugins.fitting import fitting
from fwk_kit.testing.serving import TINY

PROMPTS = [[5, 6, 7, 8] * 4, list(range(40, 60)), [9] * 12]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
EAGER = {"attention_backend": "torch", "disable_cuda_graph": True, "max_total_tokens": 512, "check_blocks": True}

PLUGINS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "attention backend 'torch'": ("fwk_attention.torch_sdpa.backend:TorchBackend", "forward", {}),
    "quantizer 'int8'": ("fwk_quant.int8.method:Int8Method", "apply", {"quantization": "int8"}),
    "sampler 'torch'": ("fwk_sampling.torch_sampler.sampler:TorchSampler", "sample", {"sampling_backend": "torch"}),
    "MoE runner 'torch'": ("fwk_moe.torch_loop.runner:TorchRunner", "apply", {"moe_runner_backend": "torch"}),
    "set of operators 'torch'": (
        "fwk_operators._common.torch_operators:TorchOperators",
        "gate",
        {"operator_backend": "torch"},
    ),
}
"""By what messages call it: its class, the method that answers in a step, and how it is chosen."""


def _raise(error: type[Exception]) -> Any:
    raise error("no luck")


WRONG: dict[str, Callable[[Any], Any]] = {
    "raises": lambda answer: _raise(ZeroDivisionError),
    "lacks a row": lambda answer: answer[:-1],
    "has a row too many": lambda answer: torch.cat([answer, answer[:1]]),
    "is wider": lambda answer: torch.cat([answer, answer], -1),
    "is flat": lambda answer: answer.reshape(-1, 1),
    "is of another dtype": lambda answer: answer.to(torch.float16),
    "is a list": lambda answer: answer.tolist(),
    "is None": lambda answer: None,
}
TOKENS: dict[str, Callable[[Any], Any]] = {
    "token past the vocabulary": lambda answer: answer.clone().fill_(TINY["vocab_size"]),
    "token far below 0": lambda answer: answer.clone().fill_(-7),
}


class Faults:
    """Spoils a method's answer once it is told to, one time or for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, load: str, method: str) -> None:
        module, _, name = load.partition(":")
        owner = getattr(import_module(module), name)
        right, self.spoil, self.left = getattr(owner, method), lambda answer: answer, 0

        def wrong(plugin: Any, *args: Any, **fields: Any) -> Any:
            answer = right(plugin, *args, **fields)
            if self.left <= 0:
                return answer
            self.left -= 1
            return self.spoil(answer)

        wrong.__name__ = method
        monkeypatch.setattr(owner, method, wrong)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    """A tiny model's folder for the dummy loader, with experts or without."""

    def make(has_experts: bool) -> Path:
        folder = tmp_path_factory.mktemp("model")
        experts = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
        (folder / "config.json").write_text(json.dumps(TINY | (experts if has_experts else {})))
        return folder

    return make


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", PLUGINS)
def test_in_a_step(name: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load, method, options = PLUGINS[name]
    faults = Faults(monkeypatch, load, method)
    folder, kinds = str(folders("MoE" in name)), WRONG | (TOKENS if method == "sample" else {})
    asked = [[[100 + i, *prompt] for prompt in PROMPTS] for i in range(len(kinds))]  # no block holds these yet
    with fwk.LLM(folder, load_format="dummy", **EAGER, **options) as llm:
        right = [[answer.token_ids for answer in llm.generate(prompts, GREEDY)] for prompts in asked]
    with fwk.LLM(folder, load_format="dummy", **EAGER, **options) as llm:
        for (kind, spoil), prompts, expected in zip(kinds.items(), asked, right, strict=True):
            faults.spoil, faults.left = spoil, 1
            with pytest.raises(RequestFailed) as caught:
                llm.generate(prompts, GREEDY)
            assert f"{name} (fwk " in str(caught.value), kind
            assert f" in {method}" in str(caught.value), kind
            assert "no luck" not in str(caught.value), kind
            assert faults.left == 0
            again = [answer.token_ids for answer in llm.generate(prompts, GREEDY)]
            assert again == expected, f"{kind}: no block is taken for computed that is not"


@pytest.mark.parametrize("name", [name for name in PLUGINS if "sampler" not in name])  # which is not asked then
def test_while_it_starts(name: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load, method, options = PLUGINS[name]
    faults = Faults(monkeypatch, load, method)
    faults.spoil, faults.left = WRONG["lacks a row"], 10**9
    with pytest.raises(PluginFault, match=rf"{name} \(fwk .*\) answered \[.*\] .* in {method}"):
        fwk.LLM(str(folders("MoE" in name)), load_format="dummy", **EAGER, **options)


DRAFTS: dict[str, Callable[[Drafts], Any]] = {
    "raises": lambda drafts: _raise(ZeroDivisionError),
    "None": lambda drafts: None,
    "a token past the vocabulary": lambda drafts: Drafts([[TINY["vocab_size"]] for _ in drafts.token_ids]),
    "a token below 0": lambda drafts: Drafts([[-2] for _ in drafts.token_ids]),
    "a token that is none": lambda drafts: Drafts([[1.5] for _ in drafts.token_ids]),  # type: ignore[list-item]
    "a sequence too few": lambda drafts: Drafts(drafts.token_ids[1:]),
    "a sequence too many": lambda drafts: Drafts([*drafts.token_ids, []]),
    "a parent after its child": lambda drafts: Drafts([[1, 2] for _ in drafts.token_ids], [[1, 0]] * 3),
    "parents of fewer": lambda drafts: Drafts([[1, 2] for _ in drafts.token_ids], [[-1]] * 3),
    "probabilities of others": lambda drafts: Drafts([[1] for _ in drafts.token_ids], None, torch.ones(1, 7)),
    "probabilities of a tree": lambda drafts: Drafts(
        [[1] for _ in drafts.token_ids],
        [[-1] for _ in drafts.token_ids],
        torch.ones(len(drafts.token_ids), TINY["vocab_size"]),
    ),
    "a tensor without counts": lambda drafts: Drafts(torch.ones(len(drafts.token_ids), 2, dtype=torch.int64)),
    "counts past the tensor": lambda drafts: Drafts(
        torch.ones(len(drafts.token_ids), 2, dtype=torch.int64), counts=np.full(len(drafts.token_ids), 3)
    ),
    "a tensor's token past the vocabulary": lambda drafts: Drafts(
        torch.full((len(drafts.token_ids), 2), 10**6), counts=np.full(len(drafts.token_ids), 2)
    ),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("method", ["propose", "observe"])
def test_of_drafts(method: str, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder that fails drafts no more; no text changes."""
    load = "fwk_speculative.ngram.decoder:NgramDecoder"
    with fwk.LLM(str(tiny_folder), load_format="dummy", **EAGER) as llm:
        right = [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)]
    for kind in DRAFTS if method == "propose" else ("raises",):
        faults = Faults(monkeypatch, load, method)
        with fwk.LLM(str(tiny_folder), load_format="dummy", speculative_algorithm="ngram", **EAGER) as llm:
            faults.spoil, faults.left = DRAFTS[kind], 1
            assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == right, kind
            (trouble,) = llm.engine.stats().troubles
            assert "speculative decoder 'ngram' (fwk " in trouble, kind
            assert trouble.endswith(f" in {method}; requests continue without drafts"), trouble
            assert [answer.token_ids for answer in llm.generate(PROMPTS, GREEDY)] == right, kind
        monkeypatch.undo()


def _moved(placed: Placed, **changes: Any) -> Placed:
    return Placed(placed.token_ids, [replace(placed.media[0], **changes)])


PLACED: dict[str, Callable[[Placed], Any]] = {
    "raises": lambda placed: _raise(ZeroDivisionError),
    "None": lambda placed: None,
    "a token past the vocabulary": lambda placed: Placed([*placed.token_ids, 10**6], placed.media),
    "behind the prompt": lambda placed: _moved(placed, start=len(placed.token_ids)),
    "of no length": lambda placed: _moved(placed, length=0),
    "overlapping": lambda placed: Placed(placed.token_ids, placed.media * 2),
    "of another item": lambda placed: _moved(placed, item=1),
    "arrays of objects": lambda placed: _moved(placed, arrays={"pixels": np.array([object()])}),
}


def test_of_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_vision(tmp_path)
    faults = Faults(monkeypatch, "fwk_multimodal.idefics3.processor:Idefics3Processor", "place")
    image = MediaItem("image", encoded(noise(1)), "")
    with fwk.LLM(str(tmp_path), **EAGER) as llm:

        def ask() -> list[int]:
            return llm.generate([[IMAGE_ID, 5, 6]], GREEDY, media=[[image]])[0].token_ids

        right = ask()
        for kind, spoil in PLACED.items():
            faults.spoil, faults.left = spoil, 1
            with pytest.raises(PluginFault, match=r"multimodal processor '.*' \(fwk .*\) .* in (place|process)"):
                ask()
            assert ask() == right, kind


def test_an_answer_is_held_against_a_generic_class() -> None:
    fits = fitting(AbstractAsyncContextManager[None])
    assert fits is not None
    assert [fits(answer) for answer in (nullcontext(), None, "wrong")] == [True, False, False]
