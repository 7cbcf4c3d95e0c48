"""Chat templates: Jinja from a model's files, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError

from fwk.errors import InvalidRequest, ModelLoadError
from fwk.text.template_sandbox import MAX_RENDERED, Sandbox


class ChatTemplate:
    """One compiled template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._sandbox = environment = Sandbox()
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._special = dict(special_tokens)
        try:
            self._template: Template = environment.from_string(source)
        except TemplateError as error:
            raise ModelLoadError(f"the chat template does not compile: {error}; use --chat-template FILE") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation. ``kwargs`` reach the template but cannot replace our own arguments.

        ``continue_final_message`` cuts the prompt right after the last message's text, so that the model continues
        with it.
        """
        last = ""
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude one another", "continue_final_message"
                )
            last = messages[-1].get("content") if messages else None
            if not isinstance(last, str) or not last.strip():
                raise InvalidRequest("continue_final_message needs a last message with text", "messages")
        variables = {
            **(kwargs or {}),
            **self._special,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        if continue_final_message:
            end = text.rfind(last.strip())
            if end < 0:
                raise InvalidRequest("the chat template changes the last message: it cannot be continued", "messages")
            text = text[: end + len(last.strip())]
        return text

    def shows_tools(self) -> bool:
        """Whether a tool given to it is in the prompt. A template that refuses the question is taken at its word."""
        name = "probe_7c1e"
        parameters = {"type": "object", "properties": {}}
        function = {"name": name, "description": name, "parameters": parameters}
        try:
            prompt = self.render([{"role": "user", "content": "x"}], tools=[{"type": "function", "function": function}])
        except InvalidRequest:
            return True
        return name in prompt

    def _run(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        length = 0
        self._sandbox.start()
        try:
            for part in self._template.generate(variables):
                length += len(part)
                if length > MAX_RENDERED:
                    raise InvalidRequest(f"the chat template produces more than {MAX_RENDERED} characters", "messages")
                parts.append(part)
        except SecurityError:
            raise InvalidRequest("the chat template does something the sandbox forbids", "messages") from None
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", "messages") from None
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError):
            raise InvalidRequest("the chat template cannot render these messages", "messages") from None
        return "".join(parts)


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
