"""Load balancers: who gets the next request."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.plugins import discover, load_object
from fwk.types import EngineStats, Request, SamplingParams
from fwk_balancers.cache_aware import CacheAwareOptions
from fwk_balancers.cache_aware.prefixes import CHUNK, MAX_CHUNKS
from fwk_balancers.minimum_tokens import MinimumTokensOptions
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


def asks(length: int, max_tokens: int = 8, seed: int = 0, n: int = 1, namespace: str = "") -> Request:
    """Prompts of one seed have a common prefix."""
    return Request(
        request_id=f"{seed}-{length}",
        prompt_token_ids=[seed * 10_000 + place for place in range(length)],
        sampling=SamplingParams(max_tokens=max_tokens),
        n=n,
        cache_namespace=namespace,
    )


def test_tokens_of_open_requests_are_counted_not_requests() -> None:
    context = BalanceContext(2, MinimumTokensOptions(balance_output_tokens=50))
    balancer, replicas = load_object(ITEMS["minimum_tokens"])(context), [Replica(0), Replica(1)]
    long, short = asks(1000), asks(100, max_tokens=1000, n=2)
    assert balancer.choose(long, replicas).index == 0
    found = [balancer.choose(short, replicas).index for _ in range(6)]
    assert found == [1] * 6, "200 tokens each, and 1,008 are open there"
    assert [balancer.info(replica) for replica in replicas] == [{"open_tokens": 1008}, {"open_tokens": 1200}]
    for _ in range(5):
        balancer.ended(short, replicas[1])
    assert balancer.choose(long, replicas).index == 1
    balancer.ended(long, replicas[0])
    assert balancer.choose(short, replicas).index == 0


def aware(count: int = 2, **options: Any) -> tuple[LoadBalancer, list[Replica]]:
    context = BalanceContext(count, CacheAwareOptions(**options))
    return load_object(ITEMS["cache_aware"])(context), [Replica(index) for index in range(count)]


def told(balancer: LoadBalancer, replica: Replica) -> dict[str, int]:
    return balancer.info(replica)["choices"]


def test_conversations_stay_where_their_beginning_is() -> None:
    """Of 8 conversations of 10 turns on 4 replicas, all but the first turns find their prefix, evenly spread."""
    balancer, replicas = aware(4)
    for turn in range(1, 11):
        for seed in range(8):
            balancer.choose(asks(100 * turn, seed=seed), replicas)
    assert [told(balancer, replica) for replica in replicas] == [
        {
            "prefix": 2 * 9,
            "behind": 0,
            "new": 2,
            "cached_tokens": 2 * sum(100 * turn // CHUNK * CHUNK for turn in range(1, 10)),
            "known_tokens": 2 * (1000 // CHUNK * CHUNK),
        }
    ] * 4


def test_a_replica_that_is_behind_is_passed_over_by_both_bounds() -> None:
    balancer, replicas = aware(balance_abs_threshold=4, balance_rel_threshold=2.0)
    prompt = asks(320)
    assert balancer.choose(prompt, replicas).index == 0
    for open_there, open_elsewhere, wanted in ((4, 0, 0), (5, 0, 1), (15, 10, 0), (21, 10, 1), (20, 10, 0)):
        balancer, replicas = aware(balance_abs_threshold=4, balance_rel_threshold=2.0)
        balancer.choose(prompt, replicas)
        replicas[0].num_open, replicas[1].num_open = open_there, open_elsewhere
        assert balancer.choose(prompt, replicas).index == wanted, (open_there, open_elsewhere)
        assert told(balancer, replicas[1])["behind"] == wanted
        replicas[0].num_open = open_elsewhere
        replicas[1].num_open = open_elsewhere + 1
        assert balancer.choose(prompt, replicas).index == 0, "of two that have it, the one with less to do"


def test_the_longest_prefix_counts_and_only_from_the_threshold() -> None:
    balancer, replicas = aware(3, cache_threshold=0.5)
    balancer.choose(asks(160), [replicas[1]])
    balancer.choose(asks(320), [replicas[2]])
    balancer.choose(asks(1000, seed=9), [replicas[2]])
    assert balancer.choose(asks(330), replicas).index == 2
    assert balancer.choose(asks(340), replicas[:2]).index == 0, "10 of 21 chunks are less than a half"
    assert balancer.choose(asks(330), replicas[1:]).index == 2
    assert balancer.choose(asks(320, namespace="another"), replicas).index == 1, "another namespace shares nothing"


def test_what_a_replica_forgot_or_lost_is_not_counted_on() -> None:
    balancer, replicas = aware(max_tree_size=1024)
    balancer.choose(asks(1000), [replicas[0]])
    balancer.choose(asks(512, seed=1), [replicas[0]])
    assert told(balancer, replicas[0])["known_tokens"] == 1024
    balancer.choose(asks(1000), replicas)
    assert told(balancer, replicas[0])["cached_tokens"] == 512, "of the older prompt the beginning is left"
    replicas[0].stats = EngineStats(num_blocks=100, num_free_blocks=100)
    replicas[0].num_open = 1
    assert balancer.choose(asks(1000), replicas).index == 0, "its first request may not have reached it"
    replicas[0].num_open = 0
    assert balancer.choose(asks(1000), replicas).index == 1, "it was started again, and has been chosen last"


def test_a_prompt_without_end_is_looked_at_as_far_as_the_bound() -> None:
    balancer, replicas = aware()
    assert balancer.choose(asks(MAX_CHUNKS * CHUNK * 2), replicas).index == 0
    assert told(balancer, replicas[0])["known_tokens"] == MAX_CHUNKS * CHUNK
    assert balancer.choose(asks(MAX_CHUNKS * CHUNK * 2), replicas).index == 0
