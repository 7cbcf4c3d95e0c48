"""The script for fifteen minutes on a GPU, run beforehand on the pretended device."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import bundle, child, modules, rehearsal
from benchmarks.gpu import checks as checks_of
from benchmarks.gpu.__main__ import Stage, chosen, table
from benchmarks.gpu.cases import MODELS, STAGES, Check, file_of, parity, proofs, reference_of
from benchmarks.gpu.references import WINDOW, Reference, prompts, write_all
from benchmarks.gpu.rehearsal import SMALL_MODELS, SMALL_WORKS, rehearsed
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(bundle.__file__).parents[2]
COPIES = [Check(f"{name} copies", "env", "copies", 20) for name in ("first", "second", "third")]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("references")
    written = write_all(folder, SMALL_MODELS, SMALL_WORKS)
    assert sum(path.stat().st_size for path in written) < 2**20
    return folder


@contextmanager
def benched(check: Check, out: Path, references: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """The outcome of a check on the pretended device, in this process."""
    with rehearsed([check], out, references) as ((changed,), bench):
        yield lambda: child.outcome(bench, changed)
        bench.close()


HEADLINE = replace(
    next(check for check in proofs() if "headline" in check.name and check.function == "parity"), seconds=100
)


def test_a_right_answer_passes_and_a_wrong_one_does_not(
    tmp_path: Path, references: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the wrong one has the right tokens at first: each beginning is the reference's."""
    with benched(HEADLINE, tmp_path, references) as run:
        found = run()
        assert found["passed"], found
        assert found["told"].startswith("step=captured")
    from fwk_attention.torch_sdpa import backend

    real = backend._attend
    monkeypatch.setattr(backend, "_attend", lambda q, k, *rest: real(q * 3.0, k, *rest))
    with benched(parity("torch", "float32", 100, dtype="float32"), tmp_path, references) as run:
        found = run()
        assert found["passed"] is False
        assert "log-probabilities differ by" in found["error"]


def test_what_is_wrong_after_another_token_is_found(tmp_path: Path, references: Path) -> None:
    """A first token that is nearly as likely ends a comparison of texts: what comes after it was never looked at."""
    check = parity("torch", "bf16", 100)
    reference = Reference(file_of(references, *reference_of(check)))
    bench = checks_of.Bench("nothing", torch.device("cpu"), tmp_path, references)
    bench.models, bench.works = SMALL_MODELS, SMALL_WORKS
    reference.logprobs[0, 0, 1] = reference.logprobs[0, 0, 0] - 0.05
    windows = reference.windows(prompts(SMALL_MODELS["small"], SMALL_WORKS["short"], 0))

    def answered(error: float) -> Any:
        found = list[Any]()
        for sequence, first, _ in windows:
            ids, logprobs = (values[sequence, first : first + WINDOW] for values in (reference.ids, reference.logprobs))
            is_other, more = int((sequence, first) == (0, 0)), error * (sequence == 0 and first > 0)
            tokens = [
                SimpleNamespace(token_id=int(ids[i, is_other]), logprob=float(logprobs[i, is_other]) + more)
                for i in range(len(ids))
            ]
            found.append(SimpleNamespace(logprobs=tokens))
        return SimpleNamespace(generate=lambda asked, sampling: found)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks_of, "Reference", lambda path: reference)
        patch.setattr(bench, "llm", lambda check, options: answered(0.01))
        found = checks_of.parity(bench, check)
        assert found["worst"] == pytest.approx(0.05, abs=1e-4)
        assert found["alike"] == "12/16"
        patch.setattr(bench, "llm", lambda check, options: answered(0.4))
        with pytest.raises(AssertionError, match=r"log-probabilities differ by 0\.4"):
            checks_of.parity(bench, check)


