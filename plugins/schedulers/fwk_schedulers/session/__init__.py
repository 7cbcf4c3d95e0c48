"""Session affinity: the next turn of a conversation starts while the K/V of the last one is still cached."""

from __future__ import annotations

from fwk import Options, SchedulePolicySpec, hookimpl, option


class SessionOptions(Options):
    """Options of ``schedulers.session``."""

    session_window: int = option(64, "Sessions served last that go before all others, the latest first.", ge=1, le=4096)
    session_max_wait: float = option(
        5.0,
        "Seconds after which a request goes before those of recent sessions, so that nobody starves.",
        ge=0,
        le=86400,
    )


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="session",
            load="fwk_schedulers.session.policy:SessionAffinity",
            options=SessionOptions,
            summary="Requests of the sessions (session_id) served last start first, within a bound on waiting.",
        )
    ]
