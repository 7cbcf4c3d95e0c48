"""Runs a step on all ranks of a tensor-parallel group, each an actor of a Ray cluster."""

# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

import ray
from fwk import errors
from fwk.errors import EngineDead, FwkError
from fwk.interfaces.executor import Executor, ExecutorContext, WorkerInfo
from fwk.types import Batch, StepResult
from fwk_executors._common.answers import Failed
from fwk_executors._common.torch_group import NetworkStore, serve_store
from fwk_executors.ray import RayOptions
from fwk_executors.ray.cluster import addresses, connect, how_ended, leave, resources_in_words
from fwk_executors.ray.rank import Answer, Called, Loaded, Place, Ran, RankActor, Start
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

if TYPE_CHECKING:
    from ray import ObjectRef

log = logging.getLogger("fwk.engine")

CLOSE_SECONDS = 2.0
"""For workers to finish; and, after that, for Ray to end them, which it does later where its head does not answer."""

LEAVE_SECONDS = 10.0
"""For the connection to end, and a Ray of this machine alone; else they end with this process."""

BLAME_SECONDS = 2.0
"""A rank whose peer has died fails, too, and may be heard first: how long to wait for news of a death."""

SAY_SECONDS = 10.0
THREADS = ("OMP_", "GOMP_", "KMP_")
"""Environment variables that the ranks get from the engine; how many threads they have, Ray decides."""

_ENCODER = msgspec.msgpack.Encoder()
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class _Rank:
    """An actor, and what is known of it. ``ping``: one that has not been answered yet, and since when."""

    def __init__(self, rank: int, actor: Any) -> None:
        self.rank = rank
        self.actor = actor
        self.place: Place | None = None
        self.address = ""
        self.ping: ObjectRef[None] | None = None
        self.asked_at = 0.0

    @property
    def name(self) -> str:
        where = "not placed yet" if self.place is None else f"pid {self.place.pid} on node {self.address}"
        return f"the engine's worker of rank {self.rank} ({where})"


