"""First come, first served."""

from __future__ import annotations

from fwk import SchedulePolicySpec, hookimpl


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="fcfs",
            load="fwk_schedulers.fcfs.policy:FirstComeFirstServed",
            rank=10,
            summary="Requests start in the order in which they arrived.",
        )
    ]
