"""How much memory a process may take, by control groups of both versions and by rlimits; who is ended first."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fwk_process import memory_limits, oom
from fwk_process.memory_limits import MemoryLimit, available_memory, memory_in_words

GIB = 2**30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of control groups, in which nothing is limited yet."""
    monkeypatch.setattr(memory_limits, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory_limits, "PROC", tmp_path / "proc")
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def test_version_2_bounds_by_the_least_of_all_groups_above(groups: Path) -> None:
    write(groups / "proc", cgroup="0::/pod/container")
    write(groups / "cgroup/pod", memory__max=str(2 * GIB), memory__current=str(GIB), memory__stat="inactive_file 0")
    stat = f"anon 5\ninactive_file {GIB // 4}"
    write(groups / "cgroup/pod/container", memory__max="max", memory__current=str(GIB // 2), memory__stat=stat)
    write(groups / "cgroup/pod/container", memory__high=str(GIB))
    assert memory_limits.memory_limits() == [
        MemoryLimit("cgroup v2 memory.high", GIB, GIB // 4),
        MemoryLimit("cgroup v2 memory.max", 2 * GIB, GIB),
    ]
    assert available_memory() == 3 * GIB // 4
    assert (
        "cgroup v2 memory.high 1.0 GiB (0.8 GiB left), cgroup v2 memory.max 2.0 GiB (1.0 GiB left)" in memory_in_words()
    )


def test_version_1_of_a_container_that_sees_only_its_own_group(groups: Path) -> None:
    write(groups / "proc", cgroup="5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/")
    root = groups / "cgroup/memory"
    write(
        root,
        memory__limit_in_bytes=str(GIB),
        memory__usage_in_bytes=str(GIB // 2),
        memory__stat="total_inactive_file 0",
    )
    assert [limit.left for limit in memory_limits.memory_limits()] == [GIB // 2]
    write(root, memory__limit_in_bytes=str(2**63 - 4096))
    assert memory_limits.memory_limits() == []
    assert memory_in_words().endswith("no limit by a control group or rlimit")


@pytest.mark.usefixtures("groups")
def test_without_control_groups_the_machine_is_the_limit() -> None:
    assert available_memory() > 0
    assert f"memory: {psutil.virtual_memory().total / GIB:.1f} GiB" in memory_in_words()


def test_rlimits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    most = {resource.RLIMIT_AS: 64 * GIB, resource.RLIMIT_DATA: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda which: (most[which], resource.RLIM_INFINITY))
    [limit] = [limit for limit in memory_limits.memory_limits() if limit.source.startswith("RLIMIT")]
    assert (limit.source, limit.num_bytes) == ("RLIMIT_AS", 64 * GIB)
    assert 0 < limit.used < 64 * GIB


@pytest.mark.skipif(not oom.SCORE.exists(), reason="no such number on this system")
def test_a_victim_and_its_children_go_first() -> None:
    code = (
        "from fwk_process.oom import prefer_as_victim; import subprocess, sys; prefer_as_victim();"
        "print(subprocess.check_output(['cat', '/proc/self/oom_score_adj']).decode())"
    )
    before = int(oom.SCORE.read_text())
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(shown) == min(1000, before + oom.VICTIM)
    assert int(oom.SCORE.read_text()) == before, "the caller is as it was"
