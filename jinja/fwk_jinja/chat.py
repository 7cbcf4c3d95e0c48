"""Chat templates: from messages to the prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from fwk_errors import InvalidRequest, ModelLoadError
from fwk_jinja.errors import TemplateRefusal
from fwk_jinja.template import BoundedTemplate

_END = "\ue000end\ue001 "
"""Put behind a message to find where it ends in the prompt; the space tells whether the template strips texts."""


class ChatTemplate:
    """One compiled template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._special = dict(special_tokens)
        try:
            self._template = BoundedTemplate(source)
        except TemplateRefusal as refusal:
            raise ModelLoadError(f"the chat template {refusal}; use --chat-template FILE") from None

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
        messages = self._in_form(messages)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message and add_generation_prompt exclude one another", "continue_final_message"
                )
            messages = [*messages[:-1], _with_end(messages[-1] if messages else {})]
        variables = {
            **(kwargs or {}),
            **self._special,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        text = self._run(variables)
        if not continue_final_message:
            return text
        before, mark, behind = text.rpartition(_END.strip())
        if not mark:
            raise InvalidRequest("the chat template changes the last message: it cannot be continued", "messages")
        return before if behind.startswith(_END[-1]) else before.rstrip()  # the template strips its texts

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

    def _in_form(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """Contents as the template reads them: texts, or all of them in parts, as templates of models that see do."""
        has_parts = any(isinstance(message.get("content"), list) for message in messages)
        if not has_parts and self._shows_text:
            return messages
        return [
            {**message, "content": [{"type": "text", "text": message["content"]}]}
            if isinstance(message.get("content"), str)
            else message
            for message in messages
        ]

    @cached_property
    def _shows_text(self) -> bool:
        """Whether a content that is a text is in the prompt; in parts it might be, where it is not."""
        probe = "probe_7c1e"
        variables = {**self._special, "tools": None, "documents": None, "add_generation_prompt": False}
        try:
            return probe in self._run({**variables, "messages": [{"role": "user", "content": probe}]})
        except InvalidRequest:
            return True

    def _run(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(variables)
        except TemplateRefusal as refusal:
            raise InvalidRequest(f"the chat template {refusal}", "messages") from None


def _with_end(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with ``_END`` behind its last text."""
    content = message.get("content")
    parts = list(content) if isinstance(content, list) else [{"type": "text", "text": content}]
    last = next((i for i in reversed(range(len(parts))) if parts[i].get("type") == "text"), None)
    text = parts[last]["text"] if last is not None else None
    if last is None or not isinstance(text, str) or not text.strip():
        raise InvalidRequest("continue_final_message needs a last message with text", "messages")
    parts[last] = {**parts[last], "text": text + _END}
    return {**message, "content": parts if isinstance(content, list) else parts[last]["text"]}
