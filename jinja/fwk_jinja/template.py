"""A template, compiled once and rendered from any thread."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from fwk_jinja.errors import TemplateRefusal
from fwk_jinja.sandbox import MAX_RENDERED, Sandbox


class BoundedTemplate:
    """With the functions that transformers gives chat templates. Raises ``TemplateRefusal`` if it does not compile."""

    def __init__(self, source: str) -> None:
        self._sandbox = environment = Sandbox()
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise TemplateRefusal(f"does not compile: {error}") from None

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text. Raises ``TemplateRefusal``."""
        parts: list[str] = []
        length = 0
        self._sandbox.start()
        try:
            for part in self._template.generate(variables):
                length += len(part)
                if length > MAX_RENDERED:
                    raise TemplateRefusal(f"produces more than {MAX_RENDERED} characters")
                parts.append(part)
        except SecurityError:
            raise TemplateRefusal("does something the sandbox forbids") from None
        except TemplateError as error:
            raise TemplateRefusal(f"refuses these messages: {error}") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError):
            raise TemplateRefusal("cannot render these messages") from None
        return "".join(parts)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
