"""The sandbox that chat templates run in: Jinja's own, and bounds on time, repetitions and lengths.

Loops and calls look at the clock; operators, methods and filters that can make much of little are told no before they
do. Templates come with models: whoever serves one need not have read them. What they may name beyond Jinja is in
``names``.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import loopcontrols
from jinja2.filters import do_format
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from markupsafe import soft_str

from fwk_jinja.errors import TemplateRefusal
from fwk_jinja.names import FILTERS, GLOBALS, MAX_RENDERED, Generation

MAX_SECONDS = 2.0
"""Of CPU time that a template may take."""

MAX_EXPONENT = 64
MAX_BITS = 4096
TICKS = 64
"""Iterations and calls between two looks at the clock."""

_SIZED = ("batch", "center", "indent", "round", "slice", "truncate", "wordwrap")
"""Filters whose result grows with a number they are given."""


class Sandbox(ImmutableSandboxedEnvironment):
    """One environment serves all threads; ``start`` sets the clock of the thread that is about to render."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
        self._clock = threading.local()
        self.globals |= GLOBALS
        self.filters |= {**{name: _sized(self.filters[name]) for name in _SIZED}, **FILTERS}
        self.filters |= {"format": _format, " ticking": self._ticking, " joined": _joined}  # no template can name these

    def start(self) -> None:
        """Give this thread ``MAX_SECONDS`` from now on."""
        self._clock.end, self._clock.ticks = time.thread_time() + MAX_SECONDS, 0

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            _check_form(left, right if isinstance(right, tuple) else (right,))
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            _check_length(len(left) + len(right))
        if operator == "*":
            _check_product(left, right)
        if operator == "**" and isinstance(right, (int, float)) and abs(right) > MAX_EXPONENT:
            raise SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self._tick()
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            _check_method(owner, __obj.__name__, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Guarded().visit(super()._parse(source, name, filename))

    def _tick(self) -> None:
        clock = self._clock
        clock.ticks += 1
        if clock.ticks % TICKS == 0 and time.thread_time() > clock.end:
            raise TemplateRefusal(f"takes more than {MAX_SECONDS:g} seconds of CPU time")

    def _ticking(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._tick()
            yield item


class _Guarded(NodeTransformer):
    """Has loops tick, and texts that are put together counted."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(cast(nodes.Expr, node.iter), " ticking")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filtered(nodes.List(node.nodes, lineno=node.lineno), " joined")


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    made = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
    return made.set_environment(node.environment)  # type: ignore[return-value]


def _joined(parts: list[Any]) -> str:
    texts = [str(part) for part in parts]
    _check_length(sum(map(len, texts)))
    return "".join(texts)


def _check_length(length: int) -> None:
    if length > MAX_RENDERED:
        raise SecurityError("a text or a list is too long")


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise SecurityError("a product is too large")
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            _check_length(len(value) * times)


def _check_method(text: str, method: str, arguments: list[Any]) -> None:
    """Refuse a string method whose result would be too long."""
    if any(isinstance(argument, int) and argument > MAX_RENDERED for argument in arguments):
        raise SecurityError("a number is too large")
    if method in ("format", "format_map"):
        _check_widths(text)
    if method == "replace" and len(arguments) > 1 and isinstance(arguments[0], str) and isinstance(arguments[1], str):
        _check_length(len(text) + text.count(arguments[0]) * len(arguments[1]))
    if method == "join" and arguments and isinstance(arguments[0], (str, list, tuple)):
        _check_length(len(text) * len(arguments[0]))


def _check_widths(form: str) -> None:
    if any(len(digits) > 9 or int(digits) > MAX_RENDERED for digits in re.findall(r"[0-9]+", form)):
        raise SecurityError("a width is too large")


def _check_form(form: str, values: tuple[Any, ...]) -> None:
    """Before ``form % values``."""
    _check_widths(form)
    if "*" in form and any(isinstance(value, int) and abs(value) > MAX_RENDERED for value in values):
        raise SecurityError("a width is too large")


def _format(form: Any, *values: Any, **named: Any) -> str:
    _check_form(soft_str(form), values)
    return do_format(form, *values, **named)


def _sized(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, int) and abs(value) > MAX_RENDERED for value in [*args[1:], *kwargs.values()]):
            raise SecurityError("a number is too large")
        return original(*args, **kwargs)

    return bounded
