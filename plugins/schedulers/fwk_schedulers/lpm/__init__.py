"""Longest cached prefix first: requests that share a prompt run while its K/V is still cached."""

from __future__ import annotations

from fwk import Options, SchedulePolicySpec, hookimpl, option


class LpmOptions(Options):
    """Options of ``schedulers.lpm``."""

    lpm_window: int = option(
        128,
        "Requests at the head of the queue that are put in order of their cached prefix; those behind keep the order "
        "of arrival, so that a long queue costs no more than a short one.",
        ge=1,
        le=4096,
    )
    lpm_max_overtakes: int = option(
        32,
        "Later requests that may start before an earlier one; then the earlier one goes first whatever is cached, so "
        "that nobody starves.",
        ge=0,
        le=2**20,
    )


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="lpm",
            load="fwk_schedulers.lpm.policy:LongestPrefixMatch",
            options=LpmOptions,
            summary="Requests with the longest cached prefix start first, within bounds that prevent starvation.",
        )
    ]
