"""A template, compiled once and rendered from any thread."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from fwk_jinja.errors import TemplateRefusal
from fwk_jinja.names import MAX_RENDERED
from fwk_jinja.sandbox import Sandbox

MAX_SOURCE = 2**20
"""Characters of a template: compiling takes a hundred times the memory. The longest of known models has 30,000."""


class BoundedTemplate:
    """With the functions that transformers gives chat templates. Raises ``TemplateRefusal`` if it does not compile."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE:
            raise TemplateRefusal(f"does not compile: it has {len(source)} characters, {MAX_SOURCE} are the most")
        self._sandbox = Sandbox()
        try:
            self._template = self._sandbox.from_string(source)
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:  # Python's, of what Jinja makes of it
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
