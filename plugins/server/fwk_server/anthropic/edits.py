"""``context_management``: edits that leave out what was said long ago, once a conversation has grown past a threshold.

Nothing is left out here: below its threshold an edit does nothing, and past it a request is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fwk.errors import InvalidRequest
from fwk_server._common.body import shown, want

_TRIGGERS = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
"""Tokens of the prompt from which on each edit applies where it names no ``trigger``, as Anthropic has it."""
_CLEAR_THINKING = "clear_thinking_20251015"
_FIELD = "context_management"


def check_edits(raw: Mapping[str, Any], num_tokens: int) -> None:
    """Raise ``InvalidRequest`` for an edit that would apply to this body, whose prompt has so many tokens."""
    management = raw.get(_FIELD) or {}
    for name in management:
        if name != "edits":
            raise InvalidRequest(f"{_FIELD}.{name[:64]} is not supported, only edits", _FIELD)
    for i, edit in enumerate(want(management.get("edits") or [], list, "an array", f"{_FIELD}.edits")):
        at = f"{_FIELD}.edits[{i}]"
        kind = want(edit, dict, "an object", at).get("type")
        if kind == _CLEAR_THINKING:
            applies = _clears_thinking(edit, raw, at)
        elif isinstance(kind, str) and kind in _TRIGGERS:
            applies = _is_reached(edit.get("trigger"), raw, num_tokens, _TRIGGERS[kind], at)
        else:
            known = ", ".join([_CLEAR_THINKING, *_TRIGGERS])
            raise InvalidRequest(f"{at}.type must be one of {known}, not {shown(kind)}", _FIELD)
        if applies:
            raise InvalidRequest(
                f"{at}: the conversation is past the threshold of {kind}, and nothing is cleared here: send a shorter "
                "one, or raise the threshold",
                _FIELD,
            )


def _clears_thinking(edit: Mapping[str, Any], raw: Mapping[str, Any], at: str) -> bool:
    keep = edit.get("keep")
    if keep == "all" or (isinstance(keep, dict) and keep.get("type") == "all"):
        return False
    most = 1 if keep is None else _value(keep, "thinking_turns", f"{at}.keep")
    return sum(_has_block(turn, "thinking") for turn in raw["messages"]) > most


def _is_reached(trigger: Any, raw: Mapping[str, Any], num_tokens: int, default: int, at: str) -> bool:
    if trigger is None:
        return num_tokens > default
    where = f"{at}.trigger"
    if want(trigger, dict, "an object", where).get("type") == "tool_uses":
        uses = sum(_num_blocks(turn, "tool_use") for turn in raw["messages"])
        return uses > _value(trigger, "tool_uses", where)
    return num_tokens > _value(trigger, "input_tokens", where)


def _value(given: Any, kind: str, at: str) -> int:
    if want(given, dict, "an object", at).get("type") != kind:
        raise InvalidRequest(f"{at}.type must be {kind}, not {shown(given.get('type'))}", _FIELD)
    return want(given.get("value"), int, "an integer", f"{at}.value")


def _num_blocks(turn: Mapping[str, Any], kind: str) -> int:
    content = turn.get("content")
    return sum(isinstance(block, dict) and block.get("type") == kind for block in content or ())


def _has_block(turn: Mapping[str, Any], kind: str) -> bool:
    return _num_blocks(turn, kind) > 0
