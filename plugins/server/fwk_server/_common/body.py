"""From the bytes of a request to a checked model of its fields, or ``InvalidRequest``."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from fwk.errors import InvalidRequest, NotServed

MAX_DEPTH = 128
"""Nesting of a body: what walks it later (templates, JSON dumps) recurses."""

MAX_COMMAS = 2**20
"""In a body: as many values make no prompt that fits, but take half a second to read."""

MAX_MEMBERS = 2**17
"""Of all its objects: several for each message that a conversation may have. A reader keeps the interpreter to itself
until it has read all of an object's, and is called twice.
"""

MAX_FIELDS = 1_024
"""Of a body itself: several times as many as any route knows."""

MAX_LISTS = 2**17
"""And objects, together: a prompt of token ids is one, a message two or three."""

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_MEMBER = re.compile(rb'(?<!\\)(?:\\\\)*":')
"""The end of a member's name, where there is no white space; quotes in texts are escaped."""

NOTES = (
    f"A body is JSON in UTF-8, nested at most {MAX_DEPTH} levels deep, holds no key twice, and at most {MAX_MEMBERS} "
    f"members of objects, {MAX_FIELDS} of its own, {MAX_LISTS} lists and objects and {MAX_COMMAS} values."
)

MAX_SHOWN = 80

NOT_READ = {"type": "object", "description": "Not read."}
"""The schema of the body of a POST whose path says all."""

_OF_PAGES = ("origin", "sec-fetch-site")
"""Headers of requests that a browser sends for a page, which no script can leave out."""

Model = TypeVar("Model", bound=BaseModel)
Result = TypeVar("Result")


async def read(request: Request, *, is_any_kind: bool = False) -> bytes:
    """A request's body. Browsers send other kinds than JSON, and none, to any server without asking it: refused.

    ``is_any_kind``: they are read where no web page sent them. Every browser says so of a POST (Fetch standard, 2.2.5).
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or kind.endswith("+json")
    if not is_json and (not is_any_kind or any(name in request.headers for name in _OF_PAGES)):
        raise NotServed("the content-type must be application/json", 415)
    return await request.body()


def check_counts(data: bytes) -> None:
    """Raise ``InvalidRequest`` for JSON of too many values, members, lists or objects, before it is read."""
    if len(data) > MAX_COMMAS and data.count(b",") > MAX_COMMAS:
        raise InvalidRequest(f"the request body holds more than {MAX_COMMAS} values")
    if len(data) > MAX_MEMBERS and data.count(b":") > MAX_MEMBERS and _has_too_many_members(data):
        raise InvalidRequest(f"the request body holds more than {MAX_MEMBERS} members of objects")
    # Texts hold brackets, too: they are left out where there are many.
    if len(data) > MAX_LISTS and _num_lists(data) > MAX_LISTS and _num_lists(_STRING.sub(b"", data)) > MAX_LISTS:
        raise InvalidRequest(f"the request body holds more than {MAX_LISTS} lists and objects")


def _num_lists(data: bytes) -> int:
    return data.count(b"[") + data.count(b"{")


def parse(data: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, no NaN, no lone surrogates, no key twice, one object."""
    check_counts(data)
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise _not_json(data, error) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"the request body must be a JSON object, not {_kind(value)}")
    if len(value) > MAX_FIELDS:
        raise InvalidRequest(f"the request body has {len(value)} fields, and may have {MAX_FIELDS}")
    # Only a body with that many brackets can be that deep; few need the walk.
    if data.count(b"{") + data.count(b"[") > MAX_DEPTH and is_too_deep(value):
        raise InvalidRequest(f"the request body is nested more than {MAX_DEPTH} levels deep")
    json.loads(data, object_pairs_hook=_refuse_duplicates)
    return value


def _has_too_many_members(data: bytes) -> bool:
    found = _MEMBER.finditer(data.translate(None, b" \t\r\n"))
    return next(islice(found, MAX_MEMBERS, None), None) is not None


def apply(prepare: Callable[..., Result], data: bytes, *args: Any) -> Result:
    """What ``prepare`` makes of a body."""
    return prepare(parse(data), *args)


def _not_json(data: bytes, error: orjson.JSONDecodeError) -> InvalidRequest:
    """What is wrong with a body; for NaN and infinities, which some clients do write, the field that holds one."""
    try:
        fields = json.loads(data)
        for name, value in fields.items():
            if isinstance(value, float) and not math.isfinite(value):
                return InvalidRequest(f"{name} must be a finite number, not {value}", path_of((name,)))
    except (ValueError, AttributeError, RecursionError):
        pass  # not even with a lenient reader
    return InvalidRequest(f"the request body is not valid JSON: {error}")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    """Two readers of one body must not disagree on what it says, and which of two keys wins is nobody's rule."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise InvalidRequest(f"the key {shown(key)} is given twice", key if len(key) <= MAX_SHOWN else None)
        seen.add(key)


def is_too_deep(value: Any) -> bool:
    """Whether JSON is nested more than ``MAX_DEPTH`` levels deep."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def validate(model: type[Model], raw: Mapping[str, Any]) -> Model:
    """Read a model's fields out of ``raw``. The first wrong one is named by its path."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        path = path_of(first["loc"])
        message = first["msg"].removeprefix("Value error, ").replace("Input should", "must", 1)
        message = message.replace("a valid dictionary", "an object").replace("a valid list", "an array")
        raise InvalidRequest(f"{path}: {message}" if path else message, path or None) from None


def path_of(loc: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` as a client would write it: ``messages[0].role``."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[: 4 * MAX_SHOWN]


def shown(value: Any) -> str:
    """A client's value for an error message: quoted, and short."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def want(value: Any, kind: type | tuple[type, ...], words: str, param: str) -> Any:
    """``value``, if it is of ``kind``; booleans are no integers."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise InvalidRequest(f"{param} must be {words}", param)
    return value


def processor_extra(models: Sequence[type[BaseModel]], raw: Mapping[str, Any]) -> dict[str, Any]:
    """The request fields that third-party logits processors read, validated by the models they declared."""
    extra: dict[str, Any] = {}
    for model in models:
        names = {field.alias or name for name, field in model.model_fields.items()}
        given = {name: raw[name] for name in names if raw.get(name) is not None}
        if given:
            extra.update(validate(model, given).model_dump(mode="json"))
    return extra
