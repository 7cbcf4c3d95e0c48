"""Observers' parts in workers: told of steps, and harmless."""

from __future__ import annotations

import importlib
import logging
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from fwk.errors import FwkError, PluginLoadError
from fwk.interfaces.observer import ObserverSpec, WorkerObserver, WorkerObserverContext
from fwk.plugins import PluginSet, Registered
from fwk.plugins.discovery import OWN
from fwk.types import Batch
from fwk.worker.runner.observing import WorkerObservers


class Part(WorkerObserver):
    wants_steps = True

    def __init__(self, context: WorkerObserverContext) -> None:
        super().__init__(context)
        self.heard: list[str] = []

    def operations(self) -> dict[str, Any]:
        return {"heard": lambda: self.heard, "fails": lambda: 1 // 0, "refuses": self.refuse}

    def refuse(self) -> None:
        raise FwkError("not now")

    def step_begins(self, batch: Batch) -> None:
        self.heard.append(f"begins {batch.step}")
        if batch.step == 2:
            raise ValueError("what a plugin may raise")

    def step_launched(self) -> None:
        self.heard.append("launched")


class Still(Part):
    wants_steps = False


class Broken(Part):
    def __init__(self, context: WorkerObserverContext) -> None:
        raise ZeroDivisionError("no")


class Runner:
    def __init__(self) -> None:
        self.launched: list[int] = []

    def launch(self, batch: Batch) -> int:
        self.launched.append(batch.step)
        return batch.step

    def collect(self, pending: Any) -> Any:
        return pending

    def settle(self) -> None: ...


def observers(monkeypatch: pytest.MonkeyPatch, **parts: type[WorkerObserver]) -> WorkerObservers:
    module = ModuleType("parts_of_a_test")
    for name, part in parts.items():
        setattr(module, name, part)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    importlib.invalidate_caches()
    items = {
        name: Registered(
            ObserverSpec(name=name, load="x:y", worker=f"parts_of_a_test:{name}"), f"observers.{name}", OWN, "1"
        )
        for name in parts
    }
    given: Any = type("Config", (), {"plugin_options": {}})()
    plugins: Any = type("Plugins", (), {"family": lambda self, name: list(items.values())})()
    assert hasattr(PluginSet, "family")
    return WorkerObservers(given, plugins, lambda **fields: WorkerObserverContext(torch.device("cpu"), **fields))


def batch(step: int) -> Batch:
    return Batch(step, [], [], [])


def test_one_that_raises_is_told_no_more_and_steps_go_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found, runner = observers(monkeypatch, one=Part, still=Still), Runner()
    around = found.around(runner)
    with caplog.at_level(logging.ERROR):
        assert [around.collect(around.launch(batch(step))) for step in range(5)] == [0, 1, 2, 3, 4]
    assert runner.launched == [0, 1, 2, 3, 4]
    heard = found.operations()["observers.one.heard"]()
    assert heard == ["begins 0", "launched", "begins 1", "launched", "begins 2"]
    assert caplog.text.count("observers.one raised in a step") == 1
    assert found.operations()["observers.still.heard"]() == []


def test_without_one_that_wants_steps_the_runner_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    assert observers(monkeypatch, still=Still).around(runner) is runner


def test_an_operation_only_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = observers(monkeypatch, one=Part).operations()
    with pytest.raises(FwkError, match=r"observer 'one' .* raised ZeroDivisionError in fails"):
        operations["observers.one.fails"]()
    with pytest.raises(FwkError, match=r"^not now$"):
        operations["observers.one.refuses"]()


def test_one_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginLoadError, match=r"observers\.one.*ZeroDivisionError"):
        observers(monkeypatch, one=Broken)
