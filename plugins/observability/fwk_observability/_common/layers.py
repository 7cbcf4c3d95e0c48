"""The layers of a model, by name, and how to see what one returns."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

Take = Callable[[str, Any], None]

_SKIPPED = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType, torch.Tensor)


def layers_of(model: object) -> dict[str, Any]:
    """The objects of a model that compute when they are called, by the attributes that lead there, as in transformers.

    Attributes whose names begin with an underscore are not looked into.
    """
    found: dict[str, Any] = {}
    seen = {id(model)}

    def walk(parent: object, path: str) -> None:
        for name, child in _children(parent):
            if id(child) in seen or isinstance(child, _SKIPPED):
                continue
            seen.add(id(child))
            here = f"{path}.{name}" if path else name
            if isinstance(child, nn.Module):
                found.update({f"{here}.{sub}" if sub else here: module for sub, module in child.named_modules()})
                continue
            if callable(child) and hasattr(child, "__dict__"):
                found[here] = child
            walk(child, here)

    walk(model, "")
    return found


def _children(parent: object) -> Iterator[tuple[str, Any]]:
    if isinstance(parent, (list, tuple)):
        for index, child in enumerate(cast("list[Any]", parent)):
            yield str(index), child
    elif isinstance(parent, dict):
        for key, child in cast("Mapping[Any, Any]", parent).items():
            yield str(key), child
    elif not type(parent).__module__.startswith(("torch.", "numpy.", "threading", "concurrent")):
        for name, child in getattr(parent, "__dict__", {}).items():
            if not name.startswith("_"):
                yield name, child


def follow(name: str, layer: Any, take: Take) -> None:
    """Have ``take(name, output)`` called with all that a layer returns from now on."""
    if isinstance(layer, nn.Module):
        layer.register_forward_hook(lambda module, inputs, output: take(name, output))
        return
    kind: Any = type(layer)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = kind.__call__(self, *args, **kwargs)
        take(name, output)
        return output

    # Calls look __call__ up in the class, so this one object gets a class of its own; it remains what it was otherwise.
    members = {"__call__": call, "__slots__": (), "__module__": kind.__module__, "__doc__": kind.__doc__}
    layer.__class__ = type(kind.__name__, (kind,), members)


def follow_method(model: Any, method: str, take: Callable[[Any, Any], None]) -> None:
    """The same for a method of the model with one argument: ``take(argument, output)``."""
    original = getattr(model, method, None)
    if original is None:
        return

    def call(argument: Any) -> Any:
        output = original(argument)
        take(argument, output)
        return output

    setattr(model, method, call)
