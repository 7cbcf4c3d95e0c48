"""Service levels: every request has a deadline for its first token, and the earliest deadline goes first."""

from __future__ import annotations

from pydantic import field_validator

from fwk import Options, SchedulePolicySpec, hookimpl, option
from fwk.types.request import MAX_DEADLINE

MAX_TIERS = 64


class SlaOptions(Options):
    """Options of ``schedulers.sla``."""

    sla_tiers: tuple[str, ...] = option(
        ("priority=1", "flex=60"),
        "Service levels as NAME=SECONDS: the time to the first token that a request whose service_tier is NAME is "
        "promised. A request's own deadline comes before its tier's.",
    )
    sla_default: float = option(
        10.0, "Seconds promised to requests that name neither a known tier nor a deadline.", gt=0, le=MAX_DEADLINE
    )

    @field_validator("sla_tiers")
    @classmethod
    def _check(cls, tiers: tuple[str, ...]) -> tuple[str, ...]:
        read_tiers(tiers)
        return tiers


def read_tiers(tiers: tuple[str, ...]) -> dict[str, float]:
    """Seconds by name. Raises ``ValueError``."""
    found: dict[str, float] = {}
    for text in tiers:
        name, _, seconds = text.rpartition("=")
        try:
            found[name] = float(seconds)
        except ValueError:
            raise ValueError(f"must be NAME=SECONDS, not {text!r}") from None
        if not name or not 0 < found[name] <= MAX_DEADLINE:
            raise ValueError(f"{text!r}: a tier has a name, and seconds above 0 and up to {MAX_DEADLINE:g}")
    if len(found) > MAX_TIERS or len(found) < len(tiers):
        raise ValueError(f"at most {MAX_TIERS} tiers, each of them once")
    return found


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="sla",
            load="fwk_schedulers.sla.policy:EarliestDeadlineFirst",
            options=SlaOptions,
            summary="Requests start by the deadline of their first token, their own or their service tier's.",
        )
    ]
