"""Short prompts first, with aging."""

from __future__ import annotations

from fwk import Options, SchedulePolicySpec, hookimpl, option


class AgingOptions(Options):
    """Options of ``schedulers.aging``."""

    aging_rate: float = option(100.0, "Tokens a prompt counts less for each second it has waited.", ge=0, le=1e6)


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="aging",
            load="fwk_aging_policy.policy:AgingPolicy",
            options=AgingOptions,
            summary="short prompts first; waiting counts",
        )
    ]
