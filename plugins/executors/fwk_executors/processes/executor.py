"""Runs a step on all ranks of a tensor-parallel group, each a process of its own, on this machine or on another."""

from __future__ import annotations

import itertools
import os
import selectors
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from fwk import errors
from fwk.errors import ConfigError, EngineDead, FwkError
from fwk.interfaces.executor import Executor, ExecutorContext, WorkerInfo
from fwk.types import Batch, StepResult
from fwk_executors._common.torch_group import NetworkStore, serve_store
from fwk_executors.processes import ProcessesOptions
from fwk_executors.processes.messages import (
    Call,
    Called,
    Failed,
    FromRank,
    Goodbye,
    Loaded,
    Ran,
    Run,
    Start,
    ToRank,
    encode,
)
from fwk_executors.processes.rank import Rank, environment_of_ranks

if TYPE_CHECKING:
    from fwk_executors.processes.nodes import Gathering, Node, RemoteRank

CLOSE_SECONDS = 2.0
BLAME_SECONDS = 0.5
"""A rank whose peer has died fails, too, and may be heard first: how long to wait for news of a death."""


class ProcessesExecutor(Executor):
    """Every rank gets every message; its answers carry the message's number. One thread, the engine's, does it all.

    Messages wait in the ranks' processes, so a step is launched while another runs. Every rank samples for itself;
    a digest of what it chose comes back with each step, and ranks that disagree end the engine. Of several stages the
    last one samples, and as many steps are under way.
    """

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self.depth = max(2, context.pp_size)
        self._size = context.tp_size * context.pp_size
        self._options: ProcessesOptions = context.options or ProcessesOptions()
        if self._options.node_rank or self._size % self._options.nnodes:
            raise ConfigError(
                f"--nnodes {self._options.nnodes} --node-rank {self._options.node_rank}: this process has the engine, "
                f"so it must be node 0, and the nodes must divide the {self._size} ranks; start other nodes with fwk "
                "serve"
            )
        self._timeout = context.step_timeout
        self._ranks: list[Rank | RemoteRank] = []
        self._nodes: list[Node] = []
        self._goodbye = Goodbye("the engine on node 0 could not be started", EngineDead.exit_code)
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count()
        self._answers: dict[int, dict[int, FromRank]] = {}
        self._dead: str | None = None

    def load(self) -> WorkerInfo:
        try:
            info = self._load()
        except FwkError as error:
            self._goodbye = Goodbye(f"the engine on node 0 could not be started: {error}", error.exit_code)
            raise
        self._goodbye = Goodbye("", 0)
        return info

    def _load(self) -> WorkerInfo:
        size = self._size
        num_local = size // self._options.nnodes
        with ExitStack() as until_loaded:
            gathering: Gathering | None = None
            if self._options.nnodes > 1:
                from fwk_executors.processes.nodes import Gathering  # noqa: PLC0415 - of several machines only

                gathering = Gathering(self._options, size, self.context.common())
                until_loaded.callback(gathering.close)
            interface = gathering.interface if gathering is not None else None
            environment = environment_of_ranks(num_local, os.environ, interface)
            for index in range(num_local):
                self._add(Rank(index, environment))
            if gathering is not None:
                self._gather(gathering)
            store, recipe = _store(until_loaded, gathering, self._options.dist_timeout), self.context.recipe

            def start(number: int, rank: int) -> Start:
                is_here = rank < num_local
                return Start(
                    number,
                    rank,
                    size,
                    self.context.pp_size,
                    rank % num_local,
                    num_local,
                    store,
                    recipe if is_here else None,
                )

            answers = self._wait(self._send(start), timeout=None)
        infos = [answer.info for answer in answers if isinstance(answer, Loaded)]
        last = infos[-self.context.tp_size :]  # stages may have layers of other kinds
        if any(i.num_blocks != infos[0].num_blocks for i in infos) or any(i.chosen != last[0].chosen for i in last):
            raise EngineDead(f"the ranks are set up differently: {infos}")
        return last[0]

    def _add(self, rank: Rank | RemoteRank) -> None:
        self._ranks.append(rank)
        rank.connection.settimeout(self._timeout)
        self._selector.register(rank.connection, selectors.EVENT_READ, partial(self._receive, rank))

    def _gather(self, gathering: Gathering) -> None:
        """Wait for the other nodes, and take their ranks."""
        try:
            ranks = gathering.ranks()
        finally:
            for node in gathering.nodes.values():
                self._nodes.append(node)
                self._selector.register(node.connection, selectors.EVENT_READ, partial(self._look_at, node))
        for rank in ranks:
            self._add(rank)
        gathering.close()

    def launch(self, batch: Batch) -> int:
        return self._send(lambda number, _: Run(number, batch), is_same=True)

    def collect(self, pending: int) -> StepResult:
        answers = [answer for answer in self._wait(pending, self._timeout) if isinstance(answer, Ran)]
        first = self._size - self.context.tp_size
        answers = answers[first:]
        for rank, answer in enumerate(answers, first):
            if answer.digest != answers[0].digest:
                raise self._die(f"ranks {first} and {rank} chose different tokens: their computations have come apart")
        assert answers[0].result is not None
        return answers[0].result

    def call(self, name: str, *args: Any) -> list[Any]:
        number = self._send(lambda number, _: Call(number, name, list(args)), is_same=True)
        return [
            answer.result
            for answer in self._wait(number, self._timeout, is_each_needed=False)
            if isinstance(answer, Called)
        ]

    def check(self) -> None:
        self._pump(0)

    def close(self) -> None:
        self._dead = self._dead or "the executor is closed"
        ranks, self._ranks = self._ranks, []
        nodes, self._nodes = self._nodes, []
        for node in nodes:
            with suppress(OSError):
                node.send(self._goodbye)
            self._selector.unregister(node.connection)
            node.connection.close()
        for rank in ranks:
            self._selector.unregister(rank.connection)
            rank.release()
        end = time.monotonic() + CLOSE_SECONDS
        for rank in ranks:
            rank.reap(max(0.0, end - time.monotonic()))

    def _send(self, make: Callable[[int, int], ToRank], *, is_same: bool = False) -> int:
        """Send each rank its message (one for all if they are the same); returns their number."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        number = next(self._numbers)
        self._answers[number] = {}
        body = b""
        for rank in self._ranks:
            if not body or not is_same:
                body = encode(make(number, rank.rank))
            try:
                rank.send(body)
            except TimeoutError:
                raise self._die(f"{rank.name} has taken no message for {self._timeout:g} seconds") from None
            except OSError:
                raise self._die(rank.obituary()) from None
        return number

    def _wait(self, number: int, timeout: float | None, *, is_each_needed: bool = True) -> list[FromRank]:
        """Every rank's answer to a message, in their order. Raises a rank's refusal, or ``EngineDead``.

        ``is_each_needed`` is False for operations, which a rank may refuse and live on: then all answers are awaited.
        """
        if self._dead is not None:
            raise EngineDead(self._dead)
        answers = self._answers[number]
        end = None if timeout is None else time.monotonic() + timeout
        while len(answers) < len(self._ranks):
            failed = [answer for answer in answers.values() if isinstance(answer, Failed)]
            if any(is_each_needed or not answer.is_refusal for answer in failed):
                break  # the others may wait for that rank for ever
            left = None if end is None else end - time.monotonic()
            if left is not None and left <= 0:
                raise self._die(self._silence(answers))
            self._pump(left)
        del self._answers[number]
        for rank in self._ranks:
            answer = answers.get(rank.rank)
            if isinstance(answer, Failed):
                raise self._failure(rank, answer)
        return [answers[rank.rank] for rank in self._ranks]

    def _pump(self, timeout: float | None) -> None:
        """Take in what has come from any rank within that time. Raises ``EngineDead`` when one is gone."""
        for key, _ in self._selector.select(timeout):
            key.data()

    def _receive(self, rank: Rank | RemoteRank) -> None:
        """Take in what has come from a rank."""
        messages = rank.frames.receive()
        if messages is None:
            raise self._die(rank.obituary())
        for message in messages:
            if message.number in self._answers:
                self._answers[message.number][rank.rank] = message

    def _look_at(self, node: Node) -> None:
        """A node speaks only of an end."""
        if (trouble := node.trouble()) is not None:
            raise self._die(trouble)

    def _failure(self, rank: Rank | RemoteRank, failed: Failed) -> Exception:
        """What to raise for a rank's exception: a refusal as it was; anything else is the engine's end."""
        if failed.is_refusal:
            kind = getattr(errors, failed.kind, FwkError)
            return kind(failed.message)
        end = time.monotonic() + BLAME_SECONDS
        while (left := end - time.monotonic()) > 0:
            self._pump(left)
        return self._die(f"{rank.name} failed: {failed.kind}", failed.story)

    def _silence(self, answers: dict[int, FromRank]) -> str:
        """Who has not answered."""
        silent = [f"{rank.name} is {rank.state()}" for rank in self._ranks if rank.rank not in answers]
        return f"no answer for {self._timeout:g} seconds: {', '.join(silent)}"

    def _die(self, sentence: str, detail: str = "") -> EngineDead:
        self._dead = self._dead or sentence
        self._goodbye = Goodbye(self._dead, None)  # another engine may come: the nodes join it
        return EngineDead(self._dead, detail)


def _store(until_loaded: ExitStack, gathering: Gathering | None, timeout: float) -> str | NetworkStore:
    """Where the ranks find each other: nothing is left of it once they have loaded."""
    if gathering is not None:
        return until_loaded.enter_context(serve_store(gathering.address, timeout))
    folder = tempfile.mkdtemp(prefix="fwk-ranks-")  # mode 0700
    until_loaded.callback(shutil.rmtree, folder, ignore_errors=True)
    return os.path.join(folder, "store")
