"""Operators that torch.compile makes: when, of which steps, and what is refused; their numbers: tests/contracts."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.lazy import lazy

from fwk import LLM, SamplingParams
from fwk.errors import PluginError
from fwk.interfaces.declaration import Facts
from fwk.interfaces.operators import OperatorContext
from fwk.plugins import build, choose, find
from fwk_kit.testing.base import installed
from fwk_kit.testing.serving import TINY
from fwk_native.thread_pool import ThreadPool
from fwk_operators.inductor import backend, compiling

dynamo = lazy("torch._dynamo.utils")

PLUGINS = installed()
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
LENGTHS = ([1], [3], [40], [2, 9], [5, 1, 7], [1, 30, 2, 6, 11], [4] * 8)


def served(folder: Path, **options: Any) -> tuple[list[list[int]], dict[str, str], int]:
    """Tokens, what was chosen, and how many graphs were traced while requests were served."""
    settings = {"load_format": "dummy", "max_total_tokens": 2048, "max_running_requests": 8, **options}
    tokens: list[list[int]] = []
    with LLM(str(folder), **settings) as llm:
        before = dynamo.counters["stats"]["unique_graphs"]
        for lengths in LENGTHS:
            prompts = [[(7 * at + length) % 90 + 1 for at in range(length)] for length in lengths]
            tokens += [done.token_ids for done in llm.generate(prompts, GREEDY)]
        return tokens, llm.engine.info.chosen, dynamo.counters["stats"]["unique_graphs"] - before


@pytest.mark.sweep
def test_compiles_before_requests_and_never_while_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    compiling.compiled.cache_clear()
    rows: set[int] = set()
    made: list[Callable[..., Any]] = []
    plain = backend.compiled

    def counting(*given: Any) -> Callable[..., Any]:
        run = plain(*given)
        made.append(run)

        def call(*tensors: torch.Tensor) -> Any:
            rows.add(len(tensors[0]))
            return run(*tensors)

        return call

    monkeypatch.setattr(backend, "compiled", counting)
    wanted, _, _ = served(tmp_path, operator_backend="torch")
    start = dynamo.counters["stats"]["unique_graphs"]
    with caplog.at_level(logging.WARNING):
        found, chosen, traced = served(tmp_path, operator_backend="inductor", torch_compile_max_bs=4)
    assert found == wanted
    assert chosen["operators"] == "inductor"
    assert chosen["compiled"] == "add_rms_norm, gate, rms_norm, rotate in steps of up to 4 rows"
    assert len(made) == dynamo.counters["stats"]["unique_graphs"] - start > 0
    assert traced == 0
    assert {1, 2, 3, 4} == rows
    assert "not compiled" not in caplog.text


def test_a_machine_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(PluginError, match=r"there is no no-such-compiler: install one .*, or name it in CXX"):
        choose(PLUGINS, "operators", "inductor", Facts())


def test_never_chosen_by_itself() -> None:
    assert find(PLUGINS, "operators", "inductor").declaration.refusal(Facts()) is None
    chosen = choose(PLUGINS, "operators", "auto", Facts()).chosen
    assert chosen is not None
    assert chosen.name != "inductor"


@pytest.mark.sweep
def test_a_call_that_was_not_rehearsed_runs_torchs(caplog: pytest.LogCaptureFixture) -> None:
    item = find(PLUGINS, "operators", "inductor")
    options = item.declaration.options(torch_compile_max_bs=4)
    operators = build(item, OperatorContext(torch.device("cpu"), torch.float32, options, ThreadPool(1)))
    operators.gate(torch.ones(2, 8), "silu")
    operators.ready()
    before = dynamo.counters["stats"]["unique_graphs"]
    with caplog.at_level(logging.WARNING):
        operators.gate(torch.ones(2, 12), "silu")
        operators.gate(torch.ones(2, 12), "silu")
    assert dynamo.counters["stats"]["unique_graphs"] == before
    assert caplog.text.count("gate of [rows, 12] is not compiled") == 1
