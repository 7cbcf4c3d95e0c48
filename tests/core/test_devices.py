"""Which device a run takes, and what a rank gets of it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fwk.errors import ConfigError, PluginError
from fwk.interfaces.declaration import Host, Needs
from fwk.interfaces.device import MemoryInfo
from fwk.interfaces.parallel import ParallelGroup, SingleRank
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.setup.devices import choose_device, take_device


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


def test_a_budget_counts_what_others_have_taken() -> None:
    assert MemoryInfo(free=60, total=100).budget(0.9) == 50
    assert MemoryInfo(free=5, total=100).budget(0.9) == -5
    assert MemoryInfo(free=50, total=50).budget(0.1) == 5
