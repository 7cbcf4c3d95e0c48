"""Depth first by weight: requests whose prompts begin alike start together, the largest family of them first."""

from __future__ import annotations

from fwk import SchedulePolicySpec, hookimpl


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="dfs-weight",
            load="fwk_schedulers.dfs_weight.policy:DepthFirstByWeight",
            summary="Requests that share a prefix with most other waiting ones start first, families together.",
        )
    ]
