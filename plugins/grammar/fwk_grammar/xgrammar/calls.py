"""Tool calls in a model's own notation, as XGrammar's structural tag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fwk_grammar._common.sources import SpecialTokens

Format = dict[str, Any]


class CallFormats:
    """Writes the source of a ``calls`` request; ``schema_of`` has a schema as it is enforced."""

    def __init__(self, special: SpecialTokens, schema_of: Callable[[Any], Any]) -> None:
        self._special = special
        self._schema_of = schema_of

    def of(self, source: Mapping[str, Any]) -> Format:
        call = _either([self._sequence(parts) for parts in source["calls"]])
        more = [{"type": "star", "content": _row([*self._text(source["separator"]), call])}]
        end = self._text(self._special.up_to_end(source["end"]))
        whole = _row([*self._text(source["begin"]), call, *(more if source["is_many"] else []), *end])
        if source.get("answer") is not None:
            whole = _either([whole, self._json(source["answer"])])
        return {"type": "structural_tag", "format": whole}

    def _sequence(self, parts: Sequence[Mapping[str, Any]]) -> Format:
        return _row([piece for part in parts for piece in self._part(part)])

    def _part(self, part: Mapping[str, Any]) -> list[Format]:
        if "text" in part:
            return self._text(part["text"])
        if "regex" in part:
            return [{"type": "regex", "pattern": part["regex"]}]
        if "json" in part:
            return [self._json(part["json"])]
        if "or" in part:
            return [_either([self._sequence(parts) for parts in part["or"]])]
        if "repeat" in part:
            return [{"type": "star", "content": self._sequence(part["repeat"])}]
        return self._arguments(part["arguments"], part["between"])

    def _arguments(self, arguments: Sequence[Mapping[str, Any]], between: str) -> list[Format]:
        """All in order; the first stands without what is between them."""
        formats = [(self._sequence(each["parts"]), each["is_required"]) for each in arguments]
        if not between:
            return [form if is_required else _optional(form) for form, is_required in formats]
        separator = self._text(between)
        tails: list[Format] = []
        begun: Format | None = None  # the rest where no argument has come
        for form, is_required in reversed(formats):
            first = _row([form, *tails])
            begun = first if is_required else _optional(first) if begun is None else _either([first, begun])
            further = _row([*separator, form])
            tails = [further if is_required else _optional(further), *tails]
        return [begun] if begun is not None else []

    def _text(self, text: str) -> list[Format]:
        return [
            {"type": "token", "token": piece} if isinstance(piece, int) else {"type": "const_string", "value": piece}
            for piece in self._special.split(text)
        ]

    def _json(self, schema: Any) -> Format:
        return {"type": "json_schema", "json_schema": self._schema_of(schema)}


def _row(formats: list[Format]) -> Format:
    return {"type": "sequence", "elements": formats} if formats else {"type": "const_string", "value": ""}


def _either(formats: list[Format]) -> Format:
    return formats[0] if len(formats) == 1 else {"type": "or", "elements": formats}


def _optional(form: Format) -> Format:
    return {"type": "optional", "content": form}
