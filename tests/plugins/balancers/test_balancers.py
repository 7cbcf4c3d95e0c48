"""Load balancers: who gets the next request."""

from __future__ import annotations

import itertools

import pytest

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.plugins import discover, load_object
from fwk.types import EngineStats
from fwk_balancers.wrr import WeightedOptions
from fwk_kit.testing.balancers import request

REQUEST = request()
ITEMS = {item.name: item for item in discover().family("load_balancers")}


def make(name: str, count: int = 3) -> tuple[LoadBalancer, list[Replica]]:
    return load_object(ITEMS[name])(BalanceContext(count)), [Replica(index) for index in range(count)]


def chosen(balancer: LoadBalancer, replicas: list[Replica], times: int) -> list[int]:
    return [balancer.choose(REQUEST, replicas).index for _ in range(times)]


@pytest.mark.parametrize("name", sorted(ITEMS))
def test_equals_get_equal_shares(name: str) -> None:
    balancer, replicas = make(name)
    found = chosen(balancer, replicas, 30)
    assert [found.count(index) for index in range(3)] == [10, 10, 10]


def test_turns_go_on_when_one_cannot_serve() -> None:
    balancer, replicas = make("round_robin")
    assert chosen(balancer, replicas, 2) == [0, 1]
    assert chosen(balancer, [replicas[0], replicas[1]], 3) == [0, 1, 0]
    assert chosen(balancer, replicas, 4) == [1, 2, 0, 1]


def test_the_shortest_queue_is_preferred() -> None:
    balancer, replicas = make("shortest_queue")
    for replica, count in zip(replicas, (5, 2, 3), strict=True):
        replica.num_open = count
    assert chosen(balancer, replicas, 2) == [1, 1]
    assert chosen(balancer, [replicas[0], replicas[2]], 1) == [2]
    replicas[0].num_open = 0
    assert chosen(balancer, replicas, 1) == [0]


def loaded(replicas: list[Replica], usages: list[int]) -> None:
    for replica, held in zip(replicas, usages, strict=True):
        replica.stats = EngineStats(num_blocks=100, num_held_blocks=held)


def test_shares_are_those_of_free_kv_cache() -> None:
    balancer, replicas = make("wrr")
    loaded(replicas, [0, 50, 75])
    found = chosen(balancer, replicas, 70)
    assert [found.count(index) for index in range(3)] == [40, 20, 10]
    assert max(len(list(group)) for _, group in itertools.groupby(found)) <= 2, "turns are spread"


def test_full_engines_get_nothing_while_another_has_room() -> None:
    balancer, replicas = make("wrr")
    loaded(replicas, [85, 90, 10])
    assert set(chosen(balancer, replicas, 20)) == {2}
    loaded(replicas, [85, 90, 95])
    found = chosen(balancer, replicas, 60)
    assert [found.count(index) for index in range(3)] == [30, 20, 10]


def test_shares_are_those_of_open_sequences() -> None:
    context = BalanceContext(2, WeightedOptions.model_validate({"rank_factor": "1"}))
    balancer, replicas = load_object(ITEMS["wrr"])(context), [Replica(0, num_open=0), Replica(1, num_open=3)]
    found = chosen(balancer, replicas, 50)
    assert found.count(0) == 40
