"""Plugins of packages that are not installed."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

from fwk import hookimpl
from fwk.plugins import FAMILIES, PluginSet, discover


class FakeEntryPoint:
    """An entry point of a package that is not installed."""

    value = "acme_plugin"

    def __init__(self, name: str, target: object, package: str = "acme", version: str = "1.0") -> None:
        self.name = name
        self._target = target
        self.dist = SimpleNamespace(name=package, version=version)

    def load(self) -> object:
        if isinstance(self._target, BaseException):
            raise self._target
        return self._target


def plugin(*specs: object, hook: str = "attention_backends") -> ModuleType:
    """A module that declares."""
    module = ModuleType("acme_plugin")
    declare(module, hook, specs)
    return module


def declare(module: ModuleType, hook: str, specs: Iterable[object]) -> None:
    """Let a module implement one hook."""
    setattr(module, hook, hookimpl(lambda: list(specs)))
    getattr(module, hook).__name__ = hook


def of(*specs: Any) -> PluginSet:
    """A package that declares these and nothing else."""
    module = ModuleType("acme")
    for family in {spec.family for spec in specs}:
        declare(module, FAMILIES[family].hook, [spec for spec in specs if spec.family == family])
    return discover(points=[FakeEntryPoint("acme.all", module)])  # type: ignore[list-item]
