"""``--numa-node``: workers keep to a node's processors and memory."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, FwkError
from fwk.interfaces.device import DeviceContext
from fwk_devices._common import numa
from fwk_devices._common.numa import NumaOptions, keep_to_node, processors
from fwk_devices.cpu.device import Cpu
from fwk_devices.cuda.device import Cuda

HERE = (sys.platform, platform.machine())
pytestmark = pytest.mark.skipif(
    not numa.NODES.exists() or platform.machine() not in numa.SET_MEMPOLICY, reason=f"needs Linux with NUMA, not {HERE}"
)
GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


def in_a_thread(run: Callable[[], Any]) -> Any:
    """What it returns or raises, in a thread whose place does not matter to other tests."""
    found: list[Any] = []

    def catch() -> None:
        try:
            found.append(run())
        except FwkError as error:
            found.append(error)

    thread = threading.Thread(target=catch)
    thread.start()
    thread.join()
    if isinstance(found[0], FwkError):
        raise found[0]
    return found[0]


def policy() -> tuple[int, int]:
    """Of the calling thread, as the kernel has it: its mode, and the nodes as bits."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 16)()
    call = ctypes.CDLL(None, use_errno=True).syscall
    assert call(GET_MEMPOLICY[platform.machine()], ctypes.byref(mode), mask, 1024 + 1, None, 0) == 0
    return mode.value, mask[0]


@pytest.fixture
def two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with a processor in node 1 and all others in node 0; returns the nodes whose memory was preferred."""
    mine = sorted(os.sched_getaffinity(0))
    for node, cores in enumerate((mine[:-1], mine[-1:])):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(",".join(map(str, cores)) + "\n")
    preferred: list[int] = []
    monkeypatch.setattr(numa, "NODES", tmp_path)
    monkeypatch.setattr(numa, "_prefer_memory_of", preferred.append)
    return preferred


def test_lists_of_processors() -> None:
    assert processors("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert processors("\n") == set()


def test_the_kernel_has_the_place() -> None:
    before = policy()

    def place() -> tuple[int | None, set[int], tuple[int, int]]:
        return keep_to_node(NumaOptions(numa_node=(0,)), 0), os.sched_getaffinity(0), policy()

    cores, affinity, (mode, nodes) = in_a_thread(place)
    listed = processors((numa.NODES / "node0/cpulist").read_text())
    assert affinity == listed & os.sched_getaffinity(0)
    assert cores == len(affinity)
    assert (mode, nodes) == (numa.PREFERRED, 1)
    assert policy() == before


def test_each_worker_has_the_node_of_its_place(two_nodes: list[int]) -> None:
    mine, options = sorted(os.sched_getaffinity(0)), NumaOptions(numa_node=(1, 0, 1))
    for index, node in enumerate(options.numa_node):
        wanted = mine[-1:] if node else mine[:-1]
        if not wanted:
            continue  # a machine with one processor

        def place(index: int = index) -> set[int]:
            keep_to_node(options, index)
            return os.sched_getaffinity(0)

        assert in_a_thread(place) == set(wanted)
    assert two_nodes == [node for node in options.numa_node if node or len(mine) > 1]


def test_nothing_asked_for_is_nothing_done(two_nodes: list[int]) -> None:
    assert keep_to_node(None, 3) is None
    assert keep_to_node(NumaOptions(), 3) is None
    assert two_nodes == []


def test_a_cpu_worker_has_no_more_threads_than_its_node(two_nodes: list[int]) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        device = in_a_thread(lambda: Cpu(DeviceContext(NumaOptions(numa_node=(1,)))).take(0))
        assert device == torch.device("cpu")
        assert in_a_thread(torch.get_num_threads) == 1
    finally:
        torch.set_num_threads(before)


def test_a_gpus_worker_is_placed_too(two_nodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    taken = in_a_thread(lambda: Cuda(DeviceContext(NumaOptions(numa_node=(1, 1)))).take(1))
    assert taken == torch.device("cuda", 1)
    assert two_nodes == [1]


@pytest.mark.parametrize(
    ("nodes", "index", "why"),
    [
        ((7,), 0, "--numa-node 7: this machine has 0, 1"),
        ((0,), 1, "names nodes of 1 workers, and this run has at least 2"),
        ((2,), 0, "may use none of the node's processors"),
    ],
)
def test_places_that_are_not_there(
    two_nodes: list[int], tmp_path: Path, nodes: tuple[int, ...], index: int, why: str
) -> None:
    if nodes == (2,):
        (tmp_path / "node2").mkdir()
        (tmp_path / "node2" / "cpulist").write_text("\n")  # memory alone
    with pytest.raises(ConfigError, match=why):
        in_a_thread(lambda: keep_to_node(NumaOptions(numa_node=nodes), index))


@pytest.mark.sweep
def test_an_engine_serves_from_a_node(tiny_llm: Callable[..., fwk.LLM]) -> None:
    def tokens(**options: Any) -> list[int]:
        return tiny_llm(dtype="float32", **options).generate([[5, 6, 7]], GREEDY)[0].token_ids

    plain = tokens()
    assert in_a_thread(lambda: tokens(numa_node=(0,))) == plain
    ranks = {"tensor_parallel_size": 2, "executor": "processes"}
    assert tokens(numa_node=(0, 0), **ranks) == plain
    with pytest.raises(FwkError, match="--numa-node names nodes of 1 workers"):
        tokens(numa_node=(0,), **ranks)
