"""The executor of an actor per rank on a Ray cluster: what it asks for, what it says of ranks that fail."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.executors import SECONDS, batch, nobody, run_engine, wait_idle
from tests.helpers.ports import free_port
from tests.helpers.ray_cluster import FakeRay, local_ray, needs_ray
from tests.helpers.remote_worker import recipe
from tests.helpers.rig import until

import fwk
from fwk.errors import ConfigError, EngineDead, ModelLoadError, PluginError
from fwk.interfaces.executor import ExecutorContext
from fwk.plugins import discover, find, load_object
from fwk_executors.ray import RayOptions
from fwk_kit.testing.fake_engine import reference

ITEM = find(discover(), "executors", "ray")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ray_address": "ray://head:10001"}, "an address for Ray Client"),
        ({"ray_resources_per_rank": {"GPU": 1}}, "GPU has an option of its own"),
        ({"ray_resources_per_rank": {"node": 0}}, "0 of node cannot be reserved"),
        ({"ray_cpus_per_rank": 0}, "greater than or equal to 1"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RayOptions(**options)


def test_who_lacks_ray_is_told_how_to_get_it(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed_version(package: str) -> str:
        if package == "ray":
            raise PackageNotFoundError(package)
        return version(package)

    monkeypatch.setattr("fwk.interfaces.declaration.installed_version", installed_version)
    with pytest.raises(PluginError, match=r"ray.* needs the package ray>=2\.60,<3: pip install 'ray>=2\.60,<3'"):
        fwk.LLM(str(tiny_folder), load_format="dummy", executor="ray", tensor_parallel_size=2)


Make = Callable[..., Any]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with local_ray() as ray:
        yield ray


@pytest.fixture
def make(cluster: Any) -> Iterator[Make]:
    """Executors of fake workers; afterwards no actor is left of them, and Ray has what they had reserved."""
    executors: list[Any] = []

    def build(size: int = 2, timeout: float = SECONDS, options: Any = None, **config: Any) -> Any:
        context = ExecutorContext(nobody, recipe(**config), size, options, step_timeout=timeout)
        executors.append(load_object(ITEM)(context))
        return executors[-1]

    yield build
    for executor in executors:
        pids = [rank.place.pid for rank in executor._ranks if rank.place]
        executor.close()
        executor.close()
        until(lambda pids=pids: not any(map(psutil.pid_exists, pids)), SECONDS, "the end of the ranks")
    assert cluster.is_initialized(), "it was there before, and stays"
    until(lambda: cluster.available_resources().get("CPU") == 4, SECONDS, "what was reserved is free")


@needs_ray
@pytest.mark.sweep
def test_the_whole_engine_runs_on_it(make: Make) -> None:
    executor = make(num_blocks=18)
    assert executor.load().num_blocks == 18
    prompts = {f"r{i}": [(i * 7 + j) % 90 for j in range(3 + 4 * i)] for i in range(4)}
    _, found = run_engine(executor, prompts, num_blocks=18, chunk_tokens=3)
    assert found == {name: reference(prompt, 12) for name, prompt in prompts.items()}


@needs_ray
@pytest.mark.sweep
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_killed_rank_is_named(make: Make, is_idle: bool) -> None:
    executor = make(faults={"0": {"1": "wait:/nonexistent/never"}})
    executor.load()
    pending = None if is_idle else executor.launch(batch(1, [1, 2, 3]))
    executor.check()
    victim = executor._ranks[1].place.pid
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(EngineDead) as caught:
        wait_idle(executor) if is_idle else executor.collect(pending)
    assert str(caught.value).startswith(f"the engine's worker of rank 1 (pid {victim} on node ")
    assert "has ended" in str(caught.value)
    with pytest.raises(EngineDead, match="rank 1"):
        executor.launch(batch(2))


@needs_ray
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"1": {"1": "raise"}}, r"rank 1 \(pid \d+ on node [\d.]+\) failed: ZeroDivisionError$"),
        ({"0": {"1": "raise"}, "1": {"1": "late_exit"}}, r"rank 1 \(pid \d+ on node [\d.]+\) has ended"),
        ({"1": {"1": "other_token"}}, "ranks 0 and 1 chose different tokens"),
        ({"1": {"1": "stop"}}, r"no answer for 3 seconds from the engine's worker of rank 1 \(pid"),
    ],
)
def test_a_step_that_fails_names_the_rank(make: Make, faults: dict[str, Any], message: str) -> None:
    executor = make(timeout=3.0 if "stop" in str(faults) else SECONDS, faults=faults)
    executor.load()
    with pytest.raises(EngineDead, match=message) as caught:
        executor.collect(executor.launch(batch(1, [1, 2, 3])))
    assert ("a fault of the tests" in caught.value.detail) == ("failed" in message)


@needs_ray
@pytest.mark.sweep
@pytest.mark.parametrize(
    ("faults", "error", "message"),
    [
        ({"1": {"0": "refuse"}, "0": {"0": "wait:/nonexistent/never"}}, ModelLoadError, "^9 heads cannot be shared$"),
        ({"0": {"0": "wait:/nonexistent/never"}, "1": {"0": "exit"}}, EngineDead, r"rank 1 \(pid .*has ended"),
    ],
)
def test_a_rank_that_cannot_load(make: Make, faults: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(faults=faults).load()


@needs_ray
@pytest.mark.sweep
def test_what_cannot_be_reserved_is_said(make: Make) -> None:
    options = RayOptions(ray_timeout=1.0, ray_resources_per_rank={"nowhere": 1.0})
    with pytest.raises(
        EngineDead, match=r"not reserved 2 x 1 CPU, 1 nowhere \(pack\) within 1 seconds .*free are 4 CPU"
    ):
        make(options=options).load()


@needs_ray
@pytest.mark.sweep
@pytest.mark.parametrize("given", ["auto", None])
def test_a_cluster_that_was_killed_is_told_at_once(
    given: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ray keeps the address of one that was not stopped. Without --ray-address a new one is started."""
    from fwk_executors.ray import cluster as module

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    address = f"127.0.0.1:{free_port()}"
    fake = FakeRay(address)
    joined: list[str | None] = []
    monkeypatch.setattr(module, "ray", fake)
    monkeypatch.setattr(module, "_init", lambda found, num_cpus: joined.append(found))
    why = f"no Ray cluster can be joined at {address}, where Ray knows one of this machine: Connection refused; "
    if given is None:
        assert module.connect(given, 1)
        module.leave()
        assert joined == ["local"]
        assert caplog.messages[0].startswith(why)
    else:
        with pytest.raises(ConfigError, match=why):
            module.connect(given, 1)
        assert not joined


@needs_ray
@pytest.mark.sweep
def test_a_cluster_that_does_not_answer_is_waited_for_with_words(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from fwk_executors.ray import cluster as module

    monkeypatch.setattr(module, "SAY_SECONDS", 0.05)
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.3)
    monkeypatch.setattr(module, "ray", FakeRay(""))
    signal.setitimer(signal.ITIMER_REAL, 0)  # pytest's: there is no bound where a program has an alarm of its own
    with socket.create_server(("127.0.0.1", 0)) as silent, caplog.at_level("INFO", "fwk.engine"):
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"has not answered for 0\.3 seconds; run `ray start --head`"):
            module.connect(address, 1)
    assert caplog.messages[0] == f"joining Ray at {address}"
    assert f"waiting for Ray at {address} to answer, for 0 seconds so far" in caplog.messages
