"""The observer: a span for each request, made when the request has ended."""

from __future__ import annotations

import threading
import time
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from fwk import __version__
from fwk.interfaces.observer import Observer, ObserverContext, RequestRecord
from fwk_http.clients import Allowance, bound_requests
from fwk_observability.otel.exporter import CalmExporter

MAX_QUEUE = 2_048
"""Spans that wait for the collector; when there are more, the oldest are dropped."""

EXPORT_SECONDS = 5.0
CLOSE_SECONDS = 2.0
MAX_ANSWER_BYTES = 2**20


class OtelObserver(Observer):
    """Makes spans with the attributes of OpenTelemetry's conventions for generative AI.

    On the event loop it only puts a finished span into a bounded queue; a thread of its own talks to the collector.
    """

    def __init__(self, context: ObserverContext, exporter: SpanExporter | None = None) -> None:
        super().__init__(context)
        endpoint = context.options.endpoint
        if exporter is None:
            session = bound_requests(requests.Session(), lambda: Allowance(MAX_ANSWER_BYTES, EXPORT_SECONDS))
            exporter = OTLPSpanExporter(endpoint, timeout=EXPORT_SECONDS, session=session)
        self._exporter = CalmExporter(exporter, endpoint)
        # A caller that samples decides for its requests too; what comes without a trace is always sent.
        self._provider = TracerProvider(resource=_resource(), sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=MAX_QUEUE))
        self._tracer = self._provider.get_tracer("fwk", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def request_finished(self, record: RequestRecord) -> None:
        now = time.time_ns()
        lasted = (record.finished or record.arrived) - record.arrived
        span = self._tracer.start_span(
            f"{record.operation} {self.context.model_name}",
            context=self._propagator.extract(record.trace),
            kind=SpanKind.SERVER,
            attributes=self._attributes(record),
            start_time=now - int(lasted * 1e9),
        )
        if "error" in record.finish_reasons:
            span.set_attribute("error.type", "engine")
            span.set_status(Status(StatusCode.ERROR, "the engine could not finish the request"))
        span.end(now)

    def close(self) -> None:
        """Send what is left, but hold up the end of the server for a moment only."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            self._exporter.shutdown()

    def _attributes(self, record: RequestRecord) -> dict[str, Any]:
        model = self.context.model_name
        sampling = record.sampling
        found = {
            "gen_ai.operation.name": record.operation,
            "gen_ai.provider.name": "fwk",
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": record.request_id,
            "gen_ai.response.finish_reasons": list(record.finish_reasons) or None,
            "gen_ai.response.time_to_first_chunk": _since(record.arrived, record.first_token),
            "gen_ai.usage.input_tokens": record.num_prompt_tokens,
            "gen_ai.usage.output_tokens": record.num_output_tokens,
            "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
            "gen_ai.request.choice.count": record.n if record.n > 1 else None,
            "fwk.request.label": record.label or None,
        }
        if sampling is not None:
            found |= {
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k or None,
                "gen_ai.request.seed": sampling.seed,
            }
        return {name: value for name, value in found.items() if value is not None}


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else max(end - start, 0.0)


def _resource() -> Resource:
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):  # nobody named it
        resource = resource.merge(Resource({SERVICE_NAME: "fwk"}))
    return resource
