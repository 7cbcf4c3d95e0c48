"""What counts as personal data, found in time linear in the text: every repetition is bounded, and no two overlap."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

MAX_WORD, MAX_NUMBER = 320, 64
"""Characters of the longest match: of an address (RFC 5321: 64, ``@``, 255), and of numbers with signs between them."""

_WORD = r"A-Za-z0-9._%+-"
_PATTERNS = {
    "email": rf"(?<![{_WORD}])[{_WORD}]{{1,64}}+@[A-Za-z0-9-]{{1,63}}(?:\.[A-Za-z0-9-]{{1,63}}){{1,3}}",
    "iban": r"(?<![A-Za-z0-9])[A-Z]{2}[0-9]{2}(?: ?[A-Z0-9]){11,30}(?![A-Za-z0-9])",
    "card": r"(?<![0-9.-])[0-9](?:[ -]?[0-9]){12,18}(?![0-9])",
    "ip": r"(?<![0-9.])(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9.]*[0-9])",
    "phone": (
        r"(?<![0-9A-Za-z+.-])(?:\+[0-9](?:[ .()-]{0,2}[0-9]){7,14}|\(?[0-9]{3}\)?[ .-][0-9]{3}[ .-][0-9]{4})(?![0-9])"
    ),
}

_WORD_END = re.compile(rf"[@{_WORD}]+\Z")
_NUMBER_END = re.compile(r"[A-Z0-9 .()+-]+\Z")
_NUMBER_START = re.compile(r"[+(]?[0-9]|[+(]\Z|[A-Z]{2}[0-9]{2}")


def _luhn(found: str) -> bool:
    """The checksum of card numbers (ISO/IEC 7812-1)."""
    digits = [int(char) for char in reversed(found) if char.isdigit()]
    return sum(d if i % 2 == 0 else sum(divmod(2 * d, 10)) for i, d in enumerate(digits)) % 10 == 0


def _mod_97(found: str) -> bool:
    """The checksum of account numbers (ISO 13616)."""
    text = found.replace(" ", "")
    return int("".join(str(int(char, 36)) for char in text[4:] + text[:4])) % 97 == 1


def _octets(found: str) -> bool:
    return all(int(part) < 256 for part in found.split("."))


_CHECKS: dict[str, Callable[[str], bool]] = {"card": _luhn, "iban": _mod_97, "ip": _octets}


class Redactor:
    """Replaces the kinds it is made for."""

    def __init__(self, kinds: Collection[str]) -> None:
        self._kinds = [(kind, re.compile(pattern)) for kind, pattern in _PATTERNS.items() if kind in kinds]

    def redact(self, text: str) -> str:
        """The text with each match replaced by ``[kind]``."""
        for kind, pattern in self._kinds:
            check = _CHECKS.get(kind)
            text = pattern.sub(lambda m, k=kind, c=check: f"[{k}]" if c is None or c(m[0]) else m[0], text)
        return text

    def open_end(self, text: str) -> int:
        """From where on a text must be kept back, as what follows may make it a match."""
        word = _WORD_END.search(text, max(len(text) - MAX_WORD, 0))
        place = len(text) if word is None else word.start()
        numbers = _NUMBER_END.search(text, max(len(text) - MAX_NUMBER, 0))
        first = None if numbers is None else _NUMBER_START.search(text, numbers.start())
        return place if first is None else min(place, first.start())
