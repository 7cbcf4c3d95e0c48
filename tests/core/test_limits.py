"""Every field of every request has a limit, and docs/limits.md says it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, Field

from fwk.plugins import discover
from fwk_kit.cli.limits import dialects, limits_of, page, processor_models
from fwk_server._common.body import NOT_READ

ROOT = Path(__file__).parents[2]
MODELS = {
    f"{name} {path}": model for name, dialect in dialects(discover()) for path, model in dialect.requests.items()
} | {f"processor {name}": model for name, model in processor_models(discover(), None)}


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs/limits.md").read_text() == page(discover()), "run: make docs"


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_without_a_limit(name: str) -> None:
    assert [limit.field for limit in limits_of(MODELS[name]) if not limit.most] == []


class Inner(BaseModel):
    text: str
    flag: bool = False


class Body(BaseModel):
    number: int
    share: float = Field(0.5, ge=0)
    names: list[str] = Field([], max_length=3)
    lists: list[list[int]] | None = None
    inner: Inner | None = None
    anything: Any = None
    table: dict[str, float] = {}


def test_what_has_none_is_found() -> None:
    """A lower bound is no limit, and a bounded list may hold unbounded texts."""
    missing = {limit.field for limit in limits_of(Body) if not limit.most}
    assert missing == {"number", "share", "names[x]", "lists", "lists[x]", "lists[x][x]", "inner.text", "anything",
                       "table", "table.*"}  # fmt: skip
    (names,) = [limit for limit in limits_of(Body) if limit.field == "names"]
    assert (names.kind, names.most) == ("list", "3 elements")


def test_every_route_with_a_body_has_its_model() -> None:
    """What a dialect posts to, it documents; what has no body says so."""
    from fastapi import FastAPI

    from fwk.interfaces.dialect import DialectContext

    frontend: Any = SimpleNamespace(text=None, card=SimpleNamespace(name="tiny"))
    for _, dialect in dialects(discover()):
        app = FastAPI(openapi_url=None)
        built = dialect(DialectContext(frontend))
        built.routes(app)
        built.admin_routes(app)
        posts = [route for route in app.router.routes if "POST" in (getattr(route, "methods", None) or ())]
        whole = {getattr(route, "path", "") for route in posts}
        assert (
            {getattr(route, "path", "") for route in posts if not _has_no_body(route)} <= set(dialect.requests) <= whole
        )


def _has_no_body(route: Any) -> bool:
    """Or a file in the place of JSON."""
    content = (route.openapi_extra or {}).get("requestBody", {}).get("content", {})
    return "multipart/form-data" in content or content.get("application/json", {}).get("schema") == NOT_READ


@pytest.mark.parametrize("name", MODELS)
def test_what_may_be_left_out_may_be_null(name: str) -> None:
    model = MODELS[name]
    schema = model.model_json_schema()["properties"]
    optional = [key for key, field in model.model_fields.items() if field.default is None]
    assert [key for key in optional if {"type": "null"} not in schema[key].get("anyOf", ())] == []
