"""Decode steps replayed from graphs on a pretended device: the same tokens, one launch, and what would be wrong."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.fake_cuda_graphs import FakeGraphs
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import JOURNAL, device, flashinfer_stand_in, serving, triton_kernels
from tests.helpers.pretend_cuda.graphs import Recording
from tests.helpers.tiny import save_llama

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError
from fwk.interfaces.graphs import Graph, StepOutput, StepSize
from fwk.types import ForwardBatch
from fwk.worker.graphs.graph_sizes import GraphSizes, default_sizes
from fwk.worker.graphs.step_graphs import DecodeGraphs
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.staging import StagingRing
from fwk_attention.triton_paged import plan
from fwk_attention.triton_paged.captured import CapturedDecodes
from fwk_devices.cuda.graph import CudaCapture
from fwk_kit.testing.serving import MIXTURE, TINY

pytestmark = interpreted

PROMPTS = [[1, 7, 3, 9] * 9, list(range(40, 75)), [5, 5, 6]]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 64,
    "dtype": "float32",
    "check_blocks": True,
    "attention_backend": "flashinfer-stand-in",
    "operator_backend": "torch",
    "sampling_backend": "torch",
}
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
ENDING = [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (9, 3, 6)]
"""One after the other, so that a step of two is padded: sizes are 1, 2, 4 and 8, and three sequences need one, too."""


TRITON = {"attention_backend": "triton"}
"""Its kernels run in its interpreter, which takes seconds."""
ONE_SIZE: dict[str, Any] = {"max_running_requests": 4, "cuda_graph_bs": (4,)}
"""Captures take the interpreter most of a test's time; fewer sequences are padded."""


def kernels_of(options: dict[str, Any]) -> AbstractContextManager[None]:
    return triton_kernels() if "triton" in options.values() else flashinfer_stand_in()


class Served:
    """What came of some requests on the pretended device."""

    def __init__(self, folder: Path, sampling: Any = GREEDY, prompts: Any = PROMPTS, **options: Any) -> None:
        self.launches: list[int] = []
        """Of each decode step's model."""
        settings: dict[str, Any] = OPTIONS | options
        with (
            pytest.MonkeyPatch.context() as patch,
            kernels_of(settings),
            serving(folder, **settings) as llm,
        ):
            patch.setattr(DecodeGraphs, "run", self._counted(DecodeGraphs.run))
            self.how = llm.engine.info.chosen["step"]
            self.results = llm.generate(prompts, sampling)
            self.tokens = [done.token_ids for done in self.results]
            self.replays = JOURNAL.launches["graph"]
            self.syncs = dict(JOURNAL.syncs)
        assert JOURNAL.faults == []

    def _counted(self, real: Callable[..., StepOutput]) -> Callable[..., StepOutput]:
        def run(steps: DecodeGraphs, batch: ForwardBatch) -> StepOutput:
            before = JOURNAL.launches.total()
            found = real(steps, batch)
            if batch.is_decode:
                self.launches.append(JOURNAL.launches.total() - before)
            return found

        return run


def on_cpu(folder: Path, sampling: Any = GREEDY, prompts: Any = PROMPTS, **options: Any) -> list[list[int]]:
    """What the CPU says, where sizes of captures would be refused."""
    settings: dict[str, Any] = {**OPTIONS, "attention_backend": "torch", **options}
    settings.pop("cuda_graph_bs", None)
    with fwk.LLM(str(folder), device="cpu", **settings) as llm:
        return [done.token_ids for done in llm.generate(prompts, sampling)]


@pytest.fixture(scope="module")
def wanted(tiny_folder: Path) -> list[list[int]]:
    return on_cpu(tiny_folder, ENDING)


@pytest.mark.sweep
def test_a_replayed_step_says_the_same_in_one_launch(tiny_folder: Path, wanted: list[list[int]]) -> None:
    served = Served(tiny_folder, ENDING)
    assert served.how == "captured (next tokens of 4 numbers of sequences up to 8)"
    assert served.tokens == wanted
    assert served.replays >= 7
    assert set(served.launches) == {1}
    assert [where for where in served.syncs if "in_flight" not in where] == [], "a launch waited"
    eager = Served(tiny_folder, ENDING, disable_cuda_graph=True)
    assert (eager.how, eager.replays, eager.tokens) == ("eager (--disable-cuda-graph)", 0, wanted)


