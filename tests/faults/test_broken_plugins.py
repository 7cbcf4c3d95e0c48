"""Part of check 24: packages that break their promises, alongside a server that uses none of them but one observer.

What those do that are chosen is in ``tests/core/test_broken_plugins.py``.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.packages import write_metadata
from tests.helpers.rig import FAKE
from tests.helpers.servers import Start

DECLARES = """from fwk import {spec}, Needs, ObserverSpec, hookimpl
@hookimpl
def {hook}():
    return [{spec}(name="{name}", load="{module}.work:Work", {more})]
"""
MUTATES = """import contextlib
from fwk.interfaces.observer import Observer
class Work(Observer):
    def request_arrived(self, record):
        record.request_id, record.num_prompt_tokens, record.n = "stolen", -1, 99
        if record.sampling: record.sampling.stop.append("e")
    def request_finished(self, record):
        record.finish_reasons, record.finished = 7, None
    def step_finished(self, stats):
        with contextlib.suppress(AttributeError):
            stats.num_running = 10 ** 6
"""


def policy(module: str, name: str, more: str = "") -> str:
    return DECLARES.format(spec="SchedulePolicySpec", hook="schedule_policies", name=name, module=module, more=more)


# package: its declarations, its work
PACKAGES: dict[str, tuple[str, str]] = {
    "does_not_import": ("raise ImportError('no rocket')", ""),
    "lacks_library": ("import a_library_that_nobody_has\n" + policy("lacks_library", "lacks"), ""),
    "needs_library": (policy("needs_library", "needs", 'needs=Needs(packages=("a-library-that-nobody-has>=1",))'), ""),
    "breaks_later": (policy("breaks_later", "breaks"), "raise RuntimeError('only when it is used')"),
    "of_the_future": (policy("of_the_future", "future", "api=99"), ""),
    "mutates": (
        DECLARES.format(spec="ObserverSpec", hook="observers", name="mutates", module="mutates", more=""),
        MUTATES,
    ),
}
NAMES = {"lacks_library": "lacks", "of_the_future": "future"}
"""A package calls its entry point as what it declares."""


def install(folder: Path, python_path: str, packages: dict[str, tuple[str, str]]) -> str:
    """Distributions with an entry point each; returns the PYTHONPATH they are on."""
    for name, (declarations, work) in packages.items():
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(declarations)
        (folder / name / "work.py").write_text(work)
        write_metadata(folder, name.replace("_", "-"), {f"schedulers.{NAMES.get(name, name)}": name})
    return os.pathsep.join([str(folder), python_path])


@pytest.mark.sweep
def test_nobody_who_is_not_asked_harms_the_others(spawn: Start, tmp_path: Path, python_path: str) -> None:
    enabled = ("--enable-plugin", "mutates")
    server = spawn(*FAKE, *enabled, environment={"PYTHONPATH": install(tmp_path, python_path, PACKAGES)})
    warnings = [line for line in server.log.splitlines() if line.startswith("fwk: warning: plugin ")]
    named = {name for name in PACKAGES for line in warnings if f" from {name.replace('_', '-')} 1.0 " in line}
    assert named == {"does_not_import", "lacks_library", "of_the_future"}
    for _ in range(2):
        reply = server.post({"prompt": "Hi there", "max_tokens": 40, "temperature": 0, "return_token_ids": True})
        (choice,) = reply.json()["choices"]
        assert "e" in choice["text"], "the text could not end at a stolen stop string"
        assert len(choice["token_ids"]) == 40
    assert server.metric("fwk:num_requests_running") == 0
    assert server.metric("fwk:request_prompt_tokens_sum") > 0
    assert "observers.mutates raised" not in server.log
    info = server.get("/server_info").json()
    assert len(info["broken_plugins"]) == 3
    server.check_invariants()
    assert server.stop() == 0
