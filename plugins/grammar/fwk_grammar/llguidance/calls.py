"""Tool calls in a model's own notation, in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fwk_grammar._common.sources import SpecialTokens

Part = Mapping[str, Any]


def calls_in_lark(source: Mapping[str, Any], special: SpecialTokens, schema_of: Callable[[Any], str]) -> str:
    """The source of a ``calls`` request as rules; ``schema_of`` writes a schema as it is enforced."""
    return _Rules(special, schema_of).of(source)


class _Rules:
    """Rules under way, one a line."""

    def __init__(self, special: SpecialTokens, schema_of: Callable[[Any], str]) -> None:
        self._special = special
        self._schema_of = schema_of
        self._lines: list[str] = []

    def of(self, source: Mapping[str, Any]) -> str:
        begin, calls = source["begin"], source["calls"]
        free = source.get("free") or {}
        trigger = free.get("trigger", "")
        if "unlike" in free:  # the beginning of calls is one terminal: other text goes another way in its middle
            first, begin = self._call([_led(begin, parts) for parts in calls]), ""
        elif not begin:
            first = self._call([_led(parts[0]["text"][len(trigger) :], parts[1:]) for parts in calls])
        else:
            first, begin = self._call(calls), begin[len(trigger) :]
        following = f"({self._text(source['separator'])} {self._call(calls)})*" if source["is_many"] else ""
        end = self._text(self._special.up_to_end(source["end"]))
        section = self._rule("section", f"{self._text(begin)} {first} {following} {end}")
        start = self._free(section, free) if free else section
        if source.get("answer") is not None:
            start = f"{start} | {self._json(source['answer'])}"
        return "\n".join([f"start: {start}", *self._lines])

    def _free(self, section: str, free: Mapping[str, Any]) -> str:
        """Text, and calls in it or instead of it."""
        trigger, never = free.get("trigger", ""), free["never"]
        shunned = [text for text in (trigger, *never) if text]
        outside = [_with(shunned)] if shunned else []
        unlike = [f"/{_slashed(free['unlike'])}(?s:.*)/"] if "unlike" in free else []
        words = " & ".join(["/(?s:.+)/", *(f"~{each}" for each in outside)])
        ranges = self._special.ranges(without=shunned)
        # No two in a row: what one may not hold could begin in it and end in the next.
        self._lines.append(f"WORDS: {words}")
        special = f"<[{ranges}]>" if ranges else ""
        rest = self._rule("rest", f"({special} WORDS?)*" if special else '""')
        if unlike:
            self._lines.append(f"FIRST: {words} & ~{unlike[0]}")
            return f"FIRST? {rest} | {section}"
        before, mark = self._special.before(trigger)
        chunk = f"(WORDS? {special})*" if special else ""
        if not mark or before:  # what is text of the trigger stands behind other text
            shunned.remove(trigger)
            head = " & ".join([f"/(?s:.*){_escaped(before)}/", *([f"~{_with(shunned)}"] if shunned else [])])
            self._lines += [f"HEAD: {head}", "head[lazy]: HEAD"]
            chunk = f"{chunk} {'HEAD' if mark else 'head'}"
        else:
            chunk = f"{chunk} WORDS?"
        chunk = self._rule("chunk", f"{chunk} {self._text(mark)} {section}")
        return f"{chunk}* WORDS? {rest}"

    def _call(self, calls: Sequence[Sequence[Part]]) -> str:
        return self._rule("call", " | ".join(map(self._parts, calls)))

    def _parts(self, parts: Sequence[Part]) -> str:
        """Parts in a row."""
        found: list[str] = []
        pattern: str | None = None
        for part in parts:
            text = part.get("text")
            if pattern is not None and text:  # both are one terminal: a pattern would take what may also end it
                head, text = self._special.before(text)
                pattern += _escaped(head)
            if pattern is not None:
                found.append(self._rule("PATTERN", f"/{pattern}/"))
            pattern = f"({_slashed(part['regex'])})" if "regex" in part else None
            if text is not None:
                found.append(self._text(text))
            elif pattern is None:
                found.append(self._part(part))
        if pattern is not None:
            found.append(self._rule("PATTERN", f"/{pattern}/"))
        return " ".join(found) or '""'

    def _part(self, part: Part) -> str:
        if "json" in part:
            return self._json(part["json"])
        if "or" in part:
            return self._rule("either", " | ".join(map(self._parts, part["or"])))
        if "repeat" in part:
            return f"{self._rule('repeated', self._parts(part['repeat']))}*"
        return self._arguments(part["arguments"], part["between"])

    def _arguments(self, arguments: Sequence[Mapping[str, Any]], between: str) -> str:
        """All in order; behind the first, each that may be left out is, with what stands before it."""
        names = [self._rule("argument", self._parts(each["parts"])) for each in arguments]
        are_required = [each["is_required"] for each in arguments]
        separator = self._text(between)
        if not between:
            pairs = zip(names, are_required, strict=True)
            return " ".join(name if is_required else f"{name}?" for name, is_required in pairs)
        following = '""'  # what may stand behind an argument
        begun = '""'  # the rest where none has come
        for name, is_required in reversed(list(zip(names, are_required, strict=True))):
            begun = self._rule("first", f"{name} {following}" if is_required else f"{name} {following} | {begun}")
            further = f"{separator} {name} {following}"
            following = self._rule("further", further if is_required else f"{further} | {following}")
        return begun

    def _text(self, text: str) -> str:
        """A fixed text, in which special tokens stand for themselves; nothing at all is nothing here."""
        return " ".join(
            f"<[{piece}]>" if isinstance(piece, int) else _quoted(piece) for piece in self._special.split(text)
        )

    def _json(self, schema: Any) -> str:
        return self._rule("json", f"%json {self._schema_of(schema)}")

    def _rule(self, name: str, body: str) -> str:
        full = f"{name}{len(self._lines)}" if name.islower() else f"{name}_{len(self._lines)}"
        self._lines.append(f"{full}: {body}")
        return full


def _with(texts: Sequence[str]) -> str:
    """A pattern, between slashes, of all that holds one of the texts."""
    return f"/(?s:.*)({'|'.join(map(_escaped, texts))})(?s:.*)/"


def _led(text: str, parts: Sequence[Part]) -> Sequence[Part]:
    """The parts with a text before them, in one with the first where that is a text."""
    head = [{"text": text + parts[0]["text"]}] if parts and "text" in parts[0] else [{"text": text}, *parts[:1]]
    return [*head, *parts[1:]]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _escaped(text: str) -> str:
    """A pattern that matches a text and nothing else, as it stands between slashes."""
    return "".join("\\" + char if char in r"\.+*?()|[]{}^$#&-~/" else char for char in text)


def _slashed(pattern: str) -> str:
    """A pattern as it stands between slashes."""
    return pattern.replace("\\/", "/").replace("/", "\\/").replace("\n", "\\n")
