"""The part in the engine: exchanges a plugin between two steps, without losing a request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fwk.errors import EngineDead, FwkError, PluginError
from fwk.interfaces.feature import EnginePart, EnginePartContext
from fwk.interfaces.schedule import ScheduleContext
from fwk.types import Request

log = logging.getLogger(__name__)


class EngineSwitch(EnginePart):
    """Builds what takes over, then exchanges it. Has no part in requests."""

    def __init__(self, context: EnginePartContext) -> None:
        super().__init__(context)
        self._last = 0  # number of the last switch that was done

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"switch": self._switch_numbered, "take_back": self._take_back}

    def concerns(self, request: Request) -> bool:
        return False

    def _switch_numbered(self, number: int, family: str, name: str, options: Mapping[str, object], is_on: bool) -> None:
        self.switch(family, name, options, is_on)
        self._last = number

    def _take_back(self, number: int, family: str, name: str, options: Mapping[str, object], is_on: bool) -> None:
        """Go back from switch ``number`` to what was before, if it was done here."""
        if self._last == number:
            self._switch_numbered(0, family, name, options, is_on)

    def switch(self, family: str, name: str, options: Mapping[str, object], is_on: bool) -> None:
        """Use a plugin with these options from now on, or use it no more. Raises ``FwkError``; then nothing changed."""
        try:
            self._exchange(family, name, options, is_on)
        except FwkError as error:
            log.error("%s.%s could not be switched: %s", family, name, error)
            raise
        log.info("%s.%s was switched %s", family, name, "on" if is_on else "off")

    def _exchange(self, family: str, name: str, options: Mapping[str, object], is_on: bool) -> None:
        plugins, use_policy = self.context.plugins, self.context.use_policy
        assert plugins is not None
        assert use_policy is not None
        item = plugins.find(family, name)
        build = plugins.joining(item, options) if is_on else None
        if family == "logits_processors":
            errors = self.context.call("prepare_processor", name, dict(options), is_on)
            if any(errors):
                raise PluginError(next(error for error in errors if error))
            self.context.call("use_processor")
        elif family == "schedulers" and build is not None:
            policy = build(ScheduleContext)
            try:
                use_policy(policy, item.label)
            except EngineDead as error:
                raise PluginError(str(error)) from error
        else:
            raise PluginError(f"{item.key} cannot be switched in a running engine")
