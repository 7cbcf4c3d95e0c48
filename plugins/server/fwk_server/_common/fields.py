"""Types of request fields that several dialects have. Their schemas hold the limits that docs/limits.md tells of.

Ranges of sampling fields are core's to check: its table is where these schemas come from.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, WithJsonSchema
from pydantic_core import CoreSchema, PydanticKnownError, core_schema

from fwk.types.sampling import MAX_STOP_LENGTH, MAX_STOP_STRINGS, RANGES

CONTEXT = "what fits into the context"


def _failing_fast(schema: Any) -> Any:
    """A schema whose lists are given up at their first wrong item, and whose objects are counted before anything in
    them is looked at: telling of a million errors takes half a minute.
    """
    if isinstance(schema, list | tuple):
        return type(schema)(map(_failing_fast, schema))
    if not isinstance(schema, dict):
        return schema
    kept: Any = {key: part if _is_data(key, part) else _failing_fast(part) for key, part in schema.items()}
    if schema.get("type") == "dict" and schema.get("max_length") is not None:
        return core_schema.no_info_before_validator_function(partial(_counted, schema["max_length"]), kept)
    return kept | {"fail_fast": True} if schema.get("type") in ("list", "tuple", "set") else kept


def _is_data(key: str, part: Any) -> bool:
    """Whether a part of a schema is none itself; a field may be called so."""
    return key in ("default", "metadata") and not (isinstance(part, dict) and part.get("type") == "model-field")


def _counted(most: int, value: Any) -> Any:
    if isinstance(value, dict) and len(value) > most:
        told = {"field_type": "Dictionary", "max_length": most, "actual_length": len(value)}
        raise PydanticKnownError("too_long", told)
    return value


class RequestFields(BaseModel):
    """The fields of a body, or of an object in one. None is "not given", and null says the same."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _failing_fast(handler(source))

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
