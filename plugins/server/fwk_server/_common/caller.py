"""What a request's headers tell of where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.requests import Request

from fwk.interfaces.dialect import trace_context

MAX_LABEL = 256


@dataclass(frozen=True, slots=True)
class Caller:
    """The client's own name of the request, for logs, and the trace the request is part of."""

    label: str = ""
    trace: Mapping[str, str] = field(default_factory=dict[str, str])


def caller_of(request: Request) -> Caller:
    """Read the headers. A bad id only ever goes to logs, so it is dropped, not refused."""
    label = request.headers.get("x-request-id", "")
    is_fine = len(label) <= MAX_LABEL and label.isprintable()
    return Caller(label if is_fine else "", trace_context(request.headers))
