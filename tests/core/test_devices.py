"""Which device a run takes, and what a rank gets of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.fake_cuda_graphs import FakeGraphs

from fwk.errors import ConfigError, PluginError
from fwk.interfaces.declaration import Host, Needs
from fwk.interfaces.device import DeviceContext
from fwk.interfaces.graphs import NotCapturable, StepOutput, StepSize
from fwk.interfaces.parallel import ParallelGroup, SingleRank
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.setup.devices import choose_device, take_device
from fwk_devices.cuda.graph import CudaCapture


class Ranks(SingleRank):
    """A rank of several, which talk to nobody."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """torch says that there are two NVIDIA GPUs; returns those made current, in order."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    return taken


def chosen(folder: Path, device: str = "auto") -> tuple[str, Host]:
    plugins = discover()
    found = choose_device(build_config(plugins, {"model": str(folder), "device": device}), plugins)
    return found.name, found.host


def test_auto_takes_the_cpu_where_there_is_nothing_else(tiny_folder: Path) -> None:
    assert chosen(tiny_folder)[0] == "cpu"


def test_auto_takes_a_gpu_where_there_is_one(tiny_folder: Path, two_gpus: list[int]) -> None:
    name, host = chosen(tiny_folder)
    assert (name, host.device, host.compute_capability) == ("cuda", "cuda", (9, 0))
    assert chosen(tiny_folder, "cpu")[1].device == "cpu"
    assert two_gpus == [], "choosing takes no device"


