"""Longest output first: what will run longest starts first, so that the end of a batch of work is not one long tail."""

from __future__ import annotations

from fwk import SchedulePolicySpec, hookimpl


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="lof",
            load="fwk_schedulers.lof.policy:LongestOutputFirst",
            summary="Requests with the largest max_tokens start first; for work that ends, as short ones can starve.",
        )
    ]
