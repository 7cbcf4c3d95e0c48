"""What reading a body may cost, whatever its shape: few errors, few fields, and nothing on the event loop."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel, ValidationError

from fwk.errors import InvalidRequest
from fwk.plugins import discover
from fwk.plugins.factory import load_object
from fwk_server._common import body
from fwk_server._common.fields import RequestFields

MAX_ERRORS = 32
"""Of one field with very many wrong items: several for each type that it may have."""

PARSERS = {"parse", "body.parse", "validate", "body.validate", "orjson.loads", "json.loads"}
"""What takes long with a large body."""


def _models(model: type[BaseModel] = RequestFields) -> Iterator[type[BaseModel]]:
    for found in model.__subclasses__():
        yield found
        yield from _models(found)


def _num_errors(model: type[BaseModel], raw: dict[str, Any]) -> int:
    try:
        model.model_validate(raw)
    except ValidationError as error:
        return error.error_count() - sum(item["type"] == "missing" for item in error.errors())
    return 0


def test_very_many_wrong_items_are_few_errors() -> None:
    for item in discover().family("dialects"):
        load_object(item)
    found = list(_models())
    assert len(found) > 20
    wrong: tuple[Any, ...] = ([object()] * 500, {str(i): object() for i in range(500)})
    for model in found:
        for name in model.model_fields:
            for value in wrong:
                count = _num_errors(model, {name: value})
                assert count < MAX_ERRORS, (model, name, count)


def test_more_fields_than_any_route_knows_are_refused() -> None:
    fields = {f"k{i}": 1 for i in range(body.MAX_FIELDS)}
    assert body.parse(msgspec.json.encode(fields)) == fields
    with pytest.raises(InvalidRequest, match="has 1025 fields, and may have 1024"):
        body.parse(msgspec.json.encode(fields | {"one": 1}))


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Of a function itself, not of those in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            if isinstance(child, ast.Call):
                yield child
            yield from _calls(child)


def test_no_body_is_read_on_the_event_loop() -> None:
    root = Path(body.__file__).parents[1]
    found = [
        f"{path.relative_to(root)}:{call.lineno}"
        for path in root.rglob("*.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.AsyncFunctionDef)
        for call in _calls(function)
        if ast.unparse(call.func) in PARSERS
    ]
    assert not found, "use read_as or off_loop of fwk_server._common.replies"
