"""The replica with the least to do."""

from fwk import LoadBalancerSpec, hookimpl


@hookimpl
def load_balancers() -> list[LoadBalancerSpec]:
    return [
        LoadBalancerSpec(
            name="shortest_queue",
            load="fwk_balancers.shortest_queue.balancer:ShortestQueue",
            summary="to the replica with the fewest sequences under way or waiting",
        )
    ]
