"""A server with nothing to do leaves the cores to others."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.servers import Start


@pytest.mark.sweep
def test_an_idle_server_uses_no_cpu(spawn: Start) -> None:
    """After requests at once and one by one, on more threads than one: neither process waits by spinning."""
    server = spawn("--cpu-threads", "2")
    for n in (1, 4):
        assert server.post({"prompt": "once", "max_tokens": 8, "n": n}).status_code == 200
    grammar = {"prompt": "once", "max_tokens": 8, "structured_outputs": {"regex": "[ab]{2}"}}
    assert server.post(grammar).status_code == 200, "its helper process has started, too"
    loaded = Path(f"/proc/{server.engines()[0].pid}/maps").read_text()
    assert "libtorch" in loaded
    assert "libtriton" not in loaded, "torch's compiler was imported: 130 MB, and seconds of the start"
    processes = [*server.children(), psutil.Process(server.process.pid)]
    assert len(processes) == 3, "engine, helper and API process"
    used = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(2)
    for process, before in zip(processes, used, strict=True):
        assert sum(process.cpu_times()[:2]) - before < 0.2, f"{process.cmdline()} used the CPU for nothing"
