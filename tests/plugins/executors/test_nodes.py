"""Ranks on several machines, each a process of the node's here: how they come together, and how they end.

What was broken to see these fail is in docs/testing.md.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.helpers.executors import ITEM, SECONDS, batch, nobody, run_engine, wait_idle
from tests.helpers.packages import import_path
from tests.helpers.ports import free_port
from tests.helpers.remote_worker import recipe
from tests.helpers.rig import until
from tests.helpers.zygote import zygote

from fwk.engine.node import worker_node
from fwk.errors import ConfigError, EngineDead, FwkError
from fwk.interfaces.executor import ExecutorContext
from fwk.plugins import build_config, discover, load_object
from fwk_executors.processes import ProcessesOptions, wire
from fwk_executors.processes.messages import Frames, Goodbye, Seal, Trouble, Welcome, encode, frame
from fwk_executors.processes.wire import MAGIC, PROTOCOL, Keys, NoPeer, shake_hands
from fwk_kit.testing.fake_engine import reference

COMMON = {"the version of fwk": "1", "--dtype": '"float32"'}
PROMPTS = {f"r{i}": [(i * 7 + j) % 90 for j in range(3 + 4 * i)] for i in range(7)}
EXPECTED = {name: reference(prompt, 12) for name, prompt in PROMPTS.items()}


class Node:
    """The process of a node that is not node 0."""

    def __init__(self, folder: Path, told: dict[str, Any]) -> None:
        self._log = folder / f"node-{time.monotonic_ns()}"
        with self._log.open("wb") as log:
            self.process = zygote().start(["tests.helpers.node_process", json.dumps(told)], os.environ, log.fileno())
        self._seen: list[psutil.Process] = []

    @property
    def log(self) -> str:
        return self._log.read_text()

    def ranks(self) -> list[psutil.Process]:
        self._seen = psutil.Process(self.process.pid).children()
        return self._seen

    def ended(self) -> int:
        """Its exit code, once it and its ranks are gone."""
        code = self.process.wait(SECONDS)
        assert not psutil.wait_procs(self._seen, SECONDS)[1], "no rank outlives its node"
        return code


class Run:
    """One run over nodes: its options, and everything that was started for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "secret").write_text("0123456789abcdef\n")
        self.port = free_port()
        self.executors: list[Any] = []
        self.nodes: list[Node] = []

    def options(self, **changed: Any) -> dict[str, Any]:
        given = {
            "nnodes": 2,
            "dist_init_addr": f"127.0.0.1:{self.port}",
            "dist_token_file": str(self.folder / "secret"),
            "dist_timeout": SECONDS,
        }
        return given | changed

    def executor(self, timeout: float = SECONDS, common: dict[str, str] = COMMON, **options: Any) -> Any:
        config = options.pop("config", {})
        given = ProcessesOptions.model_validate(self.options(**options))
        context = ExecutorContext(
            nobody, recipe(**config), 2 * given.nnodes, given, step_timeout=timeout, common=lambda: common
        )
        self.executors.append(load_object(ITEM)(context))
        return self.executors[-1]

    def node(self, rank: int = 1, common: dict[str, str] = COMMON, **options: Any) -> Node:
        config = options.pop("config", {})
        given = self.options(node_rank=rank, **options)
        told = {"options": given, "size": 2 * given["nnodes"], "common": common, "config": config}
        self.nodes.append(Node(self.folder, told))
        return self.nodes[-1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Two nodes of two ranks each, unless options say otherwise."""
    monkeypatch.setenv("PYTHONPATH", import_path(Path(__file__).parents[3]))
    made = Run(tmp_path)
    yield made
    for executor in made.executors:
        executor.close()
    for node in made.nodes:
        node.process.kill()
        node.process.wait()


def raised(action: Callable[[], Any], found: list[BaseException]) -> Callable[[], None]:
    def work() -> None:
        try:
            action()
        except BaseException as error:
            found.append(error)

    return work


@pytest.mark.gate(1)
@pytest.mark.parametrize("is_first", [True, False])
def test_two_nodes_say_what_one_process_says(run: Run, is_first: bool) -> None:
    """The nodes may be started in either order; they end when node 0 does, with a sentence."""
    found: list[BaseException] = []
    executor = run.executor(config={"num_blocks": 18})
    if is_first:
        node = run.node(config={"num_blocks": 18})
        until(lambda: "joins" in node.log, 10, "the node looks for node 0")
        assert executor.load().num_blocks == 18
    else:
        loading = threading.Thread(target=raised(executor.load, found))
        loading.start()
        node = run.node(config={"num_blocks": 18})
        loading.join(SECONDS)
    assert found == []
    assert len(node.ranks()) == 2
    assert executor.call("where") == [[rank, 4, 0] for rank in range(4)]
    assert executor.call("place") == [[0, 2], [1, 2]] * 2
    _, tokens = run_engine(executor, PROMPTS, num_blocks=18, chunk_tokens=3)
    assert tokens == EXPECTED
    with pytest.raises(ConnectionRefusedError):  # nothing listens there any more
        socket.create_connection(("127.0.0.1", run.port), 5)
    executor.close()
    assert node.ended() == 0
    assert "has ended, and so does this node" in node.log


@pytest.mark.sweep
def test_ranks_of_two_nodes_add_and_join_as_one_group(run: Run) -> None:
    node = run.node(config={"connects": True})
    executor = run.executor(config={"connects": True})
    executor.load()
    first = executor.call("torch_group")
    assert all(answer == first[0] for answer in first)
    assert first[0][0][0:8:2] == [[10.0 * rank + i for i in range(3)] for rank in range(4)]
    names = executor.call("environment", "GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS")
    assert {name["GLOO_SOCKET_IFNAME"] for name in names} == {"lo"}
    executor.close()
    assert node.ended() == 0


def test_a_node_with_another_secret_is_sent_away(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    (run.folder / "other").write_text("0123456789abcdeF")
    node = run.node(dist_token_file=str(run.folder / "other"))
    until(lambda: "joins" in node.log, 10, "the node looks for node 0")
    with pytest.raises(EngineDead) as caught:
        run.executor(dist_timeout=2.0).load()
    assert str(caught.value) == "after 2 seconds (--dist-timeout) node 1 of 2 had not come"
    assert node.ended() == 1
    assert f"node 0 at 127.0.0.1:{run.port} has another secret in --dist-token-file" in node.log
    assert "127.0.0.1, which connected to --dist-init-addr, is sent away: it has another secret" in caplog.text


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("theirs", "sentence"),
    [
        ({"--dtype": '"float16"'}, '--dtype differs: "float32" on node 0, "float16" on node 1 (127.0.0.1); start'),
        ({"the version of fwk": "2", "--dtype": '"float16"'}, "the version of fwk differs: 1 on node 0, 2 on node 1"),
        ({"--ep-size": "2"}, "--ep-size differs: not set on node 0, 2 on node 1"),
    ],
)
def test_nodes_that_differ_are_told_so_both(run: Run, theirs: dict[str, str], sentence: str) -> None:
    node = run.node(common=COMMON | theirs)
    with pytest.raises(ConfigError) as caught:
        run.executor().load()
    assert str(caught.value).startswith(sentence)
    assert node.ended() == ConfigError.exit_code
    assert f"fwk: error: {caught.value}\n" in node.log


@pytest.mark.sweep
def test_a_rank_of_a_node_is_taken_once(run: Run) -> None:
    """The second is sent away, and the run continues without it."""
    executor = run.executor(nnodes=3)
    loading = threading.Thread(target=executor.load)
    loading.start()
    first = run.node(nnodes=3)
    until(lambda: "joins" in first.log, 10, "the first node")
    second = run.node(nnodes=3)
    ended = lambda: [node for node in (first, second) if node.process.poll() is not None]  # noqa: E731
    [loser] = until(ended, 10, "one of them is sent away")
    assert loser.ended() == ConfigError.exit_code
    assert "fwk: error: --node-rank 1 is taken: node 1 (127.0.0.1) has come before" in loser.log
    run.node(2, nnodes=3)
    loading.join(SECONDS)
    assert [answer[0] for answer in executor.call("where")] == list(range(6))


@pytest.mark.sweep
def test_nodes_that_came_are_told_of_one_that_did_not(run: Run) -> None:
    node = run.node(nnodes=3)
    until(lambda: "joins" in node.log, 10, "the node looks for node 0")
    executor = run.executor(nnodes=3, dist_timeout=5.0)
    with pytest.raises(EngineDead) as caught:
        executor.load()
    assert str(caught.value) == "after 5 seconds (--dist-timeout) node 2 of 3 had not come"
    executor.close()
    assert node.ended() == EngineDead.exit_code
    assert f"fwk: error: the engine on node 0 could not be started: {caught.value}\n" in node.log


@pytest.mark.sweep
def test_a_node_gives_up_when_node_0_does_not_come(run: Run) -> None:
    node = run.node(dist_timeout=1.0)
    assert node.ended() == EngineDead.exit_code
    assert "could not be joined within 1 seconds (--dist-timeout): Connection refused" in node.log


@pytest.mark.sweep
def test_a_killed_rank_is_named_and_its_node_joins_the_next_engine(run: Run) -> None:
    node = run.node()
    executor = run.executor()
    executor.load()
    victims = node.ranks()
    victims[0].send_signal(signal.SIGKILL)
    with pytest.raises(EngineDead) as caught:
        wait_idle(executor)
    expected = "the engine's worker of rank {} on node 1 (127.0.0.1) was killed by signal 9 (SIGKILL)"
    assert str(caught.value) in [expected.format(rank) for rank in (2, 3)]
    executor.close()
    again = run.executor()
    again.load()
    assert run_engine(again, PROMPTS)[1] == EXPECTED
    assert not psutil.wait_procs(victims, SECONDS)[1], "the other rank ended with the engine"
    assert f"has ended: {caught.value}; this node waits" in node.log
    again.close()
    assert node.ended() == 0


@pytest.mark.sweep
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_node_that_ends_is_named(run: Run, number: signal.Signals) -> None:
    node = run.node(config={"faults": {"2": {"1": f"wait:{run.folder / 'never'}"}}})
    executor = run.executor()
    executor.load()
    node.ranks()
    pending = executor.launch(batch(1, [1, 2, 3]))
    node.process.send_signal(number)
    with pytest.raises(EngineDead, match=r"node 1 \(127.0.0.1\)") as caught:
        executor.collect(pending)
    assert ("was told to end" in str(caught.value)) == (number == signal.SIGTERM)
    assert node.ended() == (-number if number == signal.SIGKILL else 0)


@pytest.mark.sweep
def test_a_node_whose_engine_is_gone_without_a_word_ends(run: Run) -> None:
    node = run.node(dist_timeout=3.0)
    executor = run.executor()
    executor.load()
    node.ranks()
    for one in [*executor._nodes, *executor._ranks]:  # as the system does for a process that was killed
        one.connection.shutdown(socket.SHUT_RDWR)
    assert node.ended() == EngineDead.exit_code
    assert "closed its connection without a word; this node waits up to 3 seconds" in node.log
    assert "could not be joined within 3 seconds" in node.log


@pytest.mark.sweep
def test_strangers_do_not_keep_a_node_away(run: Run) -> None:
    """Those that are silent, and one that speaks HTTP, before the node comes."""
    found: list[BaseException] = []
    executor = run.executor()
    loading = threading.Thread(target=raised(executor.load, found))
    loading.start()
    strangers: list[socket.socket] = []
    for _ in range(8):
        strangers.append(until(lambda: _connected(run.port), 10, "node 0 listens"))
    strangers[0].sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n")
    node = run.node()
    loading.join(SECONDS)
    for stranger in strangers:
        stranger.close()
    assert found == []
    executor.close()
    assert node.ended() == 0


def _connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), 5)
    except ConnectionRefusedError:
        return None


def pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def shaken(secrets: tuple[bytes, bytes]) -> tuple[list[Any], tuple[socket.socket, socket.socket]]:
    """What each side makes of the other: keys, or an error. The leader is first."""
    sides, found = pair(), [None, None]

    def shake(index: int) -> None:
        try:
            found[index] = shake_hands(sides[index], secrets[index], is_leader=index == 0)  # type: ignore[call-overload]
        except NoPeer as error:
            found[index] = error  # type: ignore[call-overload]
            sides[index].close()

    threads = [threading.Thread(target=shake, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return found, sides


def close(sides: tuple[socket.socket, socket.socket]) -> None:
    for side in sides:
        side.close()


def test_both_sides_prove_that_they_know_the_secret() -> None:
    found, sides = shaken((b"a" * 16, b"a" * 16))
    leader, follower = found
    assert isinstance(leader, Keys)
    assert (leader.sending.key, leader.receiving.key) == (follower.receiving.key, follower.sending.key)
    assert leader.sending.key != leader.receiving.key
    close(sides)
    found, sides = shaken((b"a" * 16, b"b" * 16))
    assert [str(error) for error in found] == ["has another secret in --dist-token-file"] * 2
    close(sides)


@pytest.mark.parametrize("is_leader", [True, False])
@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nServer: example\r\n\r\n", "is no node of fwk"),
        (MAGIC + (PROTOCOL + 1).to_bytes(4, "little") + bytes(32), "speaks version 2 of the protocol between nodes"),
        (MAGIC + PROTOCOL.to_bytes(4, "little") + bytes(32) + bytes(32), "has another secret"),
        (MAGIC, "did not answer within"),
    ],
)
def test_who_is_no_node_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, said: bytes, sentence: str, is_leader: bool
) -> None:
    monkeypatch.setattr(wire, "HELLO_SECONDS", 0.3)
    ours, theirs = pair()
    theirs.sendall(said)
    with pytest.raises(NoPeer, match=sentence):
        shake_hands(ours, b"a" * 16, is_leader=is_leader)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("is_leader", [True, False])
def test_an_echo_of_our_own_words_proves_nothing(is_leader: bool) -> None:
    """A stranger who sends back the hello of the leader, or the proof of who connects."""
    ours, theirs = pair()
    failed: list[BaseException] = []
    thread = threading.Thread(target=raised(lambda: shake_hands(ours, b"a" * 16, is_leader=is_leader), failed))
    thread.start()
    hello = theirs.recv(1000)
    theirs.sendall(hello)
    theirs.sendall(hello[-32:] if is_leader else theirs.recv(1000))
    thread.join(SECONDS)
    assert "another secret" in str(failed[0])
    ours.close()
    theirs.close()


def _flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda first, second: _flipped(first, 8),
        lambda first, second: _flipped(first, -1),
        lambda first, second: second,
        lambda first, second: first + first,
        lambda first, second: (1 << 62).to_bytes(8, "little") + first[8:],
        lambda first, second: frame(b"\xc1", Seal(b"k" * 32)),
    ],
    ids=["tag", "body", "left out", "repeated", "too long", "no message"],
)
def test_frames_that_are_not_the_peers_end_the_connection(spoil: Callable[[bytes, bytes], bytes]) -> None:
    ours, theirs = pair()
    signs, checks = Seal(b"k" * 32), Seal(b"k" * 32)
    first, second = (frame(encode(one), signs) for one in (Welcome("a"), Goodbye("b", None)))
    frames: Frames[Any] = Frames(ours, Welcome | Goodbye, checks)
    theirs.sendall(spoil(first, second))
    assert frames.receive() is None
    ours.close()
    theirs.close()


def test_frames_come_through() -> None:
    ours, theirs = pair()
    signs = Seal(b"k" * 32)
    frames: Frames[Any] = Frames(ours, Trouble | Goodbye, Seal(b"k" * 32))
    sent = [Trouble("x" * 5000, 3), Goodbye("b", 0)]
    theirs.sendall(b"".join(frame(encode(one), signs) for one in sent))
    received: list[Any] = []
    while len(received) < 2:
        received += frames.receive() or []
    assert received == sent
    ours.close()
    theirs.close()


GIVEN = {"nnodes": 2, "dist_init_addr": "10.0.0.1:20000", "dist_token_file": "secret", "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"nnodes": 1}, "--dist-init-addr is for several machines: add --nnodes"),
        ({"node_rank": 2}, "--node-rank 2: nodes of --nnodes 2 are 0 to 1"),
        ({"dist_init_addr": None}, "--nnodes 2 needs --dist-init-addr HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1"}, "--dist-init-addr 10.0.0.1: must be HOST:PORT"),
        ({"dist_init_addr": "10.0.0.1:0"}, "must be HOST:PORT"),
        ({"dist_init_port": 5}, "--dist-init-addr 10.0.0.1:20000 has a port: leave --dist-init-port out"),
        ({"dist_token_file": None}, "--nnodes 2 needs --dist-token-file FILE"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(discover(), {k: v for k, v in (GIVEN | options).items() if v is not None})
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("given", "address"),
    [
        ({"dist_init_addr": "tcp://10.0.0.1:5"}, ("10.0.0.1", 5)),
        ({"master_addr": "host", "master_port": 6}, ("host", 6)),
        ({"nccl_host": "host", "nccl_port": 7}, ("host", 7)),
        ({"dist_init_addr": "[::1]:8"}, ("::1", 8)),
        ({"dist_init_addr": "::1", "dist_init_port": 9}, ("::1", 9)),
    ],
)
def test_the_address_under_every_name(given: dict[str, Any], address: tuple[str, int]) -> None:
    rest = {name: value for name, value in GIVEN.items() if name != "dist_init_addr"}
    config = build_config(discover(), rest | given)
    options = ProcessesOptions.model_validate(config.plugin_options["executors.processes"])
    assert options.address() == address


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"tensor_parallel_size": 3}, "--nnodes 2 does not divide --tensor-parallel-size 3"),
        ({"data_parallel_size": 2}, "--nnodes 2 is not possible with --data-parallel-size 2"),
        ({"take_over": True}, "--nnodes 2 is not possible with --take-over"),
        ({"idle_timeout": 5.0}, "--nnodes 2 is not possible with --idle-timeout"),
        ({"enable_memory_saver": True, "admin_api_key": "k"}, "--nnodes 2 is not possible with --enable-memory-saver"),
    ],
)
def test_what_does_not_go_with_several_machines(options: dict[str, Any], sentence: str) -> None:
    plugins = discover()
    config = build_config(plugins, GIVEN | options)
    with pytest.raises(ConfigError) as caught:
        worker_node([config], plugins)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize("text", ["", "short", "x" * 5000])
def test_secrets_have_a_length(run: Run, text: str) -> None:
    (run.folder / "secret").write_text(text)
    with pytest.raises(ConfigError, match="must hold 16 to 4096 bytes"):
        run.executor().load()


def test_an_address_of_another_machine_is_refused(run: Run) -> None:
    with pytest.raises(FwkError, match=r"node 0 cannot listen at --dist-init-addr 198\.51\.100\.1:5: "):
        run.executor(dist_init_addr="198.51.100.1:5").load()


def test_this_process_is_node_0(run: Run) -> None:
    with pytest.raises(ConfigError, match="--node-rank 1: this process has the engine"):
        run.executor(node_rank=1)
