"""The engine with the fewest open sequences."""

from __future__ import annotations

from fwk import LoadBalancerSpec, hookimpl


@hookimpl
def load_balancers() -> list[LoadBalancerSpec]:
    return [
        LoadBalancerSpec(
            name="mine",
            load="fwk_mine.plugin:MineBalancer",
            summary="the engine with the fewest open sequences",
        )
    ]