def test_torch_for_amd_devices_is_not_taken_for_nvidias(
    tiny_folder: Path, two_gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert chosen(tiny_folder)[1] == Host("rocm", None, chosen(tiny_folder, "cpu")[1].cpu_flags)
    with pytest.raises(ConfigError, match="--device cuda: this torch is built for AMD devices: --device rocm"):
        chosen(tiny_folder, "cuda")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda", "no usable GPU"),
        ("rocm", "this torch is not built for ROCm"),
        ("xpu", "torch sees no Intel GPU"),
        ("mps", "torch sees no Apple GPU"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(tiny_folder: Path, device: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {device}: .*{words}"):
        chosen(tiny_folder, device)


def test_an_unknown_device_is_refused_with_those_installed(tiny_folder: Path) -> None:
    with pytest.raises(PluginError, match=r"unknown device 'gpu'.*installed: .*cuda"):
        chosen(tiny_folder, "gpu")


def test_apples_gpu_has_no_sampler_in_float64(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    name, host = chosen(tiny_folder, "mps")
    assert name == "mps"
    assert Needs(dtypes=("float64",)).refusal(host) == "computes in float64, which a mps device cannot"
    assert chosen(tiny_folder)[0] == "cpu", "auto leaves alone what nothing was shown to run on"


def test_each_rank_takes_a_gpu_of_its_own(tiny_folder: Path, two_gpus: list[int]) -> None:
    plugins = discover()
    device = choose_device(build_config(plugins, {"model": str(tiny_folder)}), plugins).device
    groups: list[ParallelGroup] = [SingleRank(), SingleRank(), Ranks(1, 2)]
    for group, replica, index in zip(groups, (0, 1, 0), (0, 1, 1), strict=True):
        assert take_device(device, "cuda", group, replica) == torch.device("cuda", index)
        assert group.collective == "nccl"
    assert two_gpus == [0, 1, 1], "kernels of a worker are launched on its thread's current device"
    with pytest.raises(ConfigError, match="rank 1 of engine 1 needs a cuda device of its own, but 2 can be seen"):
        take_device(device, "cuda", Ranks(1, 2), 1)


def test_a_rank_on_another_machine_takes_the_first_free_gpu_there(tiny_folder: Path, two_gpus: list[int]) -> None:
    """Ranks 2 and 3 of 4, of which each machine has two."""

    class OnTwoMachines(Ranks):
        @property
        def local_rank(self) -> int:
            return self.rank % 2

        @property
        def local_size(self) -> int:
            return 2

    plugins = discover()
    device = choose_device(build_config(plugins, {"model": str(tiny_folder)}), plugins).device
    taken = [take_device(device, "cuda", OnTwoMachines(rank, 4), 0).index for rank in (2, 3)]
    assert taken == two_gpus == [0, 1]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    return FakeGraphs(monkeypatch)


SIZE = StepSize(2, 2, 2, 2)


def test_a_cuda_graph_is_captured_after_runs_that_warm_it_up(graphs: FakeGraphs) -> None:
    output = torch.zeros(2, 4), None

    def step(asked: StepSize) -> StepOutput:
        assert asked == SIZE
        graphs.calls.append("run")
        return output

    graph = CudaCapture().capture(step, SIZE)
    assert graphs.calls == ["own waits", "run", "run", "current waits", "begin", "run", "end"]
    assert graph.replay(SIZE) is output
    assert graphs.calls[-1] == "replay"


SPOILED = "CUDA error: operation not permitted when stream is capturing\nCompile with ..."
PIECE = r"a piece of a step: CUDA error: operation "


@pytest.mark.parametrize("is_told", [True, False], ids=["by the call", "at the end"])
def test_a_capture_that_fails_leaves_nothing_behind(graphs: FakeGraphs, is_told: bool) -> None:
    """The first reason is told, the stream is what it was, the pool is closed, and what comes next works."""

    def step(cut: Any) -> Any:
        if cut is not None and callable(cut):
            cut()
        if graphs.is_capturing:
            graphs.is_spoiled = True
            if is_told:
                raise RuntimeError(SPOILED)
        return torch.zeros(2, 4), None

    capture, words = CudaCapture(), r"not permitted when stream is capturing$" if is_told else r"failed due to a prev"
    with pytest.raises(NotCapturable, match=rf"a step of 2 sequences: CUDA error: operation {words}"):
        capture.capture(step, SIZE)
    assert graphs.is_as_before()
    graphs.is_spoiled = False
    with pytest.raises(NotCapturable, match=PIECE + words):
        capture.capture_pieces(step)
    assert graphs.streams == []
    assert not graphs.under_way
    assert graphs.num_users == 1, "of the piece that was captured, whose graph gives it up"
    graphs.is_spoiled, graphs.num_users = False, 0
    capture.capture(lambda size: (torch.zeros(2, 4), None), SIZE)
    assert graphs.calls[-2:] == ["begin", "end"]


def test_a_capture_that_cannot_begin_or_is_given_up_leaves_nothing_behind(graphs: FakeGraphs) -> None:
    def give_up(size: StepSize) -> StepOutput:
        if graphs.is_capturing:
            raise NotCapturable("attention reads tensors of its own")
        return torch.zeros(2, 4), None

    with pytest.raises(NotCapturable, match=r"^attention reads"):
        CudaCapture().capture(give_up, SIZE)
    assert not graphs.under_way
    graphs.num_users, graphs.refuses_to_begin = 0, True
    with pytest.raises(NotCapturable, match="a step of 2 sequences: CUDA error: capture cannot begin"):
        CudaCapture().capture(give_up, SIZE)
    assert graphs.is_as_before()


@pytest.mark.parametrize(
    ("flags", "refusal", "stored", "dtype", "words"),
    [
        ({"avx2", "avx512_bf16"}, "finds no compiler", "bfloat16", "bfloat16", None),
        ({"avx2"}, None, "bfloat16", "bfloat16", None),
        ({"avx2"}, None, "float16", "bfloat16", "bfloat16 instead of the checkpoint's float16"),
        ({"avx2"}, "finds no compiler", "float16", "float32", "and what does without finds no compiler"),
        ({"sse4_2"}, None, "bfloat16", "float32", "float32 instead .* no bfloat16 instructions, .* needs AVX2"),
        ({"avx2"}, None, "float32", "float32", None),
    ],
)
def test_a_cpu_takes_the_precision_that_it_computes_fast(
    flags: set[str], refusal: str | None, stored: str, dtype: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fwk_devices.cpu import device

    monkeypatch.setattr(device, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(device.native, "refusal", lambda: refusal)
    defaults = device.Cpu(DeviceContext()).defaults(stored, 32)
    assert defaults.dtype == dtype
    assert defaults.why is None if words is None else re.search(words, defaults.why or "")
