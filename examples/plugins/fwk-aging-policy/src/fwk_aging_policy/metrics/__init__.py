"""What the policy does, measured at the door."""

from __future__ import annotations

from fwk import ObserverSpec, Options, hookimpl, option


class MetricsOptions(Options):
    """Options of ``observers.aging``."""

    aging_metrics: bool = option(False, "Show the time to the first token by length of the prompt at /aging/metrics.")


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="aging",
            load="fwk_aging_policy.metrics.observer:AgingMetrics",
            options=MetricsOptions,
            enabled_by=("aging_metrics",),
            summary="time to the first token by length of the prompt",
        )
    ]
