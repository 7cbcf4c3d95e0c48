"""The executor of a process per rank: what it sends, what it says of ranks that fail; nothing outlives it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.executors import ITEM, SECONDS, batch, nobody, run_engine, wait_idle
from tests.helpers.packages import import_path
from tests.helpers.remote_worker import EXIT_CODE, recipe

from fwk.errors import EngineDead, InvalidRequest, ModelLoadError
from fwk.interfaces.executor import ExecutorContext
from fwk.plugins import load_object
from fwk_kit.testing.fake_engine import reference

ONE_SECOND = 1.0
NOISE = 2.0
"""What a busy machine may add to any time."""


Make = Callable[..., Any]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Executors of fake workers; afterwards no process and no file is left of them."""
    executors: list[Any] = []
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    # Ranks import nothing from the current directory.
    monkeypatch.setenv("PYTHONPATH", import_path(Path(__file__).parents[3]))

    def build(size: int = 2, timeout: float = SECONDS, **config: Any) -> Any:
        executors.append(load_object(ITEM)(ExecutorContext(nobody, recipe(**config), size, step_timeout=timeout)))
        return executors[-1]

    yield build
    for executor in executors:
        pids = [rank.pid for rank in executor._ranks]
        started = time.monotonic()
        executor.close()
        executor.close()
        assert time.monotonic() - started < SECONDS
        assert not any(psutil.pid_exists(pid) for pid in pids)
    assert [path for path in tmp_path.iterdir() if path.name.startswith("fwk-")] == []


def pid(executor: Any, rank: int) -> int:
    return executor._ranks[rank].pid


@pytest.mark.sweep
@pytest.mark.parametrize("size", [2, 1])
def test_the_whole_engine_runs_on_it(make: Make, size: int) -> None:
    executor = make(size, num_blocks=18)
    assert executor.load().num_blocks == 18
    prompts = {f"r{i}": [(i * 7 + j) % 90 for j in range(3 + 4 * i)] for i in range(7)}
    engine, found = run_engine(executor, prompts, num_blocks=18, chunk_tokens=3)
    assert found == {name: reference(prompt, 12) for name, prompt in prompts.items()}
    assert engine.stats().preemptions > 0


