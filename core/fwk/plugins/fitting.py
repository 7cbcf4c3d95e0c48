"""Whether what a plugin declares or answers is of the type that an interface says, as far as that can be seen."""

from __future__ import annotations

import builtins
import inspect
import logging
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from functools import cache, wraps
from types import SimpleNamespace, UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from fwk.errors import one_line_traceback
from fwk.interfaces.declaration import Declaration

log = logging.getLogger(__name__)

QUESTIONS = ("refusal", "auto_skip_reason", "is_meant_for", "variance", "asks_of", "facts_with")
"""Methods of declarations that are called before anything is chosen."""


def type_of(interface: type[Any] | Callable[..., Any], annotation: object) -> Any:
    """What an annotation of an interface, or of its method, stands for; ``Any`` where type checkers alone can tell."""
    told = SimpleNamespace(__annotations__={"it": annotation})
    names = ChainMap(sys.modules[interface.__module__].__dict__, builtins.__dict__, _Unknown())
    try:
        return get_type_hints(told, {}, names)["it"]
    except (AttributeError, TypeError):  # of a module that is imported for type checkers alone
        return Any


def in_words(kind: Any) -> str:
    """A type as one reads it in a source."""
    return re.sub(r"\w+\.", "", inspect.formatannotation(kind))


def misfit(item: Declaration) -> str | None:
    """A field of a declaration that has a value of another type than it says, as a predicate; None: there is none."""
    for field in fields(item):
        owner = next(cls for cls in type(item).__mro__ if field.name in inspect.get_annotations(cls))
        kind = _kind_of(owner, str(field.type))
        fits, value = fitting(kind), getattr(item, field.name)
        if fits is not None and not fits(value):
            return f"has {field.name}={value!r:.100}, which is no {in_words(kind)}"
    return None


@cache
def _kind_of(owner: type[Any], annotation: str) -> Any:
    return type_of(owner, annotation)


def guard_questions(item: Declaration, who: str) -> None:
    """Have a declaration whose own code fails when it is asked refuse the run, or answer as its interface does.

    All of a family are asked, so that one that was not selected would end runs without it.
    """
    cls = type(item)
    base = next(one for one in cls.__mro__ if one.__module__.startswith("fwk.interfaces."))
    own = [name for name in QUESTIONS if getattr(cls, name) is not getattr(base, name)]
    if own and not hasattr(getattr(cls, own[0]), "who"):  # declared and found before
        body = {name: _question(getattr(cls, name), getattr(base, name), name, who) for name in own}
        object.__setattr__(item, "__class__", type(cls.__name__, (cls,), {"__module__": cls.__module__, **body}))


def _question(own: Callable[..., Any], default: Callable[..., Any], name: str, who: str) -> Callable[..., Any]:
    kind = type_of(default, default.__annotations__["return"])
    fits = fitting(kind)

    told = set[str]()

    @wraps(own)
    def ask(*args: Any, **fields: Any) -> Any:
        try:
            answer, detail = own(*args, **fields), ""
            if fits is None or fits(answer):
                return answer
            why = f"answered a {type(answer).__name__}, no {in_words(kind)}, in {name}"
        except (Exception, SystemExit) as error:
            why, detail = f"raised {type(error).__name__} in {name}", f": {one_line_traceback(error)}"
        if name == "refusal":
            return why
        if why not in told:
            log.error("%s %s%s", who, why, detail)
            told.add(why)
        return default(*args, **fields)

    ask.__dict__["who"] = who
    return ask


class _Unknown(dict[str, Any]):
    """Names that type checkers alone know."""

    def __missing__(self, name: str) -> Any:
        return getattr(sys.modules.get("torch"), name, Any)

    def __contains__(self, name: object) -> bool:
        return True


def fitting(kind: Any) -> Callable[[Any], bool] | None:
    """Whether an answer is of a type, as far as that can be seen; None: anything is."""
    origin, args = get_origin(kind), get_args(kind)
    parts = [fitting(one) for one in args]
    if kind is None or kind is type(None):
        return lambda answer: answer is None
    if kind is int:
        return lambda answer: hasattr(answer, "__index__")
    if kind is float:
        return lambda answer: hasattr(answer, "__float__")
    if kind is bool:
        return lambda answer: answer is True or answer is False or type(answer).__name__.startswith("bool")  # numpy's
    if origin in (Union, UnionType):
        alternatives = [part for part in parts if part is not None]
        return (lambda answer: any(fits(answer) for fits in alternatives)) if len(alternatives) == len(parts) else None
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return lambda answer: isinstance(answer, Mapping) and _all(parts[0], answer) and _all(parts[1], answer.values())
    if origin is tuple and args[-1] is not Ellipsis:
        return lambda answer: _are(parts, answer)
    if isinstance(origin, type) and issubclass(origin, Sequence | AbstractSet):
        return lambda answer: isinstance(answer, _SEVERAL) and not isinstance(answer, _TEXTS) and _all(parts[0], answer)
    kind = origin if isinstance(origin, type) else kind
    if kind is Any or kind is object or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return None
    return lambda answer: isinstance(answer, kind)


_SEVERAL: Any = (Sequence, AbstractSet)
_TEXTS: Any = (str, bytes)


def _all(fits: Callable[[Any], bool] | None, answers: Any) -> bool:
    return fits is None or all(map(fits, answers))


def _are(parts: list[Callable[[Any], bool] | None], answer: Any) -> bool:
    """Whether an answer is a tuple of these parts."""
    if not isinstance(answer, tuple | list) or len(cast("tuple[Any, ...]", answer)) != len(parts):
        return False
    return all(_all(fits, [one]) for fits, one in zip(parts, cast("tuple[Any, ...]", answer), strict=True))
