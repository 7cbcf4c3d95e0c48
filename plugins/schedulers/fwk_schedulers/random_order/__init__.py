"""Random order: every waiting request is as likely to start next as any other."""

from __future__ import annotations

from fwk import Options, SchedulePolicySpec, hookimpl, option


class RandomOptions(Options):
    """Options of ``schedulers.random``."""

    random_order_seed: int | None = option(
        None, "Seed of the order (default: another order in every run).", ge=0, lt=2**63
    )


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="random",
            load="fwk_schedulers.random_order.policy:RandomOrder",
            options=RandomOptions,
            summary="Waiting requests start in random order; a baseline for measuring other policies.",
        )
    ]
