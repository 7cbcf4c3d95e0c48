"""System messages where the chat template takes none: amid the turns (Qwen3.5), or at all (Gemma 2).

Claude Code and Codex send some amid the turns of every conversation. A template that refuses them there, or leaves them
out of the prompt, is given their text as part of a turn beside them. They keep their place, unlike in a first system
message, which would differ with each turn and so share no prefix with the turn before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from fwk.errors import InvalidRequest
from fwk.interfaces.dialect import TextTools

_PROBE = "probe_5b2d"
_known: WeakKeyDictionary[TextTools, tuple[bool, bool]] = WeakKeyDictionary()


def placed(messages: list[dict[str, Any]], text: TextTools) -> list[dict[str, Any]]:
    """The messages, with those system messages that the chat template does not take put into turns beside them.

    Into the user's message or the tool's result before it; behind an assistant's message and at the start, into the
    user's message that follows, or one of its own. Several at the start become one.
    """
    if not any(message["role"] == "system" for message in messages):
        return messages
    takes_first, takes_amid = _taken(text)
    if takes_first and (takes_amid or all(message["role"] != "system" for message in messages[1:])):
        return messages
    made: list[dict[str, Any]] = []
    pending: list[Any] = []  # contents for the user's message that follows
    for message in messages:
        role, content = message["role"], message["content"]
        if role != "system":
            if pending and role == "user":
                message = {**message, "content": _joined([*pending, content])}
            elif pending:
                made.append({"role": "user", "content": _joined(pending)})
            pending = []
            made.append(message)
        elif not made and not pending and takes_first:
            made.append(message)
        elif made and made[-1]["role"] != "assistant":
            made[-1] = {**made[-1], "content": _joined([made[-1]["content"], content])}
        else:
            pending.append(content)
    if pending:
        made.append({"role": "user", "content": _joined(pending)})
    return made


def _joined(contents: Sequence[str | list[dict[str, Any]]]) -> str | list[dict[str, Any]]:
    """Contents as one: a text, or parts where one of them has parts."""
    if all(isinstance(content, str) for content in contents):
        return "\n\n".join(content for content in contents if isinstance(content, str) and content)
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return parts


def _taken(text: TextTools) -> tuple[bool, bool]:
    """Whether the template shows the model a system message at the start, and those amid the turns."""
    found = _known.get(text)
    if found is None:
        said, turns = _message("user", "x"), [_message("assistant", "y"), _message("user", "x")]
        told = _message("system", _PROBE)
        if _shows(text, [_message("user", _PROBE), *turns], 1):
            takes_first = _shows(text, [told, said, *turns], 1)
            first = [told] if takes_first else []
            found = takes_first, _shows(text, [*first, said, told, *turns, told], len(first) + 2)
        else:
            found = True, True  # there is no template, or none of chats: it says itself what it refuses
        _known[text] = found
    return found


def _shows(text: TextTools, messages: Sequence[Mapping[str, Any]], count: int) -> bool:
    try:
        return text.render_chat(messages).count(_PROBE) >= count
    except InvalidRequest:
        return False


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
