"""An exporter that says once that the collector is not there, and once that it is back."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

# These say it with every batch and every retry.
_LOUD = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal")


class CalmExporter(SpanExporter):
    """Wraps an exporter. Used by one thread, but for ``shutdown``."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False
        for name in _LOUD:
            logging.getLogger(name).setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._exporter.export(spans)
        except Exception as error:
            log.debug("the exporter raised", exc_info=error)
            result = SpanExportResult.FAILURE
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            log.warning(
                "traces cannot be delivered to %s: they are dropped until it answers; check --otlp-traces-endpoint",
                self._endpoint,
            )
        elif self._is_failing and not is_failing:
            log.info("traces are delivered to %s again", self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)
