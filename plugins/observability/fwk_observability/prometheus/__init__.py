"""Prometheus metrics at /metrics, under vLLM's names with the prefix ``fwk:``."""

import itertools
import re
from collections.abc import Sequence
from typing import cast

from pydantic import field_validator

from fwk import ObserverSpec, Options, hookimpl, option

_TTFT = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0)
_ITL = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_E2E = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 6.0, 12.0, 25.0, 50.0, 100.0, 200.0, 400.0, 800.0, 1800.0)

_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 1_000_000)

MAX_BUCKETS = 64
MAX_LABELS = 16
_OWN_LABELS = ("model_name", "finished_reason", "position", "le", "job", "instance")


def by_rule(rule: Sequence[object]) -> Sequence[object]:
    """Bounds of buckets, from themselves or from one of SGLang's rules for them."""
    match rule:
        case ["default"]:
            return _TOKENS
        case ["custom", *bounds]:
            return sorted({float(str(bound)) for bound in bounds})
        case ["tse", middle, base, count]:
            return _two_sided(float(str(middle)), float(str(base)), int(str(count)))
        case _:
            return rule


def _two_sided(middle: float, base: float, count: int) -> list[float]:
    """Bounds that lie closest around ``middle``: at powers of ``base`` below and above it."""
    if base <= 1 or not 1 <= count <= MAX_BUCKETS:
        raise ValueError(f"tse MIDDLE BASE COUNT: BASE must be above 1 and COUNT from 1 to {MAX_BUCKETS}")
    steps = [base**power for power in range(1, -(-count // 2) + 1)]
    return sorted({bound for step in (0.0, *steps) for bound in (middle - step, middle + step) if bound > 0})


class PrometheusOptions(Options):
    """Options of ``observers.prometheus``: upper bounds of the histograms' buckets, and a gateway to push to.

    Buckets of tokens are bounds, or a rule: ``default``, ``custom BOUND...``, or ``tse MIDDLE BASE COUNT``, bounds that
    lie closest around the middle.
    """

    bucket_time_to_first_token: tuple[float, ...] = option(_TTFT, "Buckets of the time to the first token.")
    bucket_inter_token_latency: tuple[float, ...] = option(_ITL, "Buckets of the time between two tokens.")
    bucket_e2e_request_latency: tuple[float, ...] = option(_E2E, "Buckets of the time from arrival to the last token.")
    prompt_tokens_buckets: tuple[float, ...] = option(_TOKENS, "Buckets of prompts' tokens, or a rule for them.")
    generation_tokens_buckets: tuple[float, ...] = option(_TOKENS, "Buckets of outputs' tokens, or a rule for them.")
    tokenizer_metrics_allowed_custom_labels: tuple[str, ...] = option(
        (),
        "Labels that requests may bring for the metrics of requests, in the header of "
        "--tokenizer-metrics-custom-labels-header.",
    )
    tokenizer_metrics_custom_labels_header: str = option(
        "x-custom-labels",
        'Header with a request\'s labels, as an object: {"team": "search"}.',
        needs="tokenizer_metrics_allowed_custom_labels",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9-]{0,63}$",
    )
    tokenizer_metrics_max_label_sets: int = option(
        64,
        "Different sets of labels' values that are counted by themselves; those that come later count as 'other'.",
        needs="tokenizer_metrics_allowed_custom_labels",
        ge=1,
        le=10_000,
    )
    metric_gateway: str | None = option(
        None, "Prometheus push gateway that gets the metrics, for servers that cannot be scraped: http://HOST:PORT."
    )
    metric_gateway_job_name: str = option(
        "fwk", "Job that the pushed metrics are of.", aliases=["job-name"], needs="metric_gateway", min_length=1
    )
    metric_gateway_grouping_key: tuple[str, ...] = option(
        (),
        "Further labels of what is pushed, as KEY=VALUE: servers of one job need different ones.",
        aliases=["grouping-key"],
        needs="metric_gateway",
    )
    metric_gateway_push_interval: float = option(
        10.0, "Seconds between two pushes.", aliases=["push-interval"], needs="metric_gateway", ge=0.1, le=86400
    )
    metric_gateway_credential: str | None = option(
        None,
        "USER:PASSWORD for the gateway (basic authentication).",
        is_secret=True,
        needs="metric_gateway",
        pattern=r"^[^:]+:.+$",
    )

    @field_validator("prompt_tokens_buckets", "generation_tokens_buckets", mode="before")
    @classmethod
    def _by_rule(cls, rule: object) -> object:
        words = [rule] if isinstance(rule, str) else rule
        return by_rule(cast("Sequence[object]", words)) if isinstance(words, (list, tuple)) else words

    @field_validator("metric_gateway")
    @classmethod
    def _is_address(cls, address: str | None) -> str | None:
        if address is None:
            return None
        if "@" in address:
            raise ValueError("a password does not belong into the address: --metric-gateway-credential takes it")
        address = address if "://" in address else f"http://{address}"
        if not re.fullmatch(r"https?://[^/\s?#]+(/[^\s?#]*)?", address):
            raise ValueError("must be the address of a push gateway: http://HOST:PORT")
        return address

    @field_validator("tokenizer_metrics_allowed_custom_labels")
    @classmethod
    def _are_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]{0,63}", name, re.ASCII) or name in _OWN_LABELS:
                raise ValueError(f"{name!r} is no name of a label, or one of our own ({', '.join(_OWN_LABELS)})")
        if len(set(names)) < len(names) or len(names) > MAX_LABELS:
            raise ValueError(f"has a name twice, or more than {MAX_LABELS}")
        return names

    @field_validator("metric_gateway_grouping_key")
    @classmethod
    def _are_labels(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        names = [label.partition("=")[0] for label in labels]
        if not all(re.fullmatch(r"[A-Za-z_]\w*=.+", label, re.ASCII) for label in labels) or "job" in names:
            raise ValueError("must be KEY=VALUE, with a name of letters, digits and _ that is not job")
        if len(set(names)) < len(names):
            raise ValueError("has a name twice")
        return labels

    @field_validator(
        "bucket_time_to_first_token",
        "bucket_inter_token_latency",
        "bucket_e2e_request_latency",
        "prompt_tokens_buckets",
        "generation_tokens_buckets",
    )
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
            summary="Prometheus metrics at /metrics, or pushed to a gateway",
        )
    ]
