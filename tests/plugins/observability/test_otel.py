"""The OpenTelemetry observer: spans as a collector gets them, and what happens when there is no collector."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.helpers import servers
from tests.helpers.rig import until

from fwk.errors import ConfigError
from fwk.interfaces.observer import ObserverContext, RequestRecord
from fwk.plugins import build_config, discover, taking_part
from fwk.types import SamplingParams
from fwk_observability.otel import LOCAL, OtelOptions
from fwk_observability.otel.observer import OtelObserver

python_path, spawn, tiny_model = servers.python_path, servers.spawn, servers.tiny_model
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}


class Collector:
    """An OTLP/HTTP collector that keeps what it is sent."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        keep = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                keep.paths.append(self.path)
                keep.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


def attributes(span: Any) -> dict[str, Any]:
    """Of a protobuf span."""
    found: dict[str, Any] = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [part.string_value for part in value.values] if kind == "array_value" else value
    return found


def record(**fields: Any) -> RequestRecord:
    known = {"request_id": "id-1", "label": "", "num_prompt_tokens": 100, "arrived": 1000.0, "finished": 1000.75}
    return RequestRecord(**(known | fields))


def context(url: str = LOCAL) -> ObserverContext:
    return ObserverContext("tiny", OtelOptions(otlp_traces_endpoint=url))


def spans_of(*records: RequestRecord) -> list[Any]:
    """What an exporter in memory gets."""
    exporter = InMemorySpanExporter()
    observer = OtelObserver(context(), exporter)
    for item in records:
        observer.request_finished(item)
    observer.close()
    return list(exporter.get_finished_spans())


def test_a_request_is_a_span() -> None:
    before = time.time_ns()
    (span,) = spans_of(
        record(
            label="mine", operation="chat", first_token=1000.25, num_output_tokens=7, cached_tokens=16,
            finish_reasons=("stop", "length"), n=2, sampling=SamplingParams(max_tokens=9, temperature=0.5, seed=3),
        )
    )  # fmt: skip
    assert span.name == "chat tiny"
    assert span.kind.name == "SERVER"
    assert span.end_time - span.start_time == 750_000_000
    assert before <= span.end_time <= time.time_ns()
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "fwk",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "id-1",
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.response.time_to_first_chunk": 0.25,
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": 3,
        "fwk.request.label": "mine",
    }
    assert span.parent is None
    assert span.resource.attributes["service.name"] == "fwk"
    assert span.status.is_unset


def test_a_request_that_made_nothing_is_a_span_too() -> None:
    (span,) = spans_of(record(finish_reasons=("abort",)))
    assert "gen_ai.response.time_to_first_chunk" not in span.attributes
    assert span.attributes["gen_ai.usage.output_tokens"] == 0
    (failed,) = spans_of(record(finish_reasons=("stop", "error")))
    assert failed.status.status_code.name == "ERROR"
    assert failed.attributes["error.type"] == "engine"


@pytest.mark.parametrize(
    "trace", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'0' * 32}-{SPAN_ID}-01"}, {"tracestate": "a=b"}]
)
def test_without_a_parent_a_trace_begins(trace: dict[str, str]) -> None:
    (span,) = spans_of(record(trace=trace))
    assert span.parent is None


def test_the_caller_is_the_parent() -> None:
    (span,) = spans_of(record(trace=PARENT))
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == SPAN_ID
    assert spans_of(record(trace={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})) == []  # not sampled there


def test_the_name_of_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    (span,) = spans_of(record())
    assert span.resource.attributes["service.name"] == "mine"


def test_a_collector_gets_the_spans(collector: Collector) -> None:
    observer = OtelObserver(context(collector.url))
    for i in range(3):
        observer.request_finished(record(num_output_tokens=i, trace=PARENT))
    observer.close()
    assert set(collector.paths) == {"/v1/traces"}
    assert sorted(attributes(span)["gen_ai.usage.output_tokens"] for span in collector.spans) == [0, 1, 2]
    assert {span.parent_span_id.hex() for span in collector.spans} == {SPAN_ID}


