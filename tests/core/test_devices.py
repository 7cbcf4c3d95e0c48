"""Which device a run takes, and what a rank gets of it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

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


class FakeGraphs:
    """torch.cuda's graphs, as their documentation describes them, in the order they were used."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.is_capturing = False
        owner = self

        class Stream:
            def wait_stream(self, other: Stream) -> None:
                owner.calls.append("own waits" if self is owner.own else "current waits")

        class Graph:
            def replay(self) -> None:
                owner.calls.append("replay")

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            assert stream is owner.own
            yield

        @contextmanager
        def capturing(graph: Graph, pool: str, stream: Stream, capture_error_mode: str) -> Iterator[None]:
            assert (pool, stream, capture_error_mode) == ("pool", owner.own, "thread_local")
            owner.is_capturing = True
            yield
            owner.is_capturing = False

        self.current, self.own = Stream(), Stream()
        fakes = {
            "Stream": lambda: self.own,
            "CUDAGraph": Graph,
            "graph": capturing,
            "stream": on,
            "current_stream": lambda: self.current,
            "graph_pool_handle": lambda: "pool",
        }
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)


def test_a_cuda_graph_is_captured_after_runs_that_warm_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    real = inspect.signature(torch.cuda.graph.__init__)
    assert [*real.parameters][1:5] == ["cuda_graph", "pool", "stream", "capture_error_mode"]
    fakes = FakeGraphs(monkeypatch)
    capture, size, output = CudaCapture(), StepSize(2, 2, 2, 2), (torch.zeros(2, 4), None)

    def step(asked: StepSize) -> StepOutput:
        assert asked == size
        fakes.calls.append("captured" if fakes.is_capturing else "run")
        return output

    graph = capture.capture(step, size)
    assert fakes.calls == ["own waits", "run", "run", "current waits", "captured"]
    assert graph.replay(size) is output
    assert fakes.calls[-1] == "replay"


def test_a_step_that_no_cuda_graph_can_hold_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = FakeGraphs(monkeypatch)

    def step(size: StepSize) -> StepOutput:
        if fakes.is_capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nCompile with ...")
        return torch.zeros(2, 4), None

    with pytest.raises(NotCapturable, match=r"a step of 2 sequences: CUDA error: .* is capturing$"):
        CudaCapture().capture(step, StepSize(2, 2, 2, 2))


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
