"""What every load balancer must do."""

from __future__ import annotations

from fwk.interfaces.balance import BalanceContext, LoadBalancer, Replica
from fwk.plugins import Registered
from fwk.types import Request, SamplingParams
from fwk_kit.testing.base import PluginSuite


def request(name: str = "r") -> Request:
    """A small one."""
    return Request(request_id=name, prompt_token_ids=[1], sampling=SamplingParams())


class LoadBalancerSuite(PluginSuite):
    """One of those it is given, whoever they are, and nobody left without work."""

    family = "load_balancers"
    interface = LoadBalancer

    def balancer(self, item: Registered, count: int = 3) -> LoadBalancer:
        """One for so many engines."""
        return self.make(item, BalanceContext(count, self.given(item)))

    def exercise(self, item: Registered) -> None:
        self.test_chooses_one_of_those_it_is_given_and_changes_none(item)

    def test_chooses_one_of_those_it_is_given_and_changes_none(self, item: Registered) -> None:
        balancer, replicas = self.balancer(item), [Replica(index) for index in range(3)]
        for subset in (replicas, replicas[1:], replicas[:1], replicas[::2], replicas[2:]) * 3:
            before = [(replica.index, replica.num_open) for replica in subset]
            chosen = balancer.choose(request(), subset)
            assert any(chosen is replica for replica in subset), f"{chosen} is not among those that can serve"
            assert [(replica.index, replica.num_open) for replica in subset] == before

    def test_no_engine_is_forgotten(self, item: Registered) -> None:
        """Of many different requests, each counted as open, every engine gets a share."""
        balancer, replicas = self.balancer(item), [Replica(index) for index in range(3)]
        for number in range(90):
            balancer.choose(request(f"r{number}"), replicas).num_open += 1
        assert min(replica.num_open for replica in replicas) >= 10, [replica.num_open for replica in replicas]

    def test_two_servers_do_not_share(self, item: Registered) -> None:
        one, two = self.balancer(item), self.balancer(item, 1)
        replicas = [Replica(index) for index in range(3)]
        for _ in range(5):
            one.choose(request(), replicas)
            assert two.choose(request(), replicas[:1]) is replicas[0]
