"""Weighted fair share: API keys that keep the server busy get tokens in the ratio of their weights."""

from __future__ import annotations

from pydantic import field_validator

from fwk import Options, SchedulePolicySpec, hookimpl, option

MAX_WEIGHTS = 10_000

MAX_STARTING = 128
"""Tenants whose requests may start in one step: those that have used least."""

MAX_REMEMBERED = 10_000
"""Tenants whose use is kept; when there are more, those who wait for nothing are forgotten, and count as new."""


class FairOptions(Options):
    """Options of ``schedulers.fair``."""

    fair_share_weights: tuple[str, ...] = option(
        (), "Shares of API keys as KEY=WEIGHT; other keys, and requests without one, have the weight 1.", is_secret=True
    )
    fair_share_output_cost: float = option(
        2.0, "What a generated token counts, where a token of a prompt counts 1.", ge=0, le=1000
    )

    @field_validator("fair_share_weights")
    @classmethod
    def _check(cls, weights: tuple[str, ...]) -> tuple[str, ...]:
        read_weights(weights)
        return weights


def read_weights(weights: tuple[str, ...]) -> dict[str, float]:
    """Weights by key. Raises ``ValueError``, which does not tell the key."""
    found: dict[str, float] = {}
    for number, text in enumerate(weights, 1):
        key, _, weight = text.rpartition("=")
        try:
            found[key] = float(weight)
        except ValueError:
            raise ValueError(f"must be KEY=WEIGHT: entry {number} is not") from None
        if not key or not 1e-3 <= found[key] <= 1e3:
            raise ValueError(f"entry {number} must have a key, and a weight between 0.001 and 1000")
    if len(found) > MAX_WEIGHTS or len(found) < len(weights):
        raise ValueError(f"at most {MAX_WEIGHTS} weights, each key once")
    return found


@hookimpl
def schedule_policies() -> list[SchedulePolicySpec]:
    return [
        SchedulePolicySpec(
            name="fair",
            load="fwk_schedulers.fair.policy:FairShare",
            options=FairOptions,
            summary="API keys that always have requests waiting get tokens in the ratio of their weights.",
        )
    ]