def test_a_silent_eager_step_does_not_pass(tmp_path: Path, references: Path) -> None:
    eager = replace(HEADLINE, options={**HEADLINE.options, "attention_backend": "torch"})
    with benched(eager, tmp_path, references) as run:
        found = run()
    assert found["passed"] is False
    assert "steps were to be captured, and are eager (attention torch plans each step anew)" in found["error"]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("cuda", "CUDA error: an illegal memory access"),
        ("die", "the process ended with 9"),
        ("hang", "not done in 2 s, and ended"),
    ],
)
def test_what_goes_wrong_costs_one_check(how: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rehearsal.MISBEHAVE, f"second={how}")
    monkeypatch.setattr(script, "GRACE", 0.5)
    lines, started, start = list[str](), list[Any](), script.subprocess.Popen

    def counted(*words: Any, **more: Any) -> Any:
        started.append(start(*words, **more))
        return started[-1]

    monkeypatch.setattr(script.subprocess, "Popen", counted)
    limit = 2 if how == "hang" else 50
    checks = [COPIES[0], replace(COPIES[1], seconds=limit), COPIES[2]]
    rows = Stage(tmp_path, tmp_path, "pretended", 100, lines.append).run(checks)
    assert [row["passed"] for row in rows] == [True, False, True]
    assert words in rows[1]["error"]
    assert (rows[1]["seconds"] >= 2) == (how == "hang"), "that it took, not that it may take"
    assert len(started) == 2, "a process for the group, and another for what is left"
    assert [line[:4] for line in lines] == ["PASS", "FAIL", "PASS"]
    written = (tmp_path / "results.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["check"] for line in written] == [check.name for check in checks]


def test_a_stage_ends_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is under way is ended, and the rest is not begun; what did not run is no failure."""
    monkeypatch.setenv(rehearsal.MISBEHAVE, "first=hang")
    started = time.monotonic()
    rows = Stage(tmp_path, tmp_path, "pretended", 1, lambda line: None).run(COPIES[:2])
    assert time.monotonic() - started < 8
    assert [(row["passed"], row["error"]) for row in rows] == [(None, "no time was left")] * 2


@pytest.mark.parametrize(("flag", "outcomes"), [("is_vital", [False, None, None]), ("is_load", [False, None, False])])
def test_nothing_is_run_where_nothing_can_be_right(
    flag: str, outcomes: list[bool | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing at all, or nothing of the group whose model could not be loaded."""
    process = [sys.executable, "-c", "raise SystemExit(1)"]
    start = script.subprocess.Popen
    monkeypatch.setattr(script.subprocess, "Popen", lambda command, **more: start(process, **more))
    first = replace(COPIES[0], **{flag: True})
    stage = Stage(tmp_path, tmp_path, "nothing", 60, lambda line: None)
    rows = stage.run([first, COPIES[1], replace(COPIES[2], group="other")])
    assert [row["passed"] for row in rows] == outcomes
    assert rows[1]["error"] == "first copies failed"


def test_a_process_that_goes_on_with_a_group_has_time_to_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each of the rest would be ended while it loads the model, one after another."""
    asked = list[list[float]]()

    def one_each(stage: Stage, checks: list[Check]) -> list[Check]:
        asked.append([check.seconds for check in checks])
        return checks[1:]

    monkeypatch.setattr(Stage, "_child", one_each)
    checks = [replace(one, load_seconds=more) for one, more in zip(COPIES, (0, 45, 45), strict=True)]
    Stage(tmp_path, tmp_path, "nothing", 60, print, slower=2).run(checks)
    assert asked == [[40, 40, 40], [130, 40], [130]]
    loads = [check for check in STAGES["measure"][0]() if check.model and check.group != "serve"]
    assert {check.is_load for check in loads if not check.load_seconds} == {True}


def test_references_that_were_not_brought_are_missed_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["gpu", str(tmp_path / "out"), "--references", str(tmp_path)])
    with pytest.raises(SystemExit):
        script.main()
    assert re.search(r"small-short-0\.npz is not there, one of \d+ references: make them", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "is_spoiled"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: misaligned address", True),
        ("captures_underway.empty() INTERNAL ASSERT FAILED", True),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("log-probabilities differ by 3", False),
    ],
)
def test_errors_after_which_a_process_ends(words: str, is_spoiled: bool) -> None:
    """Also where fwk's own error tells of it in other words."""
    for error in (RuntimeError(words), ValueError("the step failed")):
        error.__cause__ = None if str(error) == words else RuntimeError(words)
        assert child.is_spoiled(error) is is_spoiled


def test_a_server_may_say_what_is_as_likely() -> None:
    """It may put prompts together otherwise, and sums then round otherwise."""
    token = SimpleNamespace(token_id=1, logprob=-1.0, top=[(1, -1.0), (2, -1.1), (3, -2.0)])
    done = [SimpleNamespace(logprobs=[token, token, token])] * 2
    assert checks_of._alike(done, [[1, 1, 2], [1, 1, 1]], 0.15) == {"alike": "5/6"}
    for served, words in (([[3, 1, 1], [1, 1, 1]], "token 0 of prompt 0"), ([[2, 1, 1], [2, 1, 1]], "0 of 6 tokens")):
        with pytest.raises(AssertionError, match=words):
            checks_of._alike(done, served, 0.15)


@pytest.mark.sweep
def test_the_attention_suite_can_be_asked_for(tmp_path: Path) -> None:
    """Without a GPU all of it is skipped: that it was collected, and pytest knows the words, is seen."""
    check = next(check for check in proofs() if check.function == "suite")
    bench = checks_of.Bench("cuda", torch.device("cuda"), tmp_path, tmp_path)
    with pytest.raises(checks_of.Skipped, match=r"\d+ skipped"):
        checks_of.suite(bench, replace(check, seconds=200, settings={**check.settings, "at_once": 1}))


def test_what_is_run_again(tmp_path: Path) -> None:
    results = tmp_path / "results.jsonl"
    rows = [{"check": check.name, "passed": True} for check in proofs()]
    graphs = next(row for row in rows if row["check"] == "flashinfer: bf16, graphs")
    graphs["passed"], rows[-1]["passed"] = False, None
    results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    again = [check.name for check in chosen("prove", "failed", results)]
    assert again == ["flashinfer: bf16, graphs", rows[-1]["check"]]
    speeds = {check.options.get("attention_backend") for check in chosen("measure", "", results)}
    assert speeds == {"triton"}, "of what is wrong, no time is taken"


def test_figures_stand_beside_their_floors() -> None:
    row = {"check": "8B fp8 flashinfer: batch 1", "passed": True, "seconds": 3.0}
    numbers = {"ms a token at 1 (1)": 2.5, "ms a token at 1 (2)": 2.375}
    wrong = {"check": "a | b", "passed": False, "error": "x | y\nmore"}
    page = table([{**row, "numbers": numbers}, wrong])
    assert "| 8B fp8 flashinfer | ms a token at 1 | 2.5 | 2.375 | 1.9 | 0.80 |" in page
    assert "| x / y |" in page


def test_stages_fit_their_time() -> None:
    """A line for every check, names that say which, and models' weights in no check twice."""
    for stage, (checks, seconds) in STAGES.items():
        names = [check.name for check in checks()]
        assert len(set(names)) == len(names), stage
        assert max(check.seconds for check in checks()) < seconds / 2
        assert [check.name for check in checks() if not _has_room(check)] == []
        assert all(check.function in child.FUNCTIONS for check in checks())
        groups = [group for group, _ in groupby(check.group for check in checks())]
        assert len(set(groups)) == len(groups), "one process for a group, whose kernels are compiled once"


def _has_room(check: Check) -> bool:
    """For its prompts and what follows them: the rehearsal makes them shorter."""
    if "num_prompt" not in check.settings:
        return True
    length = check.settings["num_prompt"] + check.settings.get("num_tokens", 1)
    most = check.options["max_total_tokens"] // check.settings["num_seqs"]
    return length <= min(MODELS[check.model]["max_position_embeddings"], most)


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_rehearsed_in_its_time(stage: str, tmp_path: Path, references: Path) -> None:
    checks, seconds = STAGES[stage]
    some = [check for check in checks() if "triton" not in check.options.values()]
    if stage == "prove" and os.environ.get("TRITON_INTERPRET") == "1":
        again = [check for check in checks() if check.name in ("triton: bf16, graphs", "triton: fp8 K/V")]
        some += [replace(check, seconds=100) for check in again]  # the interpreter takes longer than any GPU
    rows = Stage(tmp_path, references, "pretended", 4 * seconds, print).run(some)
    assert [row for row in rows if row["passed"] is False] == []
    assert sum(row["seconds"] for row in rows if row["group"] != "triton") < 0.8 * seconds
    steps = {row["told"].partition(" ")[0] for row in rows if row.get("told")}
    assert steps >= {"step=captured"}


def test_what_only_a_gpu_tells_is_in_prove() -> None:
    page = (ROOT / "docs" / "guides" / "first-light.md").read_text(encoding="utf-8")
    rows = page.partition("## What only a GPU tells")[2].partition("\n\n|")[2].partition("\n\n")[0].splitlines()[2:]
    named = [re.findall(r"`([^`]+)`", row.rpartition(" | ")[2]) for row in rows]
    assert len(named) >= 10
    assert all(named)
    assert {name for names in named for name in names} <= {check.name for check in proofs()}


def test_flashinfer_would_compile_for_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a check on a device says where no module was brought, and where one does not load."""
    package, loaded = tmp_path / "flashinfer" / "__init__.py", list[str]()
    fakes = {
        "flashinfer": SimpleNamespace(__file__=str(package)),
        "tvm_ffi": SimpleNamespace(load_module=loaded.append),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    check = next(check for check in proofs() if check.function == "modules")
    bench = checks_of.Bench("cuda", torch.device("cuda"), tmp_path, tmp_path)
    with pytest.raises(AssertionError, match="no module was built beforehand: FlashInfer would compile for minutes"):
        checks_of.modules(bench, check)
    built = package.parent / "data" / "aot" / "batch_decode_x" / "batch_decode_x.so"
    built.parent.mkdir(parents=True)
    built.write_bytes(b"")
    assert (checks_of.modules(bench, check), loaded) == ({"modules": 1}, [str(built)])


def test_a_package_without_entry_points_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the tree is on the path, and its wheel was not installed: no plugin would be found."""
    check = next(check for check in proofs() if check.function == "plugins")
    bench = checks_of.Bench("pretended", torch.device("cpu"), tmp_path, tmp_path)
    ended = SimpleNamespace(
        returncode=2, stdout="", stderr="fwk: error: unknown command of fwk plugins 'doctor'; commands: \n"
    )
    monkeypatch.setattr(checks_of.subprocess, "run", lambda *words, **more: ended)
    with pytest.raises(AssertionError, match="fwk plugins doctor ended with 2: fwk: error: unknown command"):
        checks_of.plugins(bench, check)
    assert check.is_vital


def test_modules_are_those_of_the_checks() -> None:
    """One for a head size, a type of K/V, windows, and the kernel; decoding in groups of 2 has another."""
    found = {
        (shape.head_size, shape.num_heads // shape.num_kv_heads, shape.kv_dtype, bool(shape.sliding_window), kernel)
        for shape, kernel in modules.wanted()
    }
    plain = {(size, group, "auto", False) for size, group in ((64, 4), (128, 4), (128, 2))} | {(128, 4, "auto", True)}
    assert found == {(*one, kernel) for one in plain for kernel in ("fa2", "fa3")} | {(64, 4, "fp8_e4m3", False, "fa2")}


def test_what_travels_is_new_enough() -> None:
    """And what the machine has itself, as its environment here lists it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    there = (ROOT / "benchmarks" / "gpu" / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in (*bundle.WHEELS, *there) if "==" in line)
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    wanted = [Requirement(words) for words in project["dependencies"]]
    names = {canonicalize_name(one.name) for one in wanted}
    assert names - pins.keys() - bundle.THERE == set(), "neither travels nor is there: add it to WHEELS or THERE"
    checked = [one for one in wanted if canonicalize_name(one.name) in pins]
    assert {"torch", "numpy", "llguidance", "fastapi"} <= {one.name for one in checked}
    assert [str(one) for one in checked if not one.specifier.contains(pins[canonicalize_name(one.name)])] == []


def test_a_wheel_that_needs_what_is_nowhere_does_not_travel(tmp_path: Path) -> None:
    """There is no registry: the first import would fail, and with it everything."""
    for name, needs in (("first", ("second>=2", "torch", "nowhere>=1", "else; extra == 'x'")), ("second", ())):
        with zipfile.ZipFile(tmp_path / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            lines = [f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {words}" for words in needs)]
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", "\n".join(lines))
    assert bundle.missing_needs(tmp_path) == ["first needs second>=2", "first needs nowhere>=1"]


def test_a_bundle_leaves_out_what_is_never_read(tmp_path: Path) -> None:
    source = tmp_path / "flashinfer"
    for name in ("decode.py", "data/csrc/batch_decode.cu", "data/csrc/gemm.cu", "data/cutlass/a.h", "data/cccl/b.h"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("x")
    built = tmp_path / "built"
    for name in ("batch_decode_x", "of_a_test_alone"):
        (built / "ops" / name).mkdir(parents=True)
        (built / "ops" / name / f"{name}.so").write_bytes(b"x" * 100)
    (built / "modules.txt").write_text("batch_decode_x\n")
    packed = bundle.pack_flashinfer(tmp_path, bundle.built_modules(built), tmp_path / "packed" / "fi.tar.xz")
    assert packed == [
        "flashinfer/data/aot/batch_decode_x/batch_decode_x.so",
        "flashinfer/data/csrc/batch_decode.cu",
        "flashinfer/decode.py",
    ]
    for names, missing in (("", "all of them"), ("batch_decode_x not_built", "not_built")):
        (built / "modules.txt").write_text(names)
        with pytest.raises(SystemExit, match=rf"{missing}\): 'make gpu-modules' first"):
            bundle.built_modules(built)
    with pytest.raises(SystemExit, match=r"the bundle has 2\.0 MiB .* and 1 may travel"):
        bundle.check_size({"fi": 2**20, "tree": 2**20}, most=2**20)


def test_a_bundle_without_modules_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else it ends before anything is fetched: on a device FlashInfer would compile for minutes."""
    packed: list[Any] = []
    monkeypatch.setattr(bundle, "_wheels", lambda folder: packed.append("wheels"))
    monkeypatch.setattr(bundle, "_flashinfer", lambda target, modules: packed.append(modules))
    monkeypatch.setattr(bundle, "_tree", lambda: 2**20)
    words = ["bundle", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", [*words, "--modules", str(tmp_path)])
    with pytest.raises(SystemExit, match="'make gpu-modules' first"):
        bundle.main()
    assert packed == []
    monkeypatch.setattr("sys.argv", [*words, "--without-modules"])
    bundle.main()
    assert packed == ["wheels", {}]
    assert re.search(r"together +1\.0 MiB of 60", capsys.readouterr().out)
