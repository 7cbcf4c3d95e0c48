"""The stages of a plugin's life, and its work in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from fwk.errors import PluginLoadError
from fwk.interfaces.lifecycle import PluginLifecycle, Stage
from fwk.server import lifecycle as module
from fwk.server.lifecycle import LifecycleManager


class Diary:
    """What happened, in order."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def note(self, text: str) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            self.entries.append(text)

        return call

    async def work(self) -> None:
        self.entries.append("working")
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.entries.append("work ended")

    def life(self, lifecycles: LifecycleManager, name: str = "") -> PluginLifecycle:
        lifecycle = lifecycles.make(f"'observers.{name or 'mine'}' from mine 1.0")
        for stage in Stage:
            lifecycle.on(stage, self.note(f"{name}{stage.value}"))
        return lifecycle


async def test_the_stages_in_order() -> None:
    lifecycles, diary = LifecycleManager(), Diary()
    lifecycle = diary.life(lifecycles)
    lifecycle.background(diary.work)
    await lifecycles.begin(lifecycle)
    await asyncio.sleep(0)
    assert diary.entries == ["setup", "working"]
    await lifecycles.ready()
    await lifecycles.drain()
    assert diary.entries[2:] == ["ready", "drain"]
    await lifecycles.end()
    assert diary.entries[4:] == ["work ended", "close"], "cancelled, and awaited, before close"
    await lifecycles.end()
    assert len(diary.entries) == 6


async def test_the_last_to_begin_ends_first() -> None:
    lifecycles, diary = LifecycleManager(), Diary()
    for name in ("a-", "b-"):
        await lifecycles.begin(diary.life(lifecycles, name))
    await lifecycles.end()
    assert diary.entries == ["a-setup", "b-setup", "b-close", "a-close"]


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.READY])
async def test_who_fails_at_the_start_is_named(stage: Stage) -> None:
    async def fail() -> None:
        raise ConnectionError("no database")

    lifecycles, diary = LifecycleManager(), Diary()
    lifecycle = diary.life(lifecycles)
    lifecycle.on(stage, fail)
    sentence = f"plugin 'observers.mine' from mine 1.0 failed in {stage.value}: ConnectionError: no database"
    with pytest.raises(PluginLoadError, match=sentence):
        await _start(lifecycles, lifecycle)
    await lifecycles.end()
    assert diary.entries.count("close") == 1


async def _start(lifecycles: LifecycleManager, lifecycle: PluginLifecycle) -> None:
    await lifecycles.begin(lifecycle)
    await lifecycles.ready(lifecycle)


@pytest.mark.parametrize("stage", [Stage.DRAIN, Stage.CLOSE])
async def test_who_fails_or_hangs_at_the_end_holds_up_nobody(
    stage: Stage, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    async def hang() -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(module, "PATIENCE", 0.05)
    lifecycles, diary = LifecycleManager(), Diary()
    for call in (fail, hang):
        lifecycle = lifecycles.make(f"'dialects.{call.__name__}' from mine 1.0")
        lifecycle.on(stage, call)
        await lifecycles.begin(lifecycle)
    await lifecycles.begin(diary.life(lifecycles))
    await lifecycles.drain()
    await lifecycles.end()
    assert diary.entries == ["setup", "drain", "close"]
    for name in ("fail", "hang"):
        assert f"plugin 'dialects.{name}' from mine 1.0 failed in {stage.value}" in caplog.text


async def test_work_that_fails_is_logged_in_the_plugins_name(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise ZeroDivisionError

    lifecycles, diary = LifecycleManager(), Diary()
    lifecycle = diary.life(lifecycles)
    lifecycle.background(fail)
    lifecycle.background(diary.work)
    await lifecycles.begin(lifecycle)
    await asyncio.sleep(0.01)
    assert "plugin 'observers.mine' from mine 1.0: its work in the background failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    await lifecycles.end()
    assert diary.entries[-2:] == ["work ended", "close"]


async def test_work_that_cannot_be_cancelled_is_left_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    ended = asyncio.Event()

    async def stubborn() -> None:
        while not ended.is_set():
            try:
                await ended.wait()
            except asyncio.CancelledError:
                continue

    lifecycles, diary = LifecycleManager(), Diary()
    lifecycle = diary.life(lifecycles)
    lifecycle.background(stubborn)
    await lifecycles.begin(lifecycle)
    await asyncio.sleep(0)
    await lifecycles.end()
    assert "does not end within 0.05 s" in caplog.text
    assert diary.entries == ["setup", "close"]
    ended.set()
    await asyncio.sleep(0)