def test_a_step_is_launched_while_one_runs_however_long_its_message(make: Make, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    executor = make(faults={"0": {"1": f"wait:{gate}"}})
    executor.load()
    first = executor.launch(batch(1, [1, 2, 3]))
    long = batch(2, [1] * 250_000)  # more than the sockets hold
    long.freed_slots.append(0)
    second = executor.launch(long)
    gate.touch()
    assert executor.collect(first).sequences[0].token_ids == reference([1, 2, 3], 1)
    assert executor.collect(second).step == 2


@pytest.mark.sweep
@pytest.mark.parametrize("is_idle", [True, False])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_within_a_second(make: Make, tmp_path: Path, rank: int, is_idle: bool) -> None:
    executor = make(faults={str(1 - rank): {"1": f"wait:{tmp_path / 'never'}"}})
    executor.load()
    pending = None if is_idle else executor.launch(batch(1, [1, 2, 3]))
    executor.check()
    victim = pid(executor, rank)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(EngineDead) as caught:
        wait_idle(executor) if is_idle else executor.collect(pending)
    assert time.monotonic() - killed < ONE_SECOND + NOISE
    assert str(caught.value) == f"the engine's worker of rank {rank} (pid {victim}) was killed by signal 9 (SIGKILL)"
    with pytest.raises(EngineDead, match="SIGKILL"):
        executor.launch(batch(2))


@pytest.mark.sweep
def test_a_rank_that_hangs_is_named_when_its_time_is_up(make: Make) -> None:
    executor = make(timeout=1.0, faults={"1": {"1": "stop"}})
    executor.load()
    pending = executor.launch(batch(1, [1, 2, 3]))
    with pytest.raises(EngineDead) as caught:
        executor.collect(pending)
    expected = f"no answer for 1 seconds: the engine's worker of rank 1 (pid {pid(executor, 1)}) is stopped"
    assert str(caught.value) == expected


def test_a_rank_that_raises_is_named_and_its_story_is_for_the_log(make: Make) -> None:
    executor = make(faults={"1": {"1": "raise"}})
    executor.load()
    pending = executor.launch(batch(1, [1, 2, 3]))
    with pytest.raises(EngineDead) as caught:
        executor.collect(pending)
    assert str(caught.value) == f"the engine's worker of rank 1 (pid {pid(executor, 1)}) failed: ZeroDivisionError"
    assert "a fault of the tests" in caught.value.detail
    assert "_commit" in caught.value.detail


def test_the_dead_are_to_blame_rather_than_those_they_were_dear_to(make: Make) -> None:
    """A rank whose peer dies fails in its collective, and may be heard first."""
    executor = make(faults={"0": {"1": "raise"}, "1": {"1": "late_exit"}})
    executor.load()
    pending = executor.launch(batch(1, [1, 2, 3]))
    with pytest.raises(EngineDead, match=rf"rank 1 \(pid \d+\) ended with exit code {EXIT_CODE}"):
        executor.collect(pending)


@pytest.mark.sweep
def test_ranks_that_choose_different_tokens_end_the_engine(make: Make) -> None:
    executor = make(faults={"1": {"2": "other_token"}})
    executor.load()
    executor.collect(executor.launch(batch(1, [1, 2, 3])))
    pending = executor.launch(batch(2))
    with pytest.raises(EngineDead, match="ranks 0 and 1 chose different tokens"):
        executor.collect(pending)


def test_operations_reach_every_rank_between_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    executor = make()
    executor.load()
    pending = executor.launch(batch(1, [1, 2, 3]))
    assert executor.call("where", "x", [1]) == [[0, 2, 1, "x", [1]], [1, 2, 1, "x", [1]]]
    assert executor.collect(pending).step == 1, "the step's answer came before the operation's and was kept"
    threads = executor.call("environment", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    assert threads == [{"OMP_NUM_THREADS": "2", "GLOO_SOCKET_IFNAME": "lo"}] * 2
    with pytest.raises(InvalidRequest, match="no such adapter"):
        executor.call("refuse", "such adapter")
    with pytest.raises(InvalidRequest, match="not here"):
        executor.call("refuse_on_rank_1")
    assert executor.collect(executor.launch(batch(2))).step == 2, "a refused operation harms nothing"
    with pytest.raises(EngineDead, match=r"rank [01] \(pid \d+\) failed: TypeError"):
        executor.call("unknown")


def test_collectives(make: Make) -> None:
    executor = make(connects=True)
    executor.load()
    mine, other = [[0, 1, 2], [3, 4, 5]], [[10, 11, 12], [13, 14, 15]]
    side_by_side = [[0, 1, 2, 10, 11, 12], [3, 4, 5, 13, 14, 15]]
    turned = [[0, 3], [1, 4], [2, 5], [10, 13], [11, 14], [12, 15]]
    summed = [[10, 16], [12, 18], [14, 20]]
    expected = [mine + other, side_by_side, side_by_side, turned, summed, [3.0, 3.0], 6]
    assert executor.call("torch_group") == [expected, expected]


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [1, 0])
def test_a_refusal_to_load_arrives_as_it_was(make: Make, rank: int) -> None:
    executor = make(faults={str(rank): {"0": "refuse"}, str(1 - rank): {"0": "wait:/nonexistent/never"}})
    with pytest.raises(ModelLoadError, match=r"^9 heads cannot be shared$"):
        executor.load()


def test_a_death_while_loading_is_told(make: Make) -> None:
    executor = make(faults={"0": {"0": "wait:/nonexistent/never"}, "1": {"0": "exit"}})
    with pytest.raises(EngineDead, match=rf"rank 1 \(pid \d+\) ended with exit code {EXIT_CODE}"):
        executor.load()


@pytest.mark.sweep
def test_ranks_with_different_numbers_of_blocks_do_not_serve(make: Make) -> None:
    with pytest.raises(EngineDead, match="set up differently"):
        make(faults={"0": {"fewer_blocks": ""}, "1": {"fewer_blocks": ""}}).load()


SCRIPT = """
import sys, time
from tests.plugins.executors.test_processes import ITEM
from tests.plugins.executors.test_processes import nobody
from tests.helpers.remote_worker import recipe
from fwk.interfaces.executor import ExecutorContext
from fwk.plugins import load_object
executor = load_object(ITEM)(ExecutorContext(nobody, recipe(faults={faults}), 2))
import threading
threading.Thread(target=executor.load, daemon=True).start()
while len(executor._ranks) < 2 or ({is_loaded} and not executor._answers == {{}}):
    time.sleep(0.01)
print("RANKS", *[rank.pid for rank in executor._ranks], flush=True)
time.sleep(60)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("is_loaded", [True, False])
def test_ranks_end_by_themselves_when_the_engine_is_killed(tmp_path: Path, is_loaded: bool) -> None:
    faults = {"0": {"hangs_in_close": ""} if is_loaded else {"0": "wait:/nonexistent/never"}}
    code = SCRIPT.format(faults=faults, is_loaded=is_loaded)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        found = re.match(r"RANKS (\d+) (\d+)", process.stdout.readline())
        assert found is not None
        ranks = [psutil.Process(int(number)) for number in found.groups()]
        if not is_loaded:
            time.sleep(1.0)  # they have been told where their files are
        process.kill()
        _, alive = psutil.wait_procs(ranks, timeout=5)
    assert not alive
    assert list(tmp_path.iterdir()) == []
