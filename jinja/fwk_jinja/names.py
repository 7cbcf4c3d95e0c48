"""What chat templates may name beyond Jinja: the tag, filters and globals that transformers has for them.

``transformers.utils.chat_template_utils`` is the list, and a test compares the two environments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.utils import Namespace, generate_lorem_ipsum

from fwk_jinja.errors import TemplateRefusal

MAX_RENDERED = 32 * 2**20
"""Characters a template may produce, at the end and on the way."""

MAX_INDENT = 2**16
MAX_WORDS = 2**16
"""That ``lipsum`` may make at once."""

MAX_DATE = 4096
"""Characters of what ``strftime_now`` is asked for."""


class Generation(Extension):
    """``{% generation %}``: training marks with it what the assistant wrote. It changes no text."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateDict:
    """``dict`` without the methods of the type, which would change what they are given."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """Jinja's, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that ``namespace(self=...)`` works
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(args[0], attributes)  # type: ignore[arg-type]

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        Namespace.__setitem__(self, name, value)


def _check_attribute(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateRefusal(f"sets {name!r} of a namespace: names that begin with an underscore are not allowed")


def tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """``json.dumps``, without the escapes of HTML that Jinja's filter has."""
    if max(indent if isinstance(indent, int) else len(indent or ""), 0) > MAX_INDENT:
        raise SecurityError("a number is too large")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None and separators is None:
        return encoder.encode(value)
    parts: list[str] = []
    length = 0
    for part in encoder.iterencode(value):
        length += len(part)
        if length > MAX_RENDERED:
            raise SecurityError("a text is too long")
        parts.append(part)
    return "".join(parts)


def raise_exception(message: str) -> NoReturn:
    """End the rendering with a sentence for the client."""
    raise TemplateError(message)


def strftime_now(format: str) -> str:
    """The time in this form."""
    if len(format) > MAX_DATE or any(len(digits) > 4 for digits in re.findall(r"[0-9]+", format)):
        raise SecurityError("a width is too large")
    return datetime.now().strftime(format)


def lipsum(n: int = 5, html: bool = True, min: int = 20, max: int = 100) -> str:
    """Jinja's, of a bounded length."""
    if n * max > MAX_WORDS:
        raise SecurityError("a text is too long")
    return generate_lorem_ipsum(n, html, min, max)


FILTERS: Mapping[str, Callable[..., Any]] = {"tojson": tojson}
GLOBALS: Mapping[str, Any] = {
    "dict": TemplateDict(),
    "lipsum": lipsum,
    "namespace": TemplateNamespace,
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}
