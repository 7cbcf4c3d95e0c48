"""The part in the server: all engines change, or none, and those that start later get what was given to the others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fwk.errors import EngineDead, FwkError, InvalidRequest
from fwk.interfaces.feature import Ask, Exclusive, ServerPart, ServerPartContext
from fwk.interfaces.served_weights import WeightUpdater

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NewWeights:
    """A checkpoint that is served in place of that of the start. fingerprint: of its files, when they were read."""

    model: str
    load_format: str | None
    fingerprint: str


class WeightUpdates(ServerPart, WeightUpdater):
    """Knows the weights that serve."""

    def __init__(self, context: ServerPartContext) -> None:
        super().__init__(context)
        self._given: NewWeights | None = None  # in place of those of the start

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"update_weights": self._update_here}

    async def _update_here(self, model: str, load_format: str | None = None) -> None:
        """Serve the weights of another checkpoint of the same architecture: a folder, a file or what a source knows.

        They are read as at the start, alongside the ones that serve; the tokenizer, the chat template and the tokens
        that end a text stay. load_format: None for that of the start. Raises ``InvalidRequest`` while prompts are under
        way, and when the checkpoint does not fit: then the model is as it was.
        """
        await self._update(model, load_format, aborts=False)

    async def update(self, model: str, load_format: str | None = None, *, aborts: bool = False) -> int:
        # A client that goes away meanwhile does not leave some engines with it and others without.
        work = self._update(model, load_format, aborts=aborts)
        return await asyncio.shield(asyncio.ensure_future(work))

    async def _update(self, model: str, load_format: str | None, *, aborts: bool) -> int:
        """Engines read it while they serve, each between two of its steps; then those under way end."""
        assert self.context.exclusive is not None
        # Noted before an engine reads the files, so that a change after it is noticed.
        noted = await asyncio.to_thread(self.context.note_weights, model, load_format)
        async with self.context.exclusive() as engines:
            try:
                found = set(await engines.ask("prepare", model, load_format))
                if len(found) > 1:
                    raise InvalidRequest(
                        f"the weights stay as they are: the files of {model} changed meanwhile", "model_path"
                    )
                await engines.drain(aborts=aborts)
            except BaseException:
                await _discard(engines)
                raise
            self._given = NewWeights(model, load_format, found.pop())  # also for engines that die from here on
            self.served = noted
            try:
                await engines.ask("use")
            except EngineDead as error:
                if self.context.frontend is None:
                    raise
                log.error("no engine lived on with other weights: %s", error)
            log.info("the weights are those of %s", model)
            return engines.num_waiting()

    async def engine_begins(self, ask: Ask) -> None:
        given = self._given
        if given is not None:
            if await ask("prepare", given.model, given.load_format) != given.fingerprint:
                raise InvalidRequest(f"the files of {given.model} have changed since they were read", "model_path")
            await ask("use")


async def _discard(engines: Exclusive) -> None:
    with contextlib.suppress(FwkError):
        await engines.ask("discard")
