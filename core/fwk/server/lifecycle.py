"""The lives of the API process's plugins: what they want to have called, and their work in the background."""

from __future__ import annotations

import asyncio
import logging

from fwk.errors import PluginLoadError
from fwk.interfaces.lifecycle import Call, Life, Stage

log = logging.getLogger(__name__)

PATIENCE = 5.0
"""Seconds a plugin's calls of drain or of close may take, and its cancelled work may take to end."""


class Lives:
    """All plugins that live in this process."""

    def __init__(self) -> None:
        self._tasks: dict[Life, list[asyncio.Task[None]]] = {}

    def make(self, owner: str) -> Life:
        """A new plugin's."""
        return Life(owner)

    async def begin(self, life: Life) -> None:
        """Setup, then start its work. Raises ``PluginLoadError`` in the plugin's name."""
        self._tasks[life] = []
        try:
            await _enter(life, Stage.SETUP)
        except PluginLoadError:
            await self.end(life)
            raise
        for work in life.work:
            self._tasks[life].append(asyncio.create_task(_watched(life, work), name=f"{life.owner}"))

    async def ready(self, *lives: Life) -> None:
        """The engines serve: for these, or for all. Raises ``PluginLoadError`` in the plugin's name."""
        for life in lives or list(self._tasks):
            await _enter(life, Stage.READY)

    async def drain(self, *lives: Life) -> None:
        """No new requests come."""
        await asyncio.gather(*(_leave(life, Stage.DRAIN) for life in lives or list(self._tasks)))

    async def end(self, *lives: Life) -> None:
        """Cancel their work, wait for it, close them: the last to have begun first."""
        for life in reversed(lives or list(self._tasks)):
            tasks = self._tasks.pop(life, [])
            for task in tasks:
                task.cancel()
            if tasks and (await asyncio.wait(tasks, timeout=PATIENCE))[1]:
                log.warning("plugin %s: its work in the background does not end within %g s", life.owner, PATIENCE)
            await _leave(life, Stage.CLOSE)


async def _enter(life: Life, stage: Stage) -> None:
    for call in life.calls[stage]:
        try:
            await call()
        except Exception as error:
            raise PluginLoadError(
                f"plugin {life.owner} failed in {stage.value}: {type(error).__name__}: {error}"
            ) from error


async def _leave(life: Life, stage: Stage) -> None:
    for call in life.calls[stage]:
        try:
            async with asyncio.timeout(PATIENCE):
                await call()
        except Exception:
            log.exception("plugin %s failed in %s", life.owner, stage.value)


async def _watched(life: Life, work: Call) -> None:
    try:
        await work()
    except Exception:
        log.exception("plugin %s: its work in the background failed and is not started again", life.owner)
