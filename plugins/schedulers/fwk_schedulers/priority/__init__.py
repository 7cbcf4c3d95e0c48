"""Strict priorities: the most urgent request first, also before those that run, if it is urgent enough."""

from __future__ import annotations

from fwk import Options, SchedulePolicySpec, hookimpl, option


class PriorityOptions(Options):
    """Options of ``schedulers.priority``."""

    schedule_low_priority_values_first: bool = option(
        False, "Lower values of a request's priority are more urgent (default: higher ones are)."
    )
    priority_scheduling_preemption_threshold: int = option(
        10,
        "How much more urgent a waiting request must be than a running one for that one to be pre-empted when both do "
        "not fit.",
        ge=1,
        le=2**32,
    )


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="priority",
            load="fwk_schedulers.priority.policy:StrictPriority",
            options=PriorityOptions,
            switches=("enable-priority-scheduling",),
            summary="Requests start by their priority, and pre-empt running ones of a much lower priority.",
        )
    ]
