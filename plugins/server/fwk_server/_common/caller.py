"""What a request's headers tell of where it comes from, and of how it wants to be served."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import trace_context
from fwk.types import Service, tenant_of

MAX_LABEL = 256

_INTEGER = re.compile(r"-?[0-9]{1,10}", re.ASCII)
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?", re.ASCII)

NO_TIER = ("auto", "default")
"""OpenAI's words for no service tier in particular."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The client's own name of the request, for logs; the trace it is part of; and hints for the scheduler."""

    label: str = ""
    trace: Mapping[str, str] = field(default_factory=dict[str, str])
    priority: int = 0
    service: Service = Service()

    def record(self) -> dict[str, Any]:
        """What is kept of it with work that may outlive the server; ``of_record`` reads it."""
        service = self.service
        known = {"session": service.session, "tier": service.tier, "deadline": service.deadline}
        return {"label": self.label, "priority": self.priority, "service": known}

    @classmethod
    def of_record(cls, tenant: str, told: Mapping[str, Any]) -> Caller:
        """The caller of a tenant's ``record``."""
        return cls(told["label"], {}, told["priority"], Service(tenant, **told["service"]))

    def served(self, session: str | None, tier: str | None, deadline: float | None) -> Service:
        """The headers' hints, or those of a body's fields where it has them."""
        mine = self.service
        return Service(
            mine.tenant,
            mine.session if session is None else session,
            mine.tier if tier is None else _tier(tier),
            mine.deadline if deadline is None else deadline,
        )


def caller_of(request: Request) -> Caller:
    """Read the headers. A bad id only ever goes to logs, so it is dropped; a bad hint raises ``InvalidRequest``."""
    headers = request.headers
    label = headers.get("x-request-id", "")
    is_label = len(label) <= MAX_LABEL and label.isprintable()
    scheme, _, key = (headers.get("authorization") or f"Bearer {headers.get('x-api-key', '')}").partition(" ")
    service = Service(
        tenant_of(key.strip()) if key and scheme.lower() == "bearer" else "",
        headers.get("x-session-id", ""),
        _tier(headers.get("x-service-tier", "")),
        _number(headers, "x-deadline", _SECONDS, "seconds, such as 2.5"),
    )
    priority = int(_number(headers, "x-priority", _INTEGER, "an integer") or 0)
    return Caller(label if is_label else "", trace_context(headers), priority, service)


def _tier(name: str) -> str:
    return "" if name in NO_TIER else name


def _number(headers: Mapping[str, str], name: str, form: re.Pattern[str], words: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    if not form.fullmatch(text):
        raise InvalidRequest(f"the header {name} must be {words}", name)
    return float(text)
