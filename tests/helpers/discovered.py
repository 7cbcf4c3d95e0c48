"""Engines and servers of the tests look for plugins, and ask what their routes may answer, once: a third of a start."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from types import ModuleType
from typing import Any, get_args

from fastapi._compat import v2
from fastapi.utils import create_model_field
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from fwk.plugins import PluginSet, discovery
from fwk_server._common.documented import json_body

_found: dict[Hashable, tuple[PluginSet, list[str]]] = {}
_adapters: dict[Hashable, TypeAdapter[Any]] = {}


def discover_once(*modules: ModuleType) -> None:
    """Have these begin with a copy of what was found before, as long as nothing else can be found."""
    for module in modules:
        module.discover = _discover  # type: ignore[attr-defined]


def share_adapters() -> None:
    """Have FastAPI make one adapter for each model that routes answer with: a server's name few, a thousand times."""
    v2.TypeAdapter = _adapter  # type: ignore[assignment]


def make_ahead() -> None:
    """Both, with the plugins and models of answers that there are."""
    _discover()
    models: list[type[BaseModel]] = [BaseModel]
    for each in models:
        models.extend(each.__subclasses__())
        if each.__module__.startswith("fwk_server."):
            create_model_field("answer", each, mode="serialization")
            json_body(each)


def _discover(
    allow_override: Iterable[str] = (), *, warn: Callable[[str], None] | None = None, **given: Any
) -> PluginSet:
    if given:
        return discovery.discover(allow_override, warn=warn, **given)
    key = tuple(allow_override), tuple(sys.path), discovery.entry_points
    if key not in _found:
        found = discovery.discover(allow_override, warn=warn)
        _found[key] = found, [name for name, _ in found.manager.list_name_plugin()]
    elif warn is not None:
        for broken in _found[key][0].broken:
            warn(broken.sentence())
    found, names = _found[key]
    for name, _ in found.manager.list_name_plugin():
        if name not in names:  # a test added it to its own copy, and the next may add it again
            found.manager.unregister(name=name)
    families = {family: dict(items) for family, items in found.by_family.items()}
    return replace(
        found,
        by_family=families,
        broken=[*found.broken],
        overridden=[*found.overridden],
        load_seconds={**found.load_seconds},
        undeclared={**found.undeclared},
    )


def _adapter(annotated: Any, *, config: Any = None) -> TypeAdapter[Any]:
    model, *told = get_args(annotated)
    with contextlib.suppress(TypeError):  # not all that a field may be told can be looked up
        key = model, *(tuple(each._attributes_set.items()) if isinstance(each, FieldInfo) else each for each in told)
        if config is None:
            if key not in _adapters:
                _adapters[key] = TypeAdapter(annotated)
            return _adapters[key]
    return TypeAdapter(annotated, config=config)
