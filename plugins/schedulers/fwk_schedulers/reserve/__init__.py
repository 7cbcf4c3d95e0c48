"""First come, first served, and none starts that the KV cache may not have room for until all that run have ended.

Against pre-emptions, which compute again what was computed: of long outputs in a small KV cache. It costs throughput
where requests end long before their ``max_tokens``.
"""

from fwk import Options, SchedulePolicySpec, hookimpl, option


class ReserveOptions(Options):
    """Options of the ``reserve`` policy."""

    router_token_ratio: float = option(
        0.0,
        "Share of the KV cache in use up to which requests start without room for their outputs being kept.",
        ge=0,
        le=1,
    )
    router_max_new_token_len: int = option(
        1024, "Most tokens of an output that room is kept for; the rest of longer ones is not foreseen.", ge=1, le=2**24
    )
    scheduler_reserve_resource_ratio: float = option(
        0.0, "Percent of the KV cache that stays free when a request starts.", ge=0, le=99
    )


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="reserve",
            load="fwk_schedulers.reserve.policy:ReserveRoom",
            options=ReserveOptions,
            switches=("disable-aggressive-schedule",),
            summary="First come, first served; a request starts when there is room for the outputs of all that run.",
        )
    ]