def test_a_dead_collector_costs_one_warning(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fwk_observability.otel.observer.EXPORT_SECONDS", 0.3)
    closed = Collector()
    closed.close()
    with caplog.at_level(logging.INFO):
        observer = OtelObserver(context(closed.url))
        for _ in range(3):
            observer.request_finished(record())
            observer._provider.force_flush()
        started = time.monotonic()
        observer.close()
    assert time.monotonic() - started < 3
    assert [(r.levelname, r.name) for r in caplog.records] == [("WARNING", "fwk_observability.otel.exporter")]
    assert closed.url in caplog.text


def test_a_collector_that_comes_back_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Flaky(SpanExporter):
        answers = iter([False, True, True, False])

        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS if next(self.answers) else SpanExportResult.FAILURE

    with caplog.at_level(logging.INFO):
        observer = OtelObserver(context(), Flaky())
        for _ in range(4):
            observer.request_finished(record())
            observer._provider.force_flush()
        observer.close()
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO", "WARNING"]


@pytest.mark.sweep
def test_a_collector_that_hangs_holds_nothing_up(caplog: pytest.LogCaptureFixture) -> None:
    """The queue is bounded, a finished request waits for nobody, and the server's end waits a moment only."""
    go_on = threading.Event()

    class Hanging(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            go_on.wait(20)
            return SpanExportResult.SUCCESS

        def shutdown(self) -> None:
            go_on.set()

    observer = OtelObserver(context(), Hanging())
    started = time.monotonic()
    for _ in range(4_000):
        observer.request_finished(record())
    assert time.monotonic() - started < 5  # 4,000 times what one costs, many times over
    started = time.monotonic()
    observer.close()
    assert time.monotonic() - started < 4
    assert caplog.records == []


# On and off.


def test_it_is_off_and_imports_nothing_until_it_is_turned_on() -> None:
    program = """
import sys
from fwk.plugins import build_config, discover, taking_part
from fwk.server import serve
plugins = discover()
config = build_config(plugins, {})
assert "otel" not in [item.name for item, _ in taking_part(plugins, "observers", config.plugin_options)]
heavy = [name for name in sys.modules if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "requests"))]
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    "given", [{"otlp_traces_endpoint": "http://c:1/x"}, {"enable_trace": "true"}, {"enable_trace": True}]
)
def test_either_option_turns_it_on(given: dict[str, Any]) -> None:
    plugins = discover()
    config = build_config(plugins, given)
    found = {item.name: options for item, options in taking_part(plugins, "observers", config.plugin_options)}
    assert found["otel"].endpoint == given.get("otlp_traces_endpoint", LOCAL)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("https://c/", "https://c/v1/traces"),
        ("http://c:1/mine", "http://c:1/mine"),
        ("localhost:4317", None),
        ("grpc://c:4317", None),
        ("http://", None),
        ("http://user:password@c", None),
    ],
)
def test_addresses(url: str, expected: str | None) -> None:
    plugins = discover()
    if expected is None:
        with pytest.raises(ConfigError, match=r"^--otlp-traces-endpoint: must"):
            build_config(plugins, {"otlp_traces_endpoint": url})
        return
    assert OtelOptions(otlp_traces_endpoint=url).endpoint == expected


# The whole way, from a client's headers to the collector.


@pytest.mark.sweep
def test_a_served_request_is_traced(spawn: servers.Start, collector: Collector) -> None:
    server = spawn("--otlp-traces-endpoint", collector.url)
    body = {"prompt": "Hi", "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": True}
    headers = PARENT | {"x-request-id": "mine"}
    assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers).status_code == 200
    assert httpx.post(f"{server.url}/v1/chat/completions", json=chat, headers=headers).status_code == 200
    inputs = {"inputs": "Hi", "parameters": {"max_new_tokens": 3}}
    assert httpx.post(f"{server.url}/generate", json=inputs, headers=headers).status_code == 200

    def ours_at_the_collector() -> list[Any]:
        """The rig's own requests are traced too."""
        return [span for span in collector.spans if span.trace_id.hex() == TRACE_ID]

    until(lambda: len(ours_at_the_collector()) == 3, 15, "our requests at the collector")
    ours = ours_at_the_collector()
    assert sorted(span.name for span in ours) == ["chat tiny", "text_completion tiny", "text_completion tiny"]
    for span in ours:
        found = attributes(span)
        assert span.parent_span_id.hex() == SPAN_ID
        assert found["fwk.request.label"] == "mine"
        assert found["gen_ai.response.finish_reasons"] == ["length"]
        assert found["gen_ai.usage.output_tokens"] == (2 if span.name == "chat tiny" else 3)
        lasted = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert 0 < found["gen_ai.response.time_to_first_chunk"] <= lasted < 60
