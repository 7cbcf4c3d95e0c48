"""A feature's part in an engine that fails: its requests end with an error in its name, and it is asked no more."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, cast

import msgspec

from fwk.errors import FwkError, PluginFault, one_line_traceback
from fwk.interfaces.feature import EnginePart
from fwk.types import Request

log = logging.getLogger(__name__)


def _nothing(*_: Any) -> None:
    return None


def _is_count(answer: Any, *_: Any) -> bool:
    return isinstance(answer, int) and answer >= 0


def _is_told(answer: Any, *_: Any) -> bool:
    return answer is None or isinstance(answer, msgspec.Struct | msgspec.Raw)


def _is_truth(answer: Any, *_: Any) -> bool:
    return answer is not None


def _are_ids(answer: Any, request: Request) -> bool:
    if answer is None:
        return True
    is_whole = isinstance(answer, list) and len(cast("list[Any]", answer)) == len(request.prompt_token_ids)
    return is_whole and all(type(one) is int for one in answer)


_ANSWERS: dict[str, tuple[Callable[..., Any], Callable[..., bool] | None]] = {
    **{
        name: (_nothing, None)
        for name in (
            "check", "left", "planning", "took", "preempted", "finished", "forget", "close",
            "poll", "arrived", "started", "ended", "wait",
        )
    },
    **{name: (_nothing, _is_told) for name in ("new", "step", "event", "stats")},
    "concerns": (lambda *_: False, _is_truth),
    "cache_ids": (_nothing, _are_ids),
    "matchable": (lambda sequence, count: count, _is_count),
    "cached": (lambda sequence, count: count, _is_count),
    "limit": (lambda sequence, start, count: count, _is_count),
    "restorable": (lambda *_: True, _is_truth),
    "lets_through": (lambda *_: True, _is_truth),
    "takes_longer": (lambda *_: False, _is_truth),
    "is_full": (lambda *_: False, _is_truth),
    "is_busy": (lambda *_: False, _is_truth),
    "trouble": (_nothing, lambda answer, *_: answer is None or isinstance(answer, str)),
}  # fmt: skip
"""By what a part overrides: what stands for its answer once it has failed, and what an answer must be; None: any."""


def guarded(part: EnginePart, who: str, failed: Callable[[EnginePart, str], None]) -> EnginePart:
    """The part, whose methods fail once: ``failed`` is told why, in a sentence, and they answer nothing from then on.

    An ``FwkError`` of its own passes.
    """
    cls, wire = type(part), part.context.wire
    kinds = {"new": wire.sequence, "step": wire.step, "event": wire.event, "stats": wire.stats}
    has_failed = False

    def guard(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        default, is_right = _ANSWERS[name]
        kind = (kinds.get(name) or object, msgspec.Raw, type(None))

        @wraps(method)
        def call(self: EnginePart, *args: Any) -> Any:
            nonlocal has_failed
            if not has_failed:
                try:
                    answer = method(self, *args)
                    if isinstance(answer, kind) and (is_right is None or is_right(answer, *args)):
                        return answer
                    told = f"{who} answered {type(answer).__name__} {answer!r:.100} in {name}"
                except FwkError as error:
                    if not isinstance(error, PluginFault):
                        raise
                    told = str(error)
                except Exception as error:
                    told = f"{who} raised {type(error).__name__} in {name}"
                    log.error("%s: %s", told, one_line_traceback(error))
                has_failed = True
                failed(self, told)
            return default(*args)

        return call

    body = {name: _wrapped(own, partial(guard, name)) for name, own in _overridden(cls)}
    part.__class__ = type(cls.__name__, (cls,), {"__slots__": (), **body})
    return part


def _overridden(cls: type[EnginePart]) -> Iterator[tuple[str, Any]]:
    """What of ``_ANSWERS`` a class does otherwise than ``EnginePart``."""
    for name in _ANSWERS:
        own = inspect.getattr_static(cls, name)
        if own is not inspect.getattr_static(EnginePart, name):
            yield name, own


def _wrapped(own: Any, wrap: Callable[[Callable[..., Any]], Any]) -> Any:
    return property(wrap(cast("Any", own.fget))) if isinstance(own, property) else wrap(own)
