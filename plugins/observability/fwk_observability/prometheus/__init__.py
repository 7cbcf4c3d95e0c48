"""Prometheus metrics at /metrics, under vLLM's names with the prefix ``fwk:``."""

import itertools

from pydantic import field_validator

from fwk import ObserverSpec, Options, hookimpl, option

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0)
_ITL = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_E2E = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1800.0)

MAX_BUCKETS = 64


class PrometheusOptions(Options):
    """Options of ``observers.prometheus``: upper bounds of the histograms' buckets, in seconds."""

    bucket_time_to_first_token: tuple[float, ...] = option(_TTFT, "Buckets of the time to the first token.")
    bucket_inter_token_latency: tuple[float, ...] = option(_ITL, "Buckets of the time between two tokens.")
    bucket_e2e_request_latency: tuple[float, ...] = option(_E2E, "Buckets of the time from arrival to the last token.")

    @field_validator("*")
    @classmethod
    def _check(cls, bounds: tuple[float, ...]) -> tuple[float, ...]:
        if not 1 <= len(bounds) <= MAX_BUCKETS:
            raise ValueError(f"1 to {MAX_BUCKETS} buckets")
        if any(not 0 < bound < float("inf") for bound in bounds):
            raise ValueError("buckets must be finite and above 0")
        if any(low >= high for low, high in itertools.pairwise(bounds)):
            raise ValueError("buckets must ascend")
        return bounds


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="prometheus",
            load="fwk_observability.prometheus.observer:PrometheusObserver",
            options=PrometheusOptions,
            summary="Prometheus metrics at /metrics",
        )
    ]