class RayExecutor(Executor):
    """Every rank gets every call, in order; Ray carries it and tells of the end of an actor, or of its node.

    Steps wait in the actors, so one is launched while another runs. Every rank samples for itself; a digest of what it
    chose comes back with each step, and ranks that disagree end the engine. The actors are this process's own: Ray ends
    them when it ends.
    """

    depth = 2

    def __init__(self, context: ExecutorContext) -> None:
        super().__init__(context)
        self._options: RayOptions = context.options or RayOptions()
        self._timeout = context.step_timeout
        self._group: PlacementGroup | None = None
        self._ranks: list[_Rank] = []
        self._dead: str | None = None
        self._is_member = False

    def load(self) -> WorkerInfo:
        size = self.context.tp_size
        self._is_member = connect(self._options.ray_address, size * self._options.ray_cpus_per_rank)
        self._reserve(size)
        actors = [self._actor(rank) for rank in range(size)]
        self._ranks = [_Rank(rank, actor) for rank, actor in enumerate(actors)]
        places = self._wait([actor.place.remote() for actor in actors], None, _decode_place)
        nodes = addresses()
        for rank, place in zip(self._ranks, places, strict=True):
            rank.place, rank.address = place, nodes[place.node_id]
        log.info("Ray has put %s", "; ".join(rank.name.removeprefix("the engine's worker of ") for rank in self._ranks))
        with serve_store(nodes[ray.get_runtime_context().get_node_id()], self._options.ray_timeout) as store:
            starts = [self._start(rank, [place.node_id for place in places], store) for rank in self._ranks]
            answers = self._answers([r.actor.load.remote(s) for r, s in zip(self._ranks, starts, strict=True)], None)
        infos = [answer.info for answer in answers if isinstance(answer, Loaded)]
        if any(info.num_blocks != infos[0].num_blocks or info.chosen != infos[0].chosen for info in infos):
            raise EngineDead(f"the ranks are set up differently: {infos}")
        return infos[0]

    def launch(self, batch: Batch) -> list[ObjectRef[bytes]]:
        body = _ENCODER.encode(batch)
        return self._send(lambda actor: actor.execute.remote(body))

    def collect(self, pending: list[ObjectRef[bytes]]) -> StepResult:
        answers = [answer for answer in self._answers(pending, self._timeout) if isinstance(answer, Ran)]
        for rank, answer in enumerate(answers):
            if answer.digest != answers[0].digest:
                raise self._die(f"ranks 0 and {rank} chose different tokens: their computations have come apart")
        assert answers[0].result is not None
        return answers[0].result

    def call(self, name: str, *args: Any) -> list[Any]:
        body = _ENCODER.encode((name, list(args)))
        pending = self._send(lambda actor: actor.call.remote(body))
        answers = self._answers(pending, self._timeout, is_each_needed=False)
        return [answer.result for answer in answers if isinstance(answer, Called)]

    def check(self) -> None:
        """Ask each actor whether it lives, and see to the answers to what was asked before."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        for rank in self._ranks:
            if rank.ping is not None and not ray.wait([rank.ping], timeout=0)[0]:
                if time.monotonic() - rank.asked_at > self._timeout:
                    raise self._die(f"{rank.name} has not answered for {self._timeout:g} seconds")
                continue
            try:
                if rank.ping is not None:
                    ray.get(rank.ping)
                rank.ping, rank.asked_at = rank.actor.ping.remote(), time.monotonic()
            except RayError as error:
                raise self._lost(rank, error) from None

    def close(self) -> None:
        was_dead = self._dead is not None
        self._dead = self._dead or "the executor is closed"
        ranks, self._ranks = self._ranks, []
        group, self._group = self._group, None
        is_member, self._is_member = self._is_member, False
        if not ray.is_initialized():
            return
        if group is not None:
            _in_time(lambda: _end(ranks, group, 0.0 if was_dead else CLOSE_SECONDS), 3 * CLOSE_SECONDS)
        if is_member:
            _in_time(leave, LEAVE_SECONDS)

    def _reserve(self, size: int) -> None:
        """Have Ray reserve what all ranks need, or raise ``EngineDead``."""
        options = self._options
        bundle = {"CPU": float(options.ray_cpus_per_rank), **(options.ray_resources_per_rank or {})}
        if self._num_gpus:
            bundle["GPU"] = float(self._num_gpus)
        group = placement_group([bundle] * size, strategy=options.ray_placement_strategy.upper())
        self._group = group
        ready, end = group.ready(), time.monotonic() + options.ray_timeout
        needed = f"{size} x {resources_in_words(bundle)} ({options.ray_placement_strategy})"
        is_said = False
        while (left := end - time.monotonic()) > 0:
            if ray.wait([ready], timeout=min(left, SAY_SECONDS))[0]:
                return
            if not is_said:
                log.info("waiting for Ray to reserve %s; free are %s", needed, _free())
                is_said = True
        raise EngineDead(
            f"Ray has not reserved {needed} within {options.ray_timeout:g} seconds (--ray-timeout); free are "
            f"{_free()}: add nodes (ray start --address ...), or ask for less (--ray-cpus-per-rank)"
        )

    @property
    def _num_gpus(self) -> int:
        if self._options.ray_gpus_per_rank is not None:
            return self._options.ray_gpus_per_rank
        import torch  # noqa: PLC0415 - not needed where it is said

        device = self.context.recipe.config.get("config", {}).get("engine", {}).get("device")
        return int(device != "cpu" and torch.accelerator.is_available())

    def _actor(self, rank: int) -> Any:
        options = self._options
        assert self._group is not None
        made = ray.remote(RankActor).options(
            num_cpus=options.ray_cpus_per_rank,
            num_gpus=self._num_gpus,
            resources=options.ray_resources_per_rank or {},
            scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank),
            max_restarts=0,
            max_task_retries=0,
        )
        return made.remote()

    def _start(self, rank: _Rank, nodes: Sequence[str], store: NetworkStore) -> bytes:
        """What a rank is told, given every rank's node; one with a GPU of its own sees no other."""
        here = [other for other, node in enumerate(nodes) if node == nodes[rank.rank]]
        local_rank, local_size = (0, 1) if self._num_gpus else (here.index(rank.rank), len(here))
        environment = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(THREADS) and not name.endswith("NUM_THREADS")
        }
        size = self.context.tp_size
        start = Start(rank.rank, size, local_rank, local_size, rank.address, store, self.context.recipe, environment)
        return _ENCODER.encode(start)

    def _send(self, call: Callable[[Any], ObjectRef[bytes]]) -> list[ObjectRef[bytes]]:
        if self._dead is not None:
            raise EngineDead(self._dead)
        sent: list[ObjectRef[bytes]] = []
        for rank in self._ranks:
            try:
                sent.append(call(rank.actor))
            except RayError as error:
                raise self._lost(rank, error) from None
        return sent

    def _answers(
        self, pending: Sequence[ObjectRef[bytes]], timeout: float | None, *, is_each_needed: bool = True
    ) -> list[Answer]:
        """Every rank's answer, in their order. Raises a rank's refusal, or ``EngineDead``.

        ``is_each_needed`` is False for operations, which a rank may refuse and live on: then all answers are awaited.
        """
        found = self._wait(
            pending, timeout, _ANSWERS.decode, lambda a: isinstance(a, Failed) and (is_each_needed or not a.is_refusal)
        )
        for rank, answer in zip(self._ranks, found, strict=True):
            if isinstance(answer, Failed):
                raise self._failure(rank, answer, pending)
        return [answer for answer in found if answer is not None]

    def _wait(
        self,
        pending: Sequence[ObjectRef[bytes]],
        timeout: float | None,
        decode: Callable[[bytes], Any],
        ends: Callable[[Any], bool] = lambda answer: False,
    ) -> list[Any]:
        """Decoded answers by rank; None for those that were not awaited because another one ``ends`` the wait."""
        if self._dead is not None:
            raise EngineDead(self._dead)
        found: dict[int, Any] = {}
        end = None if timeout is None else time.monotonic() + timeout
        while len(found) < len(pending) and not any(map(ends, found.values())):
            open_ones = [rank for rank in range(len(pending)) if rank not in found]
            left = None if end is None else max(0.0, end - time.monotonic())
            ready = ray.wait([pending[rank] for rank in open_ones], num_returns=1, timeout=left)[0]
            if not ready:
                silent = ", ".join(self._ranks[rank].name for rank in open_ones)
                raise self._die(f"no answer for {timeout:g} seconds from {silent}")
            for rank in open_ones:
                if pending[rank] in ready:
                    found[rank] = self._take(rank, pending[rank], decode)
        return [found.get(rank) for rank in range(len(pending))]

    def _take(self, rank: int, answer: ObjectRef[bytes], decode: Callable[[bytes], Any]) -> Any:
        try:
            return decode(ray.get(answer))
        except RayError as error:
            raise self._lost(self._ranks[rank], error) from None

    def _failure(self, rank: _Rank, failed: Failed, pending: Sequence[ObjectRef[bytes]]) -> Exception:
        """What to raise for a rank's exception: a refusal as it was; anything else is the engine's end."""
        if failed.is_refusal:
            return getattr(errors, failed.kind, FwkError)(failed.message)
        pings = {one.actor.ping.remote(): one for one in self._ranks}
        others = [ref for index, ref in enumerate(pending) if index != rank.rank]
        asked = dict(zip(others, [one for one in self._ranks if one is not rank], strict=True)) | pings
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=BLAME_SECONDS)[0]:
            try:
                ray.get(ref)
            except RayError as error:
                return self._lost(asked[ref], error)
        return self._die(f"{rank.name} failed: {failed.kind}", failed.story)

    def _lost(self, rank: _Rank, error: RayError) -> EngineDead:
        return self._die(f"{rank.name} {how_ended(error)}", " ".join(str(error).split()))

    def _die(self, sentence: str, detail: str = "") -> EngineDead:
        self._dead = self._dead or sentence
        return EngineDead(self._dead, detail)


def _decode_place(data: bytes) -> Place:
    return msgspec.msgpack.decode(data, type=Place)


def _free() -> str:
    return resources_in_words(ray.available_resources())


def _end(ranks: Sequence[_Rank], group: PlacementGroup, seconds: float) -> None:
    """Let the workers finish, and have Ray end their actors and free what was reserved."""
    with contextlib.suppress(RayError):
        closing = [rank.actor.close.remote() for rank in ranks]
        if closing and seconds:
            ray.wait(closing, num_returns=len(closing), timeout=seconds)
    with contextlib.suppress(Exception):  # a head that is gone frees nothing; its nodes end with it
        for rank in ranks:
            ray.kill(rank.actor)
        ended = [rank.actor.ping.remote() for rank in ranks]  # answered with an error, once the actor has ended
        ray.wait(ended, num_returns=len(ended), timeout=CLOSE_SECONDS)
        remove_placement_group(group)


def _in_time(work: Callable[[], None], seconds: float) -> None:
    """Do it, but wait no longer: Ray's own calls may wait for a head that does not come back."""
    thread = threading.Thread(target=work, name="fwk-ray-close", daemon=True)
    thread.start()
    thread.join(seconds)
