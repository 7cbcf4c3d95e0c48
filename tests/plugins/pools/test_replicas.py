"""Several engines as one: where requests go, what is told of them, what one that dies leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.helpers.pools import replicas_of

from fwk import SamplingParams
from fwk.config import Config
from fwk.engine.core import _check_same_weights, build_engine
from fwk.errors import EngineDead, InvalidRequest, ModelLoadError, NotServed, PluginFault
from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.interfaces.feature import ServerPartContext
from fwk.plugins import discover
from fwk.plugins.options import build_config
from fwk.server.model_engines import ModelEngines
from fwk.setup.checkpoint import open_model
from fwk.setup.resolve import resolve
from fwk.types import EngineReady, EngineStats, Request, TokenEvent, total_stats
from fwk_features.weight_update.server import WeightUpdates
from fwk_pools.replicas.pool import Replicas


class Client:
    """An engine that does nothing."""

    def __init__(self, config: Config, fingerprint: str, replica: int, count: int, process: object = None) -> None:
        self.replica = replica
        self.sent: list[tuple[Any, ...]] = []
        self.receivers: dict[str, Any] = {}
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_death: Callable[[], None] | None = None
        self.problem: str | None = None
        self.has_started = True
        self.is_dead = False
        self.refusal: Exception | None = None
        self.prepared: str | Exception = "files"
        self.weights = ""

    def trouble(self) -> str | None:
        return self.problem

    async def wait_ready(self) -> EngineReady:
        if self.problem:
            raise EngineDead(self.problem)
        numbers = (10 + self.replica, 16, 100 - self.replica, 320)
        return EngineReady("f", *numbers, {}, [], weights_identity=self.weights)

    def submit(self, request: Request, receiver: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.sent.append(("submit", request.request_id))
        self.receivers[request.request_id] = receiver

    def abort(self, request_id: str, index: int | None = None) -> None:
        self.sent.append(("abort", request_id, index))

    def forget(self, request_id: str) -> None:
        self.sent.append(("forget", request_id))

    async def call_feature(self, feature: str, operation: str, arguments: Sequence[Any]) -> Any:
        self.sent.append((operation,))
        if operation == "prepare" and isinstance(self.prepared, Exception):
            raise self.prepared
        return self.prepared

    def die(self) -> None:
        self.problem = "dead"
        for receiver in self.receivers.values():
            receiver(EngineDead("dead"))

    async def close(self) -> None:
        self.die()


class Last(LoadBalancer):
    """Always the last, and notes what it was shown."""

    seen: list[list[tuple[int, int]]] = []
    over: list[tuple[str, int]] = []

    def choose(self, request: Request, replicas: Sequence[Replica]) -> Replica:
        self.seen.append([(replica.index, replica.num_open) for replica in replicas])
        return replicas[-1] if request.request_id != "stranger" else Replica(0)

    def ended(self, request: Request, replica: Replica) -> None:
        self.over.append((request.request_id, replica.index))

    def info(self, replica: Replica) -> dict[str, Any]:
        return {"chosen": replica.index}


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> tuple[ModelEngines, Replicas, list[Client]]:
    Last.seen.clear()
    Last.over.clear()
    return replicas_of(monkeypatch, Client, Last(BalanceContext(3)))


@pytest.fixture
def three(model: tuple[ModelEngines, Replicas, list[Client]]) -> tuple[Replicas, list[Client]]:
    return model[1:]


def request(name: str, n: int = 1) -> Request:
    return Request(request_id=name, prompt_token_ids=[1], sampling=SamplingParams(), n=n)


def test_all_that_concerns_a_request_goes_to_its_engine(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    engines.submit(request("a", n=4), print)
    engines.submit(request("b"), print)
    clients[2].problem = "dead"
    engines.submit(request("c"), print)
    engines.abort("a", 1)
    engines.abort("c")
    engines.abort("nobody")
    engines.forget("a")
    engines.forget("a")
    assert clients[2].sent == [("submit", "a"), ("submit", "b"), ("abort", "a", 1), ("forget", "a")]
    assert clients[1].sent == [("submit", "c"), ("abort", "c", None)]
    clients[2].problem = None
    engines.submit(request("d"), print)
    assert Last.seen == [
        [(0, 0), (1, 0), (2, 0)],
        [(0, 0), (1, 0), (2, 4)],
        [(0, 0), (1, 0)],
        [(0, 0), (1, 1), (2, 1)],
    ]


def test_a_request_without_a_token_goes_to_another_engine_once(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    news: dict[str, list[Any]] = {name: [] for name in "abc"}
    for name in "abc":
        engines.submit(request(name), news[name].append)
    token = [TokenEvent("b", 0, [5])]
    clients[2].receivers["b"](token)
    engines.forget("c")
    clients[2].die()
    assert clients[1].sent == [("submit", "a")], "b has begun, c has gone"
    assert news["a"] == []
    assert news["b"][0] is token
    assert isinstance(news["b"][1], EngineDead)
    engines.abort("a")
    assert clients[1].sent[-1] == ("abort", "a", None)
    clients[1].die()
    assert [type(item) for item in news["a"]] == [EngineDead], "what two engines died with takes no third"
    assert clients[0].sent == []
    engines.forget("a")
    engines.forget("b")
    assert [view.num_open for view in engines._views] == [0, 0, 0]
    assert Last.over == [("c", 2), ("a", 2), ("a", 1), ("b", 2)], "each once where it was sent"


def test_a_balancer_hears_of_what_no_engine_takes(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    clients[2].refusal = NotServed("full", 503)
    with pytest.raises(NotServed):
        engines.submit(request("a"), print)
    assert Last.over == [("a", 2)]
    assert [told["chosen"] for told in engines.info()] == [0, 1, 2]


async def test_a_server_that_stops_moves_no_request(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    news: list[Any] = []
    engines.submit(request("a"), news.append)
    await engines.close()
    assert [type(item) for item in news] == [EngineDead]
    assert [client.sent for client in clients[:2]] == [[], []]


def test_a_replica_that_comes_back_is_offered_little_by_little(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    clients[2].problem = "does not answer"
    engines.submit(request("while it is out"), print)
    clients[2].problem = None
    Last.seen.clear()
    Last.over.clear()
    for i in range(20):
        engines.submit(request(str(i)), print)
    offered = [any(index == 2 for index, _ in seen) for seen in Last.seen]
    assert offered[0], "the first request tries it"
    assert sum(offered) < 5
    assert [entry["weight"] for entry in engines.info()[:2]] == [1.0, 1.0]
    assert 0 < engines.info()[2]["weight"] < 0.5


def test_a_balancer_that_chooses_a_stranger_is_asked_no_more(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    for name in ("first", "stranger", "third", "fourth"):
        engines.submit(request(name), print)
    assert len(Last.seen) == 2
    assert [len(client.sent) for client in clients] == [2, 1, 1]
    assert engines.degraded() == (
        "load balancer Last chose no engine that can serve; requests go to the engine with the fewest"
    )


@pytest.mark.parametrize("method", ["ended", "info"])
def test_a_balancer_that_fails_keeps_no_engine_from_forgetting(
    three: tuple[Replicas, list[Client]], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engines, clients = three

    def fail(*args: Any) -> None:
        raise PluginFault(f"load balancer Last raised ZeroDivisionError in {method}")

    engines.submit(request("first"), print)
    monkeypatch.setattr(Last, method, fail)
    assert len(engines.info()) == 3
    engines.forget("first")
    assert ("forget", "first") in [sent for client in clients for sent in client.sent]
    assert engines.degraded() == (
        f"load balancer Last raised ZeroDivisionError in {method}; requests go to the engine with the fewest"
    )


def test_trouble_is_when_none_can_serve(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    assert (engines.trouble(), engines.degraded()) == (None, None)
    clients[1].problem = "engine 1 process ended (signal 9)"
    assert (engines.trouble(), engines.degraded()) == (None, "engine 1 process ended (signal 9)")
    clients[0].problem = clients[2].problem = "gone"
    assert (engines.trouble(), engines.degraded()) == ("gone; engine 1 process ended (signal 9); gone", None)
    with pytest.raises(EngineDead, match="signal 9"):
        engines.submit(request("a"), print)
    clients[0].problem, clients[1].problem, clients[2].problem = None, None, "engine 2 is starting"
    clients[2].has_started = False
    assert engines.trouble() == "engine 2 is starting", "nothing is served before all have started"


async def test_ready_is_what_they_have_in_common(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    ready = await engines.wait_ready()
    assert (ready.num_blocks, ready.max_model_len) == (33, 98)
    clients[1].problem = "9 heads cannot be shared"
    with pytest.raises(EngineDead, match="9 heads"):
        await engines.wait_ready()


def test_numbers_are_sums_and_counters_outlive_their_engine(three: tuple[Replicas, list[Client]]) -> None:
    engines, clients = three
    told: list[EngineStats] = []
    engines.on_stats = told.append
    for index, client in enumerate(clients):
        assert client.on_stats is not None
        client.on_stats(EngineStats(num_running=index + 1, num_blocks=10, num_free_blocks=4, steps=100 * index))
    assert told[-1] == EngineStats(num_running=6, num_blocks=30, num_free_blocks=12, steps=300)
    clients[2].is_dead = True
    assert clients[0].on_stats is not None
    clients[0].on_stats(EngineStats(num_blocks=10, num_free_blocks=10, steps=7))
    assert told[-1] == EngineStats(num_running=2, num_blocks=20, num_free_blocks=14, steps=307)
    assert total_stats([told[0]]) is told[0]
    assert [entry["stats"]["steps"] for entry in engines.info()] == [7, 100, 200]
    assert msgspec.json.encode(engines.info())


def test_engines_give_different_seeds_to_requests_without_one(tiny_folder: Path) -> None:
    plugins = discover()
    given = {"model": str(tiny_folder), "load_format": "dummy", "random_seed": 5, "max_total_tokens": 64}
    config = build_config(plugins, given)
    setup = resolve(config, open_model(config, plugins, print), plugins)
    seeds = [build_engine(config, plugins, setup, replica).scheduler.limits.seed for replica in (0, 1, 2)]
    assert seeds[0] == 5
    assert len({seed % 2**64 for seed in seeds}) == 3


@pytest.mark.parametrize(
    ("answer", "words"),
    [(InvalidRequest("it does not fit", "model_path"), "does not fit"), ("other files", "changed meanwhile")],
)
async def test_weights_that_one_engine_refuses_are_forgotten_by_all(
    model: tuple[ModelEngines, Replicas, list[Client]], answer: str | Exception, words: str
) -> None:
    engines, _, clients = model
    exclusive = partial(engines.exclusive, "weight_update")
    updates = WeightUpdates(ServerPartContext("weight_update", "x", None, print, exclusive=exclusive))  # type: ignore[arg-type]
    clients[1].prepared = answer
    with pytest.raises(InvalidRequest, match=words):
        await updates.update("new")
    assert [client.sent for client in clients] == [[("prepare",), ("discard",)]] * 3
    clients[1].prepared = "files"
    assert await updates.update("new") == 0
    assert [client.sent[2:] for client in clients] == [[("prepare",), ("use",)]] * 3


async def test_engines_that_read_other_weights_than_the_first_are_not_let_in(
    three: tuple[Replicas, list[Client]],
) -> None:
    engines, clients = three
    for client in clients:
        client.weights = "those of the start"
    await engines.wait_ready()
    await engines.wait_ready()
    clients[1].weights = "new ones"
    with pytest.raises(EngineDead, match="are others than those that this server began with"):
        await engines.wait_ready()
    for client in clients:
        client.weights = "new ones"
    with pytest.raises(EngineDead, match="are others"):  # all alike, and yet not what was served
        await engines.wait_ready()


class Ranks:
    """An executor of ranks that have read these weights."""

    def __init__(self, *found: str) -> None:
        self.found = list(found)

    def call(self, name: str) -> list[str]:
        assert name == "weights_identity"
        return self.found


def test_ranks_that_read_different_weights_are_refused() -> None:
    def check(mine: str, *found: str) -> None:
        checkpoint = SimpleNamespace(weights_identity=lambda: mine)
        setup: Any = SimpleNamespace(opened=SimpleNamespace(checkpoint=checkpoint, name="tiny"))
        _check_same_weights(setup, Ranks(*found))  # type: ignore[arg-type]

    check("a", "a", "a")
    check("", "")
    for found in (("a", "b"), ("b", "b")):
        with pytest.raises(ModelLoadError, match="the weights of tiny changed while the ranks read them"):
            check("a", *found)
