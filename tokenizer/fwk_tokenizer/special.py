"""Special tokens: what a tokenizer's configuration calls so, and those that clients write, which are ordinary text."""

from __future__ import annotations

import re
import secrets
from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import Any


class Marks:
    """Takes special tokens out of clients' text before a template runs, and knows them again in its outcome.

    A mark holds a random number, so that a client cannot write one.
    """

    def __init__(self, special_texts: Sequence[str]) -> None:
        longest_first = sorted(special_texts, key=len, reverse=True)
        self._special = re.compile("|".join(re.escape(text) for text in longest_first) or r"(?!)")
        self._nonce = secrets.token_hex(8)
        self._taken: list[str] = []

    def put(self, value: Any) -> Any:
        """``value`` with every special token in its strings replaced by a mark."""
        if isinstance(value, str):
            return self._special.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {self.put(key): self.put(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.put(item) for item in value]
        return value

    def _mark(self, match: re.Match[str]) -> str:
        self._taken.append(match.group())
        return f"\ue000{self._nonce}:{len(self._taken) - 1}\ue001"

    def split(self, text: str) -> list[tuple[str, bool]]:
        """The text in parts, and whether each is a special token's text that a client wrote."""
        if not self._taken:
            return [(text, False)]
        parts = re.split(f"\ue000{self._nonce}:([0-9]+)\ue001", text)
        found = [(part, False) if i % 2 == 0 else (self._taken[int(part)], True) for i, part in enumerate(parts)]
        return [(part, is_literal) for part, is_literal in found if part]


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and the like, and a model's own, as text; tokenizer_config.json has them as strings or objects."""
    found: dict[str, str] = {}
    names = [f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    standard = {name: config.get(name) for name in names}
    named = [config.get(key) for key in ("extra_special_tokens", "model_specific_special_tokens")]
    for name, value in ChainMap(standard, *(tokens for tokens in named if isinstance(tokens, dict))).items():
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found
