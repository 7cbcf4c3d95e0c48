"""Types of request fields that several dialects have. Their schemas hold the limits that docs/limits.md tells of.

Ranges of sampling fields are core's to check: its table is where these schemas come from.
"""

from __future__ import annotations

from typing import Any

from pydantic import WithJsonSchema

from fwk.types.sampling import MAX_STOP_LENGTH, MAX_STOP_STRINGS, RANGES

CONTEXT = "what fits into the context"


def ranged(name: str, limit: str = "") -> WithJsonSchema:
    """The schema of one of core's sampling fields; ``limit`` is what bounds it besides, in words."""
    low, high = RANGES[name]
    schema: dict[str, Any] = {"type": "integer" if isinstance(low, int) else "number", "minimum": low, "maximum": high}
    return WithJsonSchema(schema | ({"x-limit": limit} if limit else {}))


def bounded(kind: str, limit: str, **more: Any) -> WithJsonSchema:
    """A schema whose limit has no number, or none that is known before a model is served."""
    return WithJsonSchema({"type": kind, "x-limit": limit, **more})


STOP_STRINGS: dict[str, Any] = {
    "type": "array",
    "items": {"type": "string", "maxLength": MAX_STOP_LENGTH},
    "maxItems": MAX_STOP_STRINGS,
}
