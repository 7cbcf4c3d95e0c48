"""The script for half an hour on a GPU, run beforehand on the pretended device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from benchmarks.gpu.__main__ import in_a_process, run_stage, table
from benchmarks.gpu.cases import LLAMA, Case, cases
from benchmarks.gpu.measure import measure
from tests.helpers.pretend_cuda import JOURNAL, flashinfer_stand_in, pretended, triton_kernels

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
}


def small(case: Case) -> Case:
    """The same, of a model that takes a second."""
    cut = {"chunked_prefill_size": 32} if "chunked_prefill_size" in case.options else {}
    return replace(
        case,
        options=case.options | cut,
        model=case.model | SMALL,
        draft=case.draft and case.draft | SMALL | {"num_hidden_layers": 1},
        num_prompt=min(case.num_prompt // 8, 80),
        num_tokens=4,
        num_seqs=min(case.num_seqs, 3),
    )


def one_of_each(chosen: Iterable[Case]) -> list[Case]:
    """Without those that are the same but for their names and how many sequences they have, once they are small."""
    found: dict[str, Case] = {}
    for case in chosen:
        found.setdefault(json.dumps(asdict(replace(case, name="", num_seqs=0)), sort_keys=True), case)
    return list(found.values())


def on_the_pretended_device(case: Case, device: str, out: Path, seconds: float) -> dict[str, Any]:
    options = dict(case.options)
    if not options.get("disable_cuda_graph"):  # captures take the interpreter most of the time
        options["cuda_graph_bs"] = (4,)
    kernels = triton_kernels() if "triton" in options.values() else flashinfer_stand_in()
    if options["attention_backend"] == "flashinfer":
        options["attention_backend"] = "flashinfer-stand-in"
        for name in ("operator_backend", "sampling_backend"):  # these kernels are not the stand-in's
            options.pop(name, None)
        kernels = flashinfer_stand_in()
    with kernels, pretended() as plugins:
        found = measure(replace(case, options=options), device, plugins)
    assert JOURNAL.faults == []
    return found


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", ["A", "B", "C"])
def test_every_stage_runs_to_its_end(stage: str, tmp_path: Path) -> None:
    chosen = one_of_each(map(small, cases(stage)))
    if os.environ.get("TRITON_INTERPRET") != "1":
        chosen = [case for case in chosen if "triton" not in case.options.values()]
    seen = set[str]()
    first: list[Case] = []
    for case in chosen:  # of the interpreter's, which takes ten seconds each, one of every kind
        kind = " ".join(sorted(case.options)) + case.kind
        is_slow = "triton" in case.options.values() and case.options["attention_backend"] != "flashinfer"
        if not is_slow or kind not in seen:
            first.append(case)
        if is_slow:
            seen.add(kind)
    rows = run_stage(stage, "pretended", tmp_path, 3600, on_the_pretended_device, first)
    assert [row for row in rows if not row["passed"]] == []
    lines = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["case"] for line in lines] == [case.name for case in first]
    assert (tmp_path / f"{stage}.md").read_text(encoding="utf-8").count("\n") == len(first) + 2
    if stage == "A":
        steps = {row["chosen"]["step"].partition(" ")[0] for row in rows}
        assert steps == {"captured", "eager"}
        assert {row["chosen"].get("speculative") for row in rows} == {None, "standalone"}
        assert {row["chosen"].get("moe") for row in rows} >= {None, "torch"}
    assert all("kv_cache " in row["memory"] for row in rows)


def test_a_wrong_answer_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compared with itself: attention that forgets its scale does not pass."""
    from fwk_attention.torch_sdpa import backend

    real = backend._attend
    monkeypatch.setattr(backend, "_attend", lambda q, k, *rest: real(q * (3.0 if JOURNAL.launches else 1.0), k, *rest))
    case = small(next(case for case in cases("A") if case.name == "torch float32"))
    found = on_the_pretended_device(case, "pretended", tmp_path, 60)
    assert not found["passed"]
    assert found["largest difference"] > case.tolerance


def test_what_fails_stops_nothing(tmp_path: Path) -> None:
    def run(case: Case, device: str, out: Path, seconds: float) -> dict[str, Any]:
        if case.name == "bad":
            raise ValueError("broken")
        return {"passed": True, "ms a token": 1.5}

    chosen = [Case(name, "A", "speed", LLAMA) for name in ("bad", "good")]
    rows = run_stage("A", "cuda", tmp_path, 60, run, chosen)
    assert [row["passed"] for row in rows] == [False, True]
    assert "| bad | NO |  | ValueError: broken |" in table(rows)
    (late,) = run_stage("A", "cuda", tmp_path, 0, run, chosen[1:])
    assert late["error"] == "no time was left"
    assert len((tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_a_process_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    found = in_a_process(Case("long", "A", "speed", LLAMA), "cpu", tmp_path, 0.05)
    assert found == {"passed": False, "error": "not done in 0 s"}


@pytest.mark.sweep
def test_a_case_in_a_process_of_its_own(tmp_path: Path) -> None:
    options = {"attention_backend": "torch", "dtype": "float32"}
    case = Case("real", "A", "parity", LLAMA | SMALL, options, 2, 20, 4, tolerance=1e-3)
    assert in_a_process(case, "cpu", tmp_path, 300)["passed"]
    found = in_a_process(replace(case, options={"attention_backend": "nothing"}), "cpu", tmp_path, 300)
    assert "ended with 1" in found["error"]
