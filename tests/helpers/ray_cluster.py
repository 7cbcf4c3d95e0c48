"""A real Ray of this process's own on this machine, without a dashboard and without metrics."""

from __future__ import annotations

import contextlib
import importlib
import logging
import secrets
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from fwk.interfaces.declaration import Host
from fwk.plugins import discover, find
from tests.helpers.packages import import_path
from tests.helpers.ports import free_port

OBJECT_STORE_BYTES = 80 * 2**20

SECONDS = 30.0

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # no idle workers: each imports for a second
    "RAY_enable_metrics_collection": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "2",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else one is written into the user's home
}


@cache
def missing() -> str | None:
    """What ``executors.ray`` lacks here, and how to get it."""
    refusal = find(discover(), "executors", "ray").declaration.needs.refusal(Host())
    return f"executors.ray {refusal}" if refusal else None


needs_ray = pytest.mark.skipif(missing() is not None, reason=missing() or "")


@contextmanager
def local_ray(num_cpus: int = 4) -> Iterator[Any]:
    """Ray with so many CPUs, however many this machine has; nothing is left of it."""
    with tempfile.TemporaryDirectory(prefix="fwk-ray-") as folder, pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", import_path(Path(__file__).parents[2]))
        import ray  # pyright: ignore[reportMissingImports]  # reads its environment now, and not again

        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
        try:
            yield ray
        finally:
            node = importlib.import_module("ray._private.worker")._global_node
            processes = [info.process for infos in node.all_processes.values() for info in infos]
            ray.shutdown()
            for process in processes:  # Ray does not wait for those that it ends, and Python warns of it
                process.wait(SECONDS)


class FakeRay:
    """Remembers a cluster; ``init`` tries for ever, whatever is raised."""

    def __init__(self, remembered: str) -> None:
        self._private = SimpleNamespace(services=self)
        self._remembered = remembered
        self.num_tries = 0

    def canonicalize_bootstrap_address(self, address: str) -> str:
        assert address == "auto"
        if not self._remembered:
            raise ConnectionError("Could not find any running Ray instance")
        return self._remembered

    def is_initialized(self) -> bool:
        return False

    def shutdown(self) -> None:
        pass

    def init(self, **_: object) -> None:
        while True:
            self.num_tries += 1
            with contextlib.suppress(Exception):
                time.sleep(0.01)


class LocalCluster:
    """A head that offers nothing, and nodes of one CPU each, all on this machine."""

    def __init__(self, num_nodes: int) -> None:
        cluster_utils = importlib.import_module("ray.cluster_utils")
        self._head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
        self._head["gcs_server_port"] = free_port()
        self._cluster = cluster_utils.Cluster()
        self.start_head()
        self.address: str = self._cluster.address
        self.nodes = [self.add() for _ in range(num_nodes)]

    def add(self) -> Any:
        return self._cluster.add_node(num_cpus=1, object_store_memory=OBJECT_STORE_BYTES)

    def kill(self, node: Any) -> None:
        """Its raylet, as a machine that is switched off."""
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """Its raylet, and what all nodes register at."""
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)

    def start_head(self) -> None:
        """Another one at the address of the first, which knows of no node."""
        self._cluster.add_node(**self._head)

    def close(self) -> None:
        self._cluster.shutdown()


@contextmanager
def local_cluster(num_nodes: int) -> Iterator[LocalCluster]:
    """Nothing is left of it."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="fwk-ray-") as folder:
        # A node that is killed is missed at once, by its connections; one that is slow to start is waited for.
        slow = {"RAY_health_check_timeout_ms": "20000", "RAY_raylet_start_wait_time_s": "120"}
        own = {"RAY_TMPDIR": folder, **slow}
        for name, value in {**ENVIRONMENT, **own}.items():
            patch.setenv(name, value)
        found = LocalCluster(num_nodes)
        try:
            yield found
        finally:
            found.close()


def engine_processes() -> list[psutil.Process]:
    """Those that actors have started."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if (
            "fwk.engine.process" in words
            and (parent := process.parent())
            and "EngineActor" in "".join(parent.cmdline())
        ):
            found.append(process)
    return found
