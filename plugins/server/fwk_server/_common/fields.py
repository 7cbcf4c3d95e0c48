"""Types of request fields that several dialects have. Their schemas hold the limits that docs/limits.md tells of.

Ranges of sampling fields are core's to check: its table is where these schemas come from.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema

from fwk.types.sampling import MAX_STOP_LENGTH, MAX_STOP_STRINGS, RANGES

CONTEXT = "what fits into the context"


class RequestFields(BaseModel):
    """The fields of a body, or of an object in one. None is "not given", and null says the same."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        for name, field in handler.resolve_ref_schema(schema).get("properties", {}).items():
            if cls.model_fields[name].default is None and not _has_null(field):
                more = {key: field.pop(key) for key in ("default", "description", "title") if key in field}
                choices = field.pop("anyOf", None) or [dict(field)]
                field.clear()
                field |= {"anyOf": [*choices, {"type": "null"}], **more}
        return schema


def _has_null(schema: dict[str, Any]) -> bool:
    return not schema.keys() & {"type", "anyOf", "$ref"} or {"type": "null"} in schema.get("anyOf", ())


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
