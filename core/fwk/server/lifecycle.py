"""The lives of the API process's plugins: what they want to have called, and their work in the background."""

from __future__ import annotations

import asyncio
import logging

from fwk.errors import PluginLoadError
from fwk.interfaces.lifecycle import Call, PluginLifecycle, Stage

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds a plugin's calls of drain or of close may take, and its cancelled work may take to end."""


class LifecycleManager:
    """All plugins that live in this process."""

    def __init__(self) -> None:
        self._tasks: dict[PluginLifecycle, list[asyncio.Task[None]]] = {}

    def make(self, owner: str) -> PluginLifecycle:
        """A new plugin's."""
        return PluginLifecycle(owner)

    async def begin(self, lifecycle: PluginLifecycle) -> None:
        """Setup, then start its work. Raises ``PluginLoadError`` in the plugin's name."""
        self._tasks[lifecycle] = []
        try:
            await _enter(lifecycle, Stage.SETUP)
        except PluginLoadError:
            await self.end(lifecycle)
            raise
        for work in lifecycle.work:
            self._tasks[lifecycle].append(asyncio.create_task(_watched(lifecycle, work), name=f"{lifecycle.owner}"))

    async def ready(self, *lifecycles: PluginLifecycle) -> None:
        """The engines serve: for these, or for all. Raises ``PluginLoadError`` in the plugin's name."""
        for lifecycle in lifecycles or list(self._tasks):
            await _enter(lifecycle, Stage.READY)

    async def drain(self, *lifecycles: PluginLifecycle) -> None:
        """No new requests come."""
        await asyncio.gather(*(_leave(lifecycle, Stage.DRAIN) for lifecycle in lifecycles or list(self._tasks)))

    async def end(self, *lifecycles: PluginLifecycle) -> None:
        """Cancel their work, wait for it, close them: the last to have begun first."""
        for lifecycle in reversed(lifecycles or list(self._tasks)):
            tasks = self._tasks.pop(lifecycle, [])
            for task in tasks:
                task.cancel()
            if tasks and (await asyncio.wait(tasks, timeout=PATIENCE))[1]:
                log.warning("plugin %s: its work in the background does not end within %g s", lifecycle.owner, PATIENCE)
            await _leave(lifecycle, Stage.CLOSE)


async def _enter(lifecycle: PluginLifecycle, stage: Stage) -> None:
    for call in lifecycle.calls[stage]:
        try:
            await call()
        except Exception as error:
            raise PluginLoadError(
                f"plugin {lifecycle.owner} failed in {stage.value}: {type(error).__name__}: {error}"
            ) from error


async def _leave(lifecycle: PluginLifecycle, stage: Stage) -> None:
    for call in lifecycle.calls[stage]:
        try:
            async with asyncio.timeout(PATIENCE):
                await call()
        except Exception:
            log.exception("plugin %s failed in %s", lifecycle.owner, stage.value)


async def _watched(lifecycle: PluginLifecycle, work: Call) -> None:
    try:
        await work()
    except Exception:
        log.exception("plugin %s: its work in the background failed and is not started again", lifecycle.owner)
