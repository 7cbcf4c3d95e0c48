"""What is measured of requests, for each set of values that they bring for the allowed labels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import cast

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric

from fwk.interfaces.observer import RequestRecord
from fwk_observability.prometheus import PrometheusOptions
from fwk_observability.prometheus.values import Histogram

OTHER = "other"
"""The value of every label, for requests whose values came after as many sets as there may be."""

MAX_HEADER = 2048
MAX_VALUE = 64

# A request with several sequences is counted once, under the first of these that one of them ended with.
_REASONS = ("error", "abort", "length", "stop")


class RequestMetrics:
    """The histograms and counts of requests that have the same labels."""

    def __init__(self, options: PrometheusOptions) -> None:
        self.first_token = Histogram(options.bucket_time_to_first_token)
        self.between_tokens = Histogram(options.bucket_inter_token_latency)
        self.latency = Histogram(options.bucket_e2e_request_latency)
        self.prompt_len = Histogram(options.prompt_tokens_buckets)
        self.output_len = Histogram(options.generation_tokens_buckets)
        self.finished: dict[str, int] = dict.fromkeys((*_REASONS, "other"), 0)

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        """As ``Observer.tokens_received``."""
        # The record counts these tokens already, so ``last_token`` is when they came. A sequence's first tokens are
        # those that came as long after arrival as that is; of a request's sequences only the first one's is its first
        # token.
        if record.last_token is None or seconds >= record.last_token - record.arrived:
            if record.num_output_tokens <= num_tokens:
                self.first_token.observe(seconds)
        elif num_tokens:
            self.between_tokens.observe(seconds / num_tokens, num_tokens)

    def request_finished(self, record: RequestRecord) -> None:
        """As ``Observer.request_finished``."""
        reasons = set(record.finish_reasons) or {"abort"}
        self.finished[next((known for known in _REASONS if known in reasons), "other")] += 1
        self.prompt_len.observe(record.num_prompt_tokens)
        self.output_len.observe(record.num_output_tokens)
        if record.finished is not None:
            self.latency.observe(record.finished - record.arrived)


class LabelledRequests:
    """The metrics of all requests, by the labels that they bring in a header: an object of names and values.

    There are at most so many sets of values, however many clients invent: those that come later count as ``other``.
    """

    def __init__(self, options: PrometheusOptions) -> None:
        self._options = options
        self._names = options.tokenizer_metrics_allowed_custom_labels
        self._header = options.tokenizer_metrics_custom_labels_header.lower()
        self._most = options.tokenizer_metrics_max_label_sets
        self._sets: dict[tuple[str, ...], RequestMetrics] = {("",) * len(self._names): RequestMetrics(options)}
        self._values = lru_cache(256)(self._read)

    @property
    def headers(self) -> frozenset[str]:
        """Names of the headers that are read."""
        return frozenset([self._header] if self._names else [])

    def of(self, record: RequestRecord) -> RequestMetrics:
        """What a request counts for."""
        values = self._values(record.headers.get(self._header, "")) if self._names else ()
        found = self._sets.get(values)
        if found is None:
            if len(self._sets) > self._most:  # the set without values is beyond these
                values = (OTHER,) * len(self._names)
            found = self._sets.setdefault(values, RequestMetrics(self._options))
        return found

    def _read(self, header: str) -> tuple[str, ...]:
        """The values of the allowed labels; empty where a header has none, or is no object of texts."""
        try:
            given = json.loads(header) if 0 < len(header) <= MAX_HEADER else {}
        except (ValueError, RecursionError):
            given = {}
        pairs: Mapping[str, object] = cast("Mapping[str, object]", given) if isinstance(given, dict) else {}
        return tuple(_value(pairs.get(name)) for name in self._names)

    def collect(self, model: str) -> Iterator[Metric]:
        """The metrics as they stand."""
        names: Sequence[str] = ["model_name", *self._names]
        sets = [([model, *values], metrics) for values, metrics in list(self._sets.items())]
        finished = CounterMetricFamily("fwk:request_success", "Requests ended.", labels=[*names, "finished_reason"])
        for values, metrics in sets:
            for reason, count in metrics.finished.items():
                finished.add_metric([*values, reason], count)
        yield finished
        for name, meaning, histogram in (
            ("fwk:time_to_first_token_seconds", "From arrival to the first token.", "first_token"),
            ("fwk:inter_token_latency_seconds", "Between two tokens of a sequence.", "between_tokens"),
            ("fwk:e2e_request_latency_seconds", "From arrival to the end.", "latency"),
            ("fwk:request_prompt_tokens", "Prompt tokens per request.", "prompt_len"),
            ("fwk:request_generation_tokens", "Generated tokens per request.", "output_len"),
        ):
            family = HistogramMetricFamily(name, meaning, labels=names)
            for values, metrics in sets:
                family.add_metric(values, *getattr(metrics, histogram).read())
            yield family


def _value(value: object) -> str:
    is_label = isinstance(value, str) and len(value) <= MAX_VALUE and value.isprintable()
    return cast(str, value) if is_label else ""