@pytest.mark.sweep
def test_without_padding_only_the_sizes_themselves_are_replayed(tiny_folder: Path, wanted: list[list[int]]) -> None:
    served = Served(tiny_folder, ENDING, cuda_graph_bs=(2,), disable_cuda_graph_padding=True)
    assert served.how == "captured (next tokens of 1 numbers of sequences up to 2)"
    assert served.tokens == wanted
    assert 0 < served.replays < 8
    assert min(served.launches) == 1 < max(served.launches)


SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, top_k=20, seed=3, ignore_eos=True)
PENALISED = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={50: 3.0}, frequency_penalty=1.9, ignore_eos=True)
WITH: dict[str, tuple[SamplingParams, dict[str, Any]]] = {
    "sampled": (SAMPLED, {}),
    "penalties": (PENALISED, {}),
    "log-probabilities": (SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True), {}),
    "no overlap": (GREEDY, {"disable_overlap_schedule": True}),
    "int4": (GREEDY, {"quantization": "int4"}),
    "cache tiers": (GREEDY, {"prefix_cache": "hierarchical"}),
    "n-gram drafts": (PENALISED, {"speculative_algorithm": "ngram"}),
    "one token a block": (GREEDY, {"page_size": 1}),
}


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", WITH)
def test_it_goes_with(tiny_folder: Path, name: str) -> None:
    sampling, options = WITH[name]
    served = Served(tiny_folder, sampling, **options)
    assert served.tokens == on_cpu(tiny_folder, sampling, **options)
    assert served.replays > 0


REPEATED = [[1, 7, 3, 9] * 9, [4, 8] * 12, [5, 5, 6]]
CHAINED: dict[str, Any] = {
    "speculative_algorithm": "ngram",
    "speculative_num_draft_tokens": 4,
    "speculative_ngram_max_bfs_breadth": 1,
}


def drafted(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[Served, list[tuple[int, bool]]]:
    """What was served, and of each step with drafts its rows and whether it was replayed."""
    steps: list[tuple[int, bool]] = []
    real = DecodeGraphs.run
    prepare = InputBuffers.prepare
    has_drafts: list[bool] = []

    def prepared(self: InputBuffers, *parts: Any, **named: Any) -> Any:
        forward, rows = prepare(self, *parts, **named)
        has_drafts[:] = [rows.has_drafts]
        return forward, rows

    def run(self: DecodeGraphs, batch: ForwardBatch) -> StepOutput:
        found = real(self, batch)
        if has_drafts and has_drafts.pop() and self.graphs:  # none while the largest step is measured
            steps.append((batch.num_tokens, batch.is_static))
        return found

    monkeypatch.setattr(InputBuffers, "prepare", prepared)
    monkeypatch.setattr(DecodeGraphs, "run", run)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, logit_bias={50: 9.0}, ignore_eos=True)
    served = Served(folder, sampling, REPEATED, **options)
    monkeypatch.undo()
    assert served.tokens == on_cpu(folder, sampling, REPEATED)
    assert sum(done.accepted_draft_tokens for done in served.results) > 0
    return served, steps


