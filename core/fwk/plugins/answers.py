"""What plugins raise and answer, checked once where it enters, in the name of the plugin."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import is_dataclass
from functools import cache, wraps
from typing import Any, Literal, cast

from fwk.errors import FwkError, NotCapturable, PluginFault, one_line_traceback
from fwk.plugins.discovery import OWN, Registered
from fwk.plugins.families import FAMILIES
from fwk.plugins.fitting import fitting, in_words, type_of

log = logging.getLogger(__name__)

OWN_GUARDS = frozenset({"attention", "quant", "models", "schedulers", "speculative", "samplers", "operators", "moe"})
"""Families whose objects are checked where they are called, and the models, which call the others."""

Check = Callable[..., str | None]
"""Why an answer, given before its arguments, may not be used, as a predicate; None: it may."""


def checked(item: Registered, plugin: Any, **checks: Check | None) -> Any:
    """The plugin's object, whose named methods raise ``PluginFault`` for what they raise or wrongly answer.

    checks: by method; in place of one None stands for any answer. An ``FwkError`` of its own passes, as does the end
    of memory.
    """
    for name, check in checks.items():
        setattr(plugin, name, guarded(f"{FAMILIES[item.family].noun} {item.label}", getattr(plugin, name), name, check))
    return plugin


def named(item: Registered, made: Any, *, is_often: bool = False) -> Any:
    """The plugin's object, whose interface's methods raise ``PluginFault`` for what they raise or wrongly answer.

    An answer is held against the type that the interface says it has; one that is an object with methods of an
    interface, as a grammar is, is guarded likewise. What a class inherits from its interface stays as it is, and types
    of answers of fwk's own plugins are left to type checkers. is_often: others of its class follow.
    """
    who = f"{FAMILIES[item.family].noun} {item.label}"
    is_ours = item.package == OWN
    if is_often:
        _follow(who, is_ours, made)
    else:
        with suppress(TypeError):  # one that cannot change its class
            made.__class__ = _named(who, is_ours, cast("type[Any]", type(made)))
    return made


def _named(who: str, is_ours: bool, cls: type[Any]) -> type[Any]:
    body: dict[str, Any] = {}
    for name in dir(cls):
        interface = next((base for base in cls.__mro__[::-1] if _is_interface(base) and name in base.__dict__), None)
        own = inspect.getattr_static(cls, name)
        if name.startswith("_") or interface is None or own is inspect.getattr_static(interface, name):
            continue
        if isinstance(own, property) and own.fget is not None:
            body[name] = property(guarded(who, own.fget, name, is_ours or _answers(interface, name)))
        elif inspect.isfunction(own):
            body[name] = guarded(who, own, name, is_ours or _answers(interface, name))
    if not body:
        return cls
    body |= {"__slots__": (), "__module__": cls.__module__, "__doc__": cls.__doc__}
    try:
        found = type(cls.__name__, (cls,), body)
    except TypeError:  # nothing may derive from it
        return cls
    _GUARDED.add(found)
    return found


def _follow(who: str, is_ours: bool, answer: Any) -> None:
    """Guard an answer that is an object of an interface."""
    cls = _guarded_class(who, is_ours, cast("type[Any]", type(answer)))
    if cls is not None:
        with suppress(TypeError):
            answer.__class__ = cls


@cache
def _guarded_class(who: str, is_ours: bool, cls: type[Any]) -> type[Any] | None:
    """What guards objects of a class that is an answer; None: it is no interface's, or guarded already."""
    if cls in _GUARDED or is_dataclass(cls) or not any(map(_is_interface, cls.__mro__[1:])):
        return None
    return _named(who, is_ours, cls)


_GUARDED: set[type[Any]] = set()
_PLAIN = frozenset[type[Any]]({type(None), bool, int, float, str, bytes, tuple, list, set, dict})
_FATAL = tuple(f"{FAMILIES[family].noun} " for family in ("executors", "cache"))  # the line of its death tells it
_TOLD = set[str]()  # at level error, once each


def _is_interface(cls: type[Any]) -> bool:
    return cls.__module__.startswith("fwk.interfaces.")


def guarded(
    who: str, method: Callable[..., Any], name: str, check: Check | Literal[True] | None = None
) -> Callable[..., Any]:
    """The method, which raises ``PluginFault`` for what it raises or wrongly answers; has ``who`` as an attribute.

    check: None or True: any answer is one; after True, so are those of objects that it answers.
    """
    is_ours, checks = check is True, None if check is True else check

    def entered(answer: Any, args: Any, fields: Any) -> None:
        why = None if checks is None else checks(answer, *args, **fields)
        if why is not None:
            raise _told(f"{who} {why} in {name}", "")
        if type(answer) not in _PLAIN:
            _follow(who, is_ours, answer)

    @wraps(method)
    def call(*args: Any, **fields: Any) -> Any:
        try:
            answer = method(*args, **fields)
            if checks is not None or type(answer) not in _PLAIN:
                entered(answer, args, fields)
            return answer
        except (Exception, SystemExit) as error:
            _blame(who, name, error)
            raise

    @wraps(method)
    async def wait(*args: Any, **fields: Any) -> Any:
        try:
            answer = await method(*args, **fields)
            entered(answer, args, fields)
            return answer
        except (Exception, SystemExit) as error:
            _blame(who, name, error)
            raise

    found = wait if inspect.iscoroutinefunction(method) else call
    found.__dict__["who"] = who
    return found


def _blame(who: str, name: str, error: BaseException) -> None:
    """Raise ``PluginFault`` for what a plugin may not raise."""
    if isinstance(error, FwkError | NotCapturable | MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return  # the last one is torch's
    raise _told(f"{who} raised {type(error).__name__} in {name}", f": {one_line_traceback(error)}") from error


def _told(what: str, why: str) -> PluginFault:
    is_new = what not in _TOLD and not what.startswith(_FATAL)
    log.log(logging.ERROR if is_new else logging.DEBUG, "%s%s", what, why)
    _TOLD.add(what)
    return PluginFault(what)


@cache
def _answers(interface: type[Any], name: str) -> Check | None:
    """What holds an answer against the type that an interface's method declares; None: anything is one."""
    own = inspect.getattr_static(interface, name)
    method: Any = own.fget if isinstance(own, property) else own
    kind = type_of(interface, method.__annotations__.get("return", Any))
    fits = fitting(kind)
    if fits is None or kind is type(None):
        return None
    words = in_words(kind)

    def check(answer: Any, *args: Any, **fields: Any) -> str | None:
        if fits(answer):
            return None
        return f"answered {'None' if answer is None else f'a {type(answer).__name__}'}, no {words},"

    return check
