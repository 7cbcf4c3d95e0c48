"""Replicas take turns."""

from fwk import LoadBalancerSpec, hookimpl


@hookimpl
def load_balancers() -> list[LoadBalancerSpec]:
    return [
        LoadBalancerSpec(
            name="round_robin",
            load="fwk_balancers.round_robin.balancer:RoundRobin",
            rank=10,
            summary="one request after the other to one replica after the other",
        )
    ]