def test_chains_of_drafts_are_verified_in_one_launch(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, steps = drafted(tiny_folder, monkeypatch, **CHAINED, max_running_requests=4)
    numbers = "6 numbers of them up to 20"
    assert served.how == f"captured (next tokens and drafts in chains, {numbers}; not trees of drafts)"
    assert len(steps) > 2
    assert all(is_static for _, is_static in steps)
    assert max(rows for rows, _ in steps) > 4
    assert set(served.launches) == {1}
    assert served.replays >= len(steps)


@pytest.mark.sweep
def test_triton_verifies_chains_of_drafts_in_one_launch(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served, steps = drafted(tiny_folder, monkeypatch, **TRITON, **CHAINED)
    assert len(steps) > 2
    assert all(is_static for _, is_static in steps)
    assert set(served.launches) == {1}


@pytest.mark.sweep
def test_trees_of_drafts_are_not_replayed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trees = CHAINED | {"speculative_ngram_max_bfs_breadth": 3}
    real, were_trees = InputBuffers.prepare, list[bool]()

    def prepare(self: InputBuffers, batch: Any, trees: Any = None) -> Any:
        forward, rows = real(self, batch, trees)
        if trees is not None:
            were_trees.append(forward.is_static)
        return forward, rows

    monkeypatch.setattr(InputBuffers, "prepare", prepare)
    drafted(tiny_folder, monkeypatch, **trees)
    assert were_trees
    assert not any(were_trees)


ROUNDED: dict[str, Any] = {
    "quantization": "fp8",
    "fp8_activations": "8bit",
    "operator_backend": "triton",
    "max_prefill_tokens": 16,
    "chunked_prefill_size": 16,
}
"""Products are torch's; steps are small, since gates take the interpreter long."""

IN_TRITON: dict[str, tuple[Any, dict[str, Any]]] = {
    **WITH,
    "requests that end": (ENDING, {"cuda_graph_bs": (1, 2, 4)}),
    "triton operators": (GREEDY, {"operator_backend": "triton"}),
    "int8 K/V": (GREEDY, {"kv_cache_dtype": "int8"}),
    "fp8 K/V": (GREEDY, {"kv_cache_dtype": "fp8"}),
    "int4 products": (GREEDY, {"quantization": "int4", "int4_gemm_backend": "triton"}),
    "fp8 products": (GREEDY, {"quantization": "fp8", "fp8_gemm_backend": "triton"}),
    "inputs that operators round": (GREEDY, ROUNDED),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", IN_TRITON)
def test_triton_goes_with(tiny_folder: Path, name: str) -> None:
    sampling, options = IN_TRITON[name]
    served = Served(tiny_folder, sampling, **TRITON | ONE_SIZE | options)
    assert served.tokens == on_cpu(tiny_folder, sampling, **options | {"operator_backend": "torch"})
    assert served.replays > 0


@pytest.mark.sweep
def test_fp8_with_one_scale_says_what_it_says_without_graphs(tiny_folder: Path) -> None:
    served = Served(tiny_folder, kv_cache_dtype="fp8")
    assert served.replays > 0
    assert served.tokens == Served(tiny_folder, kv_cache_dtype="fp8", disable_cuda_graph=True).tokens


@pytest.mark.sweep
def test_a_long_past_is_cut_as_in_any_step(tiny_folder: Path) -> None:
    """Its tiles are split among programs and joined; the other sequence's is not."""
    prompts = [[3 + n % 90 for n in range(400)], [4, 9]]
    served = Served(tiny_folder, prompts=prompts, **TRITON | ONE_SIZE)
    assert served.replays >= 4
    assert served.tokens == on_cpu(tiny_folder, prompts=prompts)


CASCADE: dict[str, Any] = {**TRITON, "triton_attention_cascade": True, "triton_attention_split_tile_size": 16}
BEGINNING = [(7 * n) % 90 + 5 for n in range(33)]


@pytest.mark.sweep
@pytest.mark.parametrize("is_eager", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_what_sequences_share_is_read_once(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, is_eager: bool) -> None:
    """Shared tiles are in the graphs, as many as there is room for, and without a wait."""
    shared: list[int] = []
    real = plan.share

    def share(*arguments: Any, **more: Any) -> Any:
        found = real(*arguments, **more)
        shared.append(len(found[1]))
        return found

    monkeypatch.setattr(plan, "share", share)
    prompts = [BEGINNING, [*BEGINNING, 5, 6], [9, 8, 7]]
    small: dict[str, Any] = {"max_total_tokens": 160, "max_running_requests": 4}
    more = {"disable_cuda_graph": True} if is_eager else {"cuda_graph_bs": (4,)}
    few = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    served = Served(tiny_folder, few, prompts, **CASCADE, **small, **more)
    assert shared[-3:] == [2, 2, 2]
    assert served.tokens == on_cpu(tiny_folder, few, prompts, **small)
    assert (served.replays > 0, set(served.launches) == {1}) == (not is_eager, not is_eager)
    assert [where for where in served.syncs if "in_flight" not in where] == [], "a launch waited"


@pytest.mark.sweep
def test_windows_are_replayed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(TINY | {"model_type": "mistral", "sliding_window": 24, "architectures": ["MistralForCausalLM"]})
    )
    served = Served(tmp_path, **TRITON | ONE_SIZE)
    assert served.replays > 0
    assert served.tokens == on_cpu(tmp_path) == Served(tmp_path).tokens


@pytest.mark.sweep
def test_a_step_for_which_the_buffers_are_too_small_is_computed(
    tiny_folder: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CapturedDecodes.plan
    monkeypatch.setattr(
        CapturedDecodes, "plan", lambda self, batch: plan(self, batch) if batch.seq_lens_np.max() < 40 else None
    )
    served = Served(tiny_folder, ENDING, **TRITON | ONE_SIZE)
    assert served.tokens == wanted
    assert min(served.launches) == 1 < max(served.launches)


def test_rows_of_padding_go_to_a_block_that_nobody_has(tiny_folder: Path) -> None:
    """Tokens fill every block that there is: one shared with the padding would be spoilt."""
    prompts = [[5 + n, 7, 9 + n] for n in range(3)]
    tight = {"max_total_tokens": 48, "page_size": 4, "schedule_conservativeness": 0.05}
    grown = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    served = Served(tiny_folder, grown, prompts, **tight)
    assert served.replays > 0
    assert served.tokens == on_cpu(tiny_folder, grown, prompts, **tight)


def test_sizes_are_those_that_were_asked_for() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert default_sizes(300)[-5:] == (248, 256, 272, 288, 300)
    assert GraphSizes((1, 2, 4, 8)).with_drafts(3, 20).sizes == (1, 2, 4, 8, 16)
    assert GraphSizes((2, 8), pads=False).with_drafts(3, 64).sizes == (2, 8, 32)
    assert GraphSizes(()).with_drafts(3, 64).sizes == ()
    sizes = GraphSizes((2, 8))
    assert [sizes.padding(n) for n in (1, 2, 3, 8, 9)] == [1, 0, 5, 0, None]
    assert [GraphSizes((2, 8), pads=False).padding(n) for n in (1, 2, 3, 8)] == [None, 0, None, 0]


@pytest.mark.gate(2)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cuda_graph_bs": (0,)}, "--cuda-graph-bs 0: a step has at least 1 sequence"),
        ({"cuda_graph_bs": (9,)}, "--cuda-graph-bs 9 is more than --max-running-requests 8"),
        ({"cuda_graph_bs": (8,), "cuda_graph_max_bs": 4}, "more than --cuda-graph-max-bs 4"),
        ({"cuda_graph_bs": (8,), "disable_cuda_graph": True}, "--cuda-graph-bs and --disable-cuda-graph"),
        ({"disable_cuda_graph_padding": True, "disable_cuda_graph": True}, "leave one of them out"),
    ],
)
def test_sizes_that_no_step_has_are_refused(tiny_folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Served(tiny_folder, **options)


@pytest.mark.sweep
@pytest.mark.parametrize("collects", [False, True])
def test_garbage_is_left_alone_while_steps_are_captured(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, collects: bool
) -> None:
    seen: list[tuple[bool, bool]] = []  # whether it is on, and whether something is kept from it

    class Watched(Recording):
        def capture(self, *parts: Any) -> Any:
            seen.append((gc.isenabled(), gc.get_freeze_count() > 1000))
            return super().capture(*parts)

    monkeypatch.setattr(device, "Recording", Watched)
    monkeypatch.setattr(device, "gc", SimpleNamespace(collect=gc.collect, freeze=int))  # nothing is frozen before
    assert gc.isenabled()
    gc.unfreeze()
    Served(tiny_folder, enable_cudagraph_gc=collects)
    assert seen[-4:] == [(True, not collects)] * 4  # those before were for their memory to be measured
    assert gc.get_freeze_count() == 0
    gc.disable()  # as in a server that loads
    try:
        Served(tiny_folder, enable_cudagraph_gc=collects)
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert seen[-4:] == [(collects, False)] * 4


@pytest.mark.sweep
@pytest.mark.parametrize("is_profiled", [False, True])
def test_a_profile_of_the_captures_is_logged(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture, is_profiled: bool
) -> None:
    with caplog.at_level("INFO", "fwk_features.around_captures.worker"):
        served = Served(tiny_folder, enable_profile_cuda_graph=is_profiled)
    tables = [record.getMessage() for record in caplog.records if record.name == "fwk_features.around_captures.worker"]
    assert len(tables) == is_profiled
    assert all(
        "capturing steps, by self_cpu_time_total" in table and "Self CPU time total" in table for table in tables
    )
    assert served.replays > 0


@pytest.mark.parametrize("name", ["enable_cudagraph_gc", "enable_profile_cuda_graph"])
def test_what_is_around_no_capture_is_refused(tiny_folder: Path, name: str) -> None:
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=f"{option} and --disable-cuda-graph: nothing is captured"):
        Served(tiny_folder, disable_cuda_graph=True, **{name: True})
    with pytest.raises(ConfigError, match=f"{option}: on this device one capture serves steps of all sizes"):
        on_cpu(tiny_folder, **{name: True})


def test_on_a_cpu_one_capture_serves_all_sizes(tiny_folder: Path) -> None:
    with pytest.raises(ConfigError, match="--cuda-graph-bs: on this device one capture serves steps of all sizes"):
        fwk.LLM(str(tiny_folder), device="cpu", **OPTIONS | {"attention_backend": "torch", "cuda_graph_bs": (4,)})


def test_an_attention_that_plans_anew_says_so(tiny_folder: Path) -> None:
    served = Served(tiny_folder, attention_backend="torch")
    assert served.how == "eager (attention torch plans each step anew)"


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    "options", [{}, {"disable_cuda_graph": True}, pytest.param(TRITON | ONE_SIZE, marks=pytest.mark.sweep)], ids=str
)
def test_no_pinned_memory_is_made_while_serving(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """The device is waited for, each time: however many sequences decode alongside prompts, buffers are the same."""
    added: list[str] = []
    mixed = set[int]()
    add, turn = StagingRing.add, InputBuffers.prepare
    prompts = [[5 + n] * (9 * n + 1) for n in range(12)]
    ends = [SamplingParams(max_tokens=n % 5 + 2, temperature=0.0, ignore_eos=True) for n in range(12)]

    def prepare(self: InputBuffers, *parts: Any, **named: Any) -> Any:
        forward, rows = turn(self, *parts, **named)
        num_new = np.diff(forward.query_start_np)
        if num_new.max() > 1:
            mixed.add(int((num_new == 1).sum()))
        return forward, rows

    def counted(self: StagingRing, name: str, *rest: Any) -> None:
        added.append(name)
        add(self, name, *rest)

    settings = OPTIONS | {"chunked_prefill_size": 16} | options
    with kernels_of(settings), serving(tiny_folder, **settings) as llm:
        monkeypatch.setattr(StagingRing, "add", counted)
        monkeypatch.setattr(InputBuffers, "prepare", prepare)
        few = slice(5 if "triton" in options.values() else None)
        llm.generate(prompts[few], ends[few])
    assert len(mixed) > 1, "steps of prompts alone"
    assert added == []


def test_a_start_outlives_a_capture_that_fails(
    tiny_folder: Path, wanted: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one, by the plugin's own code: memory is given back after it, and each step is computed and right."""
    graphs = FakeGraphs(monkeypatch)

    class Spoiled(CudaCapture):
        def capture(self, step: Callable[[StepSize], StepOutput], most: StepSize) -> Graph:
            def run(size: StepSize) -> StepOutput:
                graphs.is_spoiled = graphs.is_capturing and size.num_seqs < 8
                return step(size)

            return super().capture(run, most)

    def trim(self: device.Pretended, where: Any) -> None:
        failed_before_trims.append(graphs.calls.count("begin") - graphs.calls.count("end"))
        graphs.empty_cache()
        given_back(self, where)

    failed_before_trims, given_back = list[int](), device.Pretended.trim
    monkeypatch.setattr(device.Pretended, "trim", trim)
    monkeypatch.setattr(device, "Recording", Spoiled)
    served = Served(tiny_folder, ENDING)
    reason = "CUDA error: operation failed due to a previous error during capture"
    assert served.how == f"eager (a step of 4 sequences: {reason})"
    assert served.tokens == wanted
    assert max(failed_before_trims) > 0, "memory was given back before any failed"
    assert torch.cuda.current_stream() is graphs.current


def test_experts_that_the_host_waits_for_are_not_even_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture that fails costs a device more than a sentence."""
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE))
    tried: list[str] = []

    class Told(Recording):
        def capture(self, *parts: Any) -> Any:
            tried.append("whole")
            return super().capture(*parts)

        def capture_pieces(self, *parts: Any) -> Any:
            tried.append("in pieces")
            return super().capture_pieces(*parts)

    monkeypatch.setattr(device, "Recording", Told)
    served = Served(tmp_path, moe_runner_backend="torch")
    assert served.how == "eager (MoE runner torch makes the host wait for the device)"
    assert served.tokens == on_cpu(tmp_path, moe_runner_backend="torch")
    with pytest.raises(ConfigError, match="--enable-piecewise-cuda-graph: MoE runner torch makes the host wait"):
        Served(tmp_path, moe_runner_backend="torch", enable_piecewise_cuda_graph=True)
    assert tried == []


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"speculative_algorithm": "ngram"}], ids=["next tokens", "drafts"])
def test_other_weights_are_captured_anew(tmp_path: Path, options: dict[str, Any]) -> None:
    first, second = (save_llama(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    options = options | {"load_format": "auto"}
    wanted = {path: on_cpu(path, **options) for path in (first, second)}
    assert wanted[first] != wanted[second]
    with flashinfer_stand_in(), serving(first, **OPTIONS | options) as llm:
        for path in (first, second, first):
            llm.update_weights(str(path))
            JOURNAL.clear()
            assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == wanted[path]
            assert JOURNAL.launches["graph"] > 0
    assert JOURNAL.faults == []
