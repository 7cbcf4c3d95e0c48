"""The observer: counts what it is told, and writes it out when asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk.types import EngineStats
from fwk_observability.prometheus import PrometheusOptions
from fwk_observability.prometheus.push import Push
from fwk_observability.prometheus.requests import LabelledRequests
from fwk_observability.prometheus.values import Growing, Histogram

if TYPE_CHECKING:
    from fastapi import FastAPI

_LAG = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_LAG_PERIOD = 0.1
"""Seconds between two looks at the clock."""

# EngineStats field: name and meaning.
_COUNTERS = {
    "prompt_tokens": ("fwk:prompt_tokens", "Prompt tokens of the requests begun."),
    "generation_tokens": ("fwk:generation_tokens", "Tokens generated."),
    "draft_tokens": ("fwk:num_draft_tokens", "Tokens drafted by the speculative decoder and verified."),
    "accepted_draft_tokens": ("fwk:num_accepted_draft_tokens", "Drafted tokens that the model accepted."),
    "verifications": ("fwk:num_drafts", "Steps of sequences that had drafts to verify."),
    "draft_seconds": ("fwk:draft_seconds", "What the speculative decoder took."),
    "verify_seconds": ("fwk:verify_seconds", "What steps with drafts took, without the making of the next ones."),
    "preemptions": ("fwk:num_preemptions", "Sequences that gave their blocks up and began again."),
    "steps": ("fwk:engine_steps", "Steps of the engine loop."),
    "dropped_messages": (
        "fwk:engine_dropped_messages",
        "Messages to the engine that were not its client's or not of the protocol.",
    ),
    "cached_prompt_tokens": ("fwk:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "restored_prompt_tokens": ("fwk:prefix_cache_restored", "Of these, prompt tokens brought back from a cache tier."),
}


class PrometheusObserver(Observer):
    """Metrics at /metrics. Labels: the served model, one of five finish reasons, and those that requests may bring."""

    def __init__(self, context: ObserverContext) -> None:
        super().__init__(context)
        options = context.options or PrometheusOptions()
        self._requests = LabelledRequests(options)
        self.wants_headers = self._requests.headers
        self._engine = {name: Growing() for name in _COUNTERS}
        self._of_features: dict[tuple[str, str], tuple[str, str, Growing]] = {}
        self._by_position: list[Growing] = []
        self._stats = EngineStats()
        self._lag = Histogram(_LAG)
        self._of_features = self._named([metric.name for metric in self.collect()])
        context.lifecycle.background(self._follow_loop)
        # The models of a server are one page, with one family of each name.
        self._collector = context.shared.setdefault("collector", _Collector())
        self._collector.observers.append(self)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        self._push = Push(self._registry, options) if options.metric_gateway else None

    def _named(self, taken: Sequence[str]) -> dict[tuple[str, str], tuple[str, str, Growing]]:
        """The numbers of features: ``fwk:NUMBER``, or ``fwk:FEATURE_NUMBER`` where something else has that name."""
        numbers = [(feature, n) for feature, kind in self.context.feature_stats.items() for n in _fields(kind)]
        claims = Counter([*taken, *(f"fwk:{number.name}" for _, number in numbers)])
        named: dict[tuple[str, str], tuple[str, str, Growing]] = {}
        for feature, number in numbers:
            plain = f"fwk:{number.name}"
            name = plain if claims[plain] == 1 else f"fwk:{feature}_{number.name}"
            named[feature, number.name] = name, _meaning(feature, number), Growing()
        return named

    def close(self) -> None:
        if self._push is not None:
            self._push.close()
        self._collector.observers.remove(self)

    def routes(self, app: FastAPI) -> None:
        # Written in a thread: a long page holds up no stream. Always the plain format, which every scraper takes: the
        # library's OpenMetrics writer turns the colon of our names into "_".
        async def metrics() -> Response:
            await self.context.settle()
            page = await run_in_threadpool(generate_latest, self._registry)
            return Response(page, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

        app.add_api_route("/metrics", metrics, methods=["GET"], response_model=None, include_in_schema=False)

    async def _follow_loop(self) -> None:
        """Measure how late the event loop calls what is due."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _LAG_PERIOD
            await asyncio.sleep(_LAG_PERIOD)
            self._lag.observe(loop.time() - due)

    def tokens_received(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        self._requests.of(record).tokens_received(record, num_tokens, seconds)

    def request_finished(self, record: RequestRecord) -> None:
        self._requests.of(record).request_finished(record)

    def step_finished(self, stats: EngineStats) -> None:
        self._stats = stats
        for name, counter in self._engine.items():
            counter.reading(getattr(stats, name))
        for (feature, number), (_, _, counter) in self._of_features.items():
            counter.reading(stats.features.get(feature, {}).get(number, 0))
        by_position = stats.accepted_by_position
        self._by_position += [Growing() for _ in by_position[len(self._by_position) :]]
        for position, counter in enumerate(self._by_position):
            counter.reading(by_position[position] if position < len(by_position) else 0)

    def collect(self) -> Iterable[Metric]:
        """Everything as it stands now."""
        model = [self.context.model_name]
        stats = self._stats
        degraded = int(self.context.degraded() is not None)
        usage = stats.num_held_blocks / stats.num_blocks if stats.num_blocks else 0.0
        for name, meaning, value in (
            ("fwk:num_requests_running", "Sequences that the engine works on.", stats.num_running),
            ("fwk:num_requests_waiting", "Sequences that wait for their turn.", stats.num_waiting),
            ("fwk:kv_cache_usage_perc", "Share of the KV cache's blocks that sequences hold; 1 is all.", usage),
            ("fwk:degraded", "Whether /health tells of something that failed while the model is served.", degraded),
        ):
            gauge = GaugeMetricFamily(name, meaning, labels=["model_name"])
            gauge.add_metric(model, value)
            yield gauge
        for field, (name, meaning) in _COUNTERS.items():
            yield self._counter(name, meaning, self._engine[field].total)
        for (feature, number), (name, meaning, counter) in self._of_features.items():
            if number.startswith("num_"):
                gauge = GaugeMetricFamily(name, meaning, labels=["model_name"])
                gauge.add_metric(model, stats.features.get(feature, {}).get(number, 0))
                yield gauge
            else:
                yield self._counter(name, meaning, counter.total)
        accepted = CounterMetricFamily(
            "fwk:num_accepted_tokens_per_pos",
            "Accepted drafts by their place among a step's; divided by fwk:num_drafts_total, the rate of acceptance.",
            labels=["model_name", "position"],
        )
        for position, counter in enumerate(self._by_position):
            accepted.add_metric([*model, str(position)], counter.total)
        yield accepted
        looked_up = self._engine["prompt_tokens"].total
        yield self._counter("fwk:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", looked_up)
        lag = HistogramMetricFamily(
            "fwk:event_loop_lag_seconds",
            "How late the event loop was, asked ten times a second.",
            labels=["model_name"],
        )
        lag.add_metric(model, *self._lag.read())
        yield lag
        yield from self._requests.collect(self.context.model_name)

    def _counter(self, name: str, meaning: str, value: float) -> Metric:
        counter = CounterMetricFamily(name, meaning, labels=["model_name"])
        counter.add_metric([self.context.model_name], value)
        return counter


def _fields(kind: type[msgspec.Struct]) -> tuple[msgspec.inspect.Field, ...]:
    """The numbers of a feature."""
    found = msgspec.inspect.type_info(kind)
    assert isinstance(found, msgspec.inspect.StructType)
    return found.fields


def _meaning(feature: str, number: msgspec.inspect.Field) -> str:
    """What a number says of itself, or else whose it is."""
    extra = number.type.extra_json_schema if isinstance(number.type, msgspec.inspect.Metadata) else None
    return (extra or {}).get("description") or f"{number.name} of the feature {feature}."


class _Collector:
    """What a registry calls: the metrics of the observers of all models."""

    def __init__(self) -> None:
        self.observers: list[PrometheusObserver] = []

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for observer in list(self.observers):
            for metric in observer.collect():
                if metric.name in families:
                    families[metric.name].samples.extend(metric.samples)
                else:
                    families[metric.name] = metric
        return families.values()
