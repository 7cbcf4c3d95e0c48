"""OpenTelemetry traces: one span per request, sent to an OTLP/HTTP collector.

Off until ``--otlp-traces-endpoint`` (or ``--enable-trace``, for a collector on this machine) is given. What a collector
asks of its clients alongside the address, such as a key, is read from OpenTelemetry's own environment variables
(``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_EXPORTER_OTLP_CERTIFICATE``); ``OTEL_SERVICE_NAME`` and
``OTEL_RESOURCE_ATTRIBUTES`` describe the server.
"""

from urllib.parse import urlsplit

from pydantic import field_validator

from fwk import Needs, ObserverSpec, Options, hookimpl, option

LOCAL = "http://localhost:4318/v1/traces"
PATH = "/v1/traces"


class OtelOptions(Options):
    """Options of ``observers.otel``."""

    otlp_traces_endpoint: str | None = option(
        None, f"Send a trace span per request to this OTLP/HTTP collector: its URL ({PATH} where it has no path)."
    )
    enable_trace: bool = option(False, f"Send traces to {LOCAL}; not needed alongside --otlp-traces-endpoint.")

    @field_validator("otlp_traces_endpoint")
    @classmethod
    def _check(cls, url: str | None) -> str | None:
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be the http:// or https:// URL of an OTLP/HTTP collector (usually port 4318)")
        if parts.username is not None:
            raise ValueError("must not hold a password: set OTEL_EXPORTER_OTLP_HEADERS")
        return url if parts.path.strip("/") else parts._replace(path=PATH).geturl()

    @property
    def endpoint(self) -> str:
        """Where to send traces."""
        return self.otlp_traces_endpoint or LOCAL


@hookimpl
def observers() -> list[ObserverSpec]:
    return [
        ObserverSpec(
            name="otel",
            load="fwk_observability.otel.observer:OtelObserver",
            needs=Needs(packages=("opentelemetry-sdk>=1.30", "opentelemetry-exporter-otlp-proto-http>=1.30")),
            options=OtelOptions,
            enabled_by=("otlp_traces_endpoint", "enable_trace"),
            summary="OpenTelemetry traces to an OTLP/HTTP collector",
        )
    ]
