"""Two nodes, each a ``fwk serve`` on loopback, say what one process says; they start, differ and end together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, EngineDead
from tests.helpers.adapters import make_adapter, make_base
from tests.helpers.checkpoints import make_checkpoint, reference_greedy, token_ids
from tests.helpers.client import connect
from tests.helpers.engine_death import begin
from tests.helpers.ports import free_port
from tests.helpers.rig import Server, is_alive, until, write_model
from tests.helpers.servers import Start

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(600)]

PROMPTS = [token_ids(n, n) for n in (3, 40, 17)]
SAMPLING = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True)
FLOAT32 = ("--dtype", "float32")


class Machines:
    """Servers of one run, each a node."""

    def __init__(self, model: Path, python_path: str, folder: Path) -> None:
        self.model = model
        self._python_path = python_path
        secret = folder / "secret"
        secret.write_text("0123456789abcdef")
        address = f"127.0.0.1:{free_port()}"
        self.options: dict[str, Any] = {"nnodes": 2, "dist_init_addr": address, "dist_token_file": str(secret)}
        self.servers: list[Server] = []

    def flags(self) -> list[str]:
        return [text for name, value in self.options.items() for text in (f"--{name.replace('_', '-')}", str(value))]

    def node(self, rank: int, *flags: str, model: Path | None = None, has_tests_plugins: bool = True) -> Server:
        given = ("--tensor-parallel-size", "2", *self.flags(), "--node-rank", str(rank), *flags)
        python_path = self._python_path if has_tests_plugins else None
        self.servers.append(Server(model or self.model, *given, python_path=python_path))
        return self.servers[-1]


@pytest.fixture
def machines(tiny_model: Path, python_path: str, tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tiny_model, python_path, tmp_path)
    yield made
    for server in made.servers:
        server.close()


def ended(node: Server) -> int:
    return node.process.wait(30)


async def test_two_nodes_serve_and_one_that_died_is_awaited(machines: Machines, spawn: Start) -> None:
    one = spawn(*FLOAT32)
    flags = (*FLOAT32, "--health-monitor", "true")
    other = machines.node(1, *flags)
    until(lambda: "joins node 0" in other.log, 30, "the second node, first")
    first = machines.node(0, *flags).start()
    assert first.golden == one.golden
    [rank] = psutil.Process(other.process.pid).children()
    async with connect(first) as client:
        streams, running = await begin(client, 8)
        rank.send_signal(signal.SIGKILL)
        await running
    assert all(streamed.is_done for streamed in streams)
    assert all("engine" in streamed.errors[0]["message"] for streamed in streams)
    assert f"the engine's worker of rank 1 on node 1 (127.0.0.1) was killed by signal {signal.SIGKILL:d}" in first.log
    await asyncio.to_thread(until, lambda: first.health() == 200, 40, "the next engine serves")
    assert first._golden() == one.golden
    assert "this node waits up to 60 seconds for another engine" in other.log
    assert first.stop() == 0
    assert ended(other) == 0


def test_each_of_two_nodes_has_a_stage(machines: Machines, spawn: Start) -> None:
    """Two tensor-parallel ranks on each."""
    one = spawn(*FLOAT32)
    flags = (*FLOAT32, "--pp-size", "2")
    other, first = machines.node(1, *flags), machines.node(0, *flags).start()
    assert first.golden == one.golden
    assert len(psutil.Process(other.process.pid).children()) == 2
    assert first.get("/server_info").json()["chosen"]["stages"].startswith("2 ")
    assert first.stop() == 0
    assert ended(other) == 0


def test_nodes_end_with_node_0_however_it_ends(machines: Machines) -> None:
    flags = (*FLOAT32, "--dist-timeout", "12")
    first, other = machines.node(0, *flags), machines.node(1, *flags)
    first.wait_ready()
    ranks = psutil.Process(other.process.pid).children()
    first.process.kill()
    assert ended(other) == EngineDead.exit_code
    assert not any(map(is_alive, ranks))
    assert "closed its connection without a word" in other.log
    assert "could not be joined within 12 seconds" in other.log


@pytest.mark.parametrize("differs", ["option", "files"])
def test_nodes_that_differ_do_not_serve(machines: Machines, tmp_path: Path, differs: str) -> None:
    changed = write_model(tmp_path / "changed", rope_theta=20000.0) if differs == "files" else machines.model
    given = ("--page-size", "32") if differs == "option" else ()
    first = machines.node(0, *FLOAT32)
    other = machines.node(1, *FLOAT32, *given, model=changed)
    assert (ended(first), ended(other)) == (ConfigError.exit_code, ConfigError.exit_code)
    what = "--page-size differs: 16 on node 0, 32 on" if given else "--model (what its files hold) differs: "
    for server in (first, other):
        assert server.log.count(what) == 1, server.log
        assert "Traceback" not in server.log


def test_a_node_that_does_not_come_ends_the_others(machines: Machines) -> None:
    first = machines.node(0, *FLOAT32, "--dist-timeout", "3")
    assert ended(first) == EngineDead.exit_code
    assert "after 3 seconds (--dist-timeout) node 1 of 2 had not come" in first.log


def generated(llm: fwk.LLM, **options: Any) -> list[list[int]]:
    return [done.token_ids for done in llm.generate(PROMPTS, SAMPLING, **options)]


def both(machines: Machines, work: Callable[[fwk.LLM], Any], folder: Path, **options: Any) -> tuple[Any, Any]:
    """What an ``LLM`` does alone, and as node 0 of two."""
    given: dict[str, Any] = options | {
        "dtype": "float32",
        "max_total_tokens": 512,
        "device": "cpu",
        "check_blocks": True,
    }
    alone_options: dict[str, Any] = given | {"ep_size": 1}
    with fwk.LLM(str(folder), **alone_options) as llm:
        alone = work(llm)
    flags = [text for name, value in given.items() for text in (f"--{name.replace('_', '-')}", str(value).lower())]
    other = machines.node(1, "--load-format", "auto", *flags, model=folder, has_tests_plugins=False)
    with fwk.LLM(str(folder), **given, **machines.options, tensor_parallel_size=2) as llm:
        together = work(llm)
    assert ended(other) == 0
    return alone, together


def test_adapters_and_weights_reach_every_node(machines: Machines, tmp_path: Path) -> None:
    """Both are loaded while the engine runs, from each node's own files."""
    base = make_base(tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "adapter")
    update = make_base(tmp_path / "update", seed=1)

    def work(llm: fwk.LLM) -> list[list[list[int]]]:
        llm.load_adapter("a", str(adapter))
        found = [generated(llm), generated(llm, adapter="a")]
        llm.update_weights(str(update))
        return [*found, generated(llm)]

    alone, together = both(machines, work, base, enable_lora=True)
    assert together == alone
    assert len({str(tokens) for tokens in alone}) == 3, "each makes a difference"


def test_experts_on_two_nodes(machines: Machines, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path / "model", "qwen3_moe")
    alone, together = both(machines, generated, tmp_path / "model", ep_size=2)
    assert together == alone == [reference_greedy(reference, prompt, 10) for prompt in PROMPTS]
