"""What plugins answer in a step, checked once where it enters, in the name of the plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fwk.errors import FwkError, NotCapturable, PluginFault
from fwk.plugins.discovery import Registered
from fwk.plugins.families import FAMILIES


def checked(item: Registered, plugin: Any, **checks: Callable[..., str | None] | None) -> Any:
    """The plugin's object, whose named methods raise ``PluginFault`` for what they raise or wrongly answer.

    checks: by method: why its answer, given before its arguments, may not be used, as a predicate; None: it may. In
    place of one None stands for any answer. An ``FwkError`` of its own passes, as does the end of memory.
    """
    for name, check in checks.items():
        setattr(plugin, name, _checked(f"{FAMILIES[item.family].noun} {item.label}", getattr(plugin, name), check))
    return plugin


def _checked(who: str, method: Callable[..., Any], check: Callable[..., str | None] | None) -> Callable[..., Any]:
    name = method.__name__

    def call(*args: Any, **fields: Any) -> Any:
        try:
            answer = method(*args, **fields)
            why = None if check is None else check(answer, *args, **fields)
        except (FwkError, NotCapturable, MemoryError):
            raise
        except Exception as error:
            if type(error).__name__ == "OutOfMemoryError":  # torch's
                raise
            raise PluginFault(f"{who} raised {type(error).__name__} in {name}") from error
        if why is not None:
            raise PluginFault(f"{who} {why} in {name}")
        return answer

    return call
