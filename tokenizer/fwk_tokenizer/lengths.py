"""How few tokens a text may have, told without tokenising it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

State = Mapping[str, Any]

COMPOSED = 4
"""The most characters that canonical composition (NFC, NFKC) may join to one: no canonical decomposition is longer."""

_NORMALIZERS = {"NFC": COMPOSED, "NFKC": COMPOSED, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
_SPLITTERS = {"ByteLevel", "Split", "Metaspace", "Digits", "Punctuation", "UnicodeScripts"}


def max_characters(state: State, alphabet: Mapping[str, int]) -> int | None:
    """The most characters of a text that one token may stand for; None when there is no such number, or nobody knows.

    There is none where text gets lost on the way: characters that a normaliser strips, spaces that separate words, and
    whatever becomes one unknown token. ``state`` is what is in a tokenizer.json, ``alphabet`` that of byte-level BPE.
    """
    joined = _joined(state.get("normalizer"))
    added = cast(list[State], state.get("added_tokens") or [])
    eats_spaces = any(token.get("lstrip") or token.get("rstrip") for token in added)
    splitters = _parts(state.get("pre_tokenizer"), "pretokenizers")
    if joined is None or eats_spaces or not all(_keeps_all(splitter) for splitter in splitters):
        return None
    model = cast(State, state.get("model") or {})
    if model.get("type") != "BPE" or not _knows_all(state, model, alphabet):
        return None
    pieces = [*cast(Mapping[str, int], model["vocab"]), *(str(token["content"]) for token in added)]
    return joined * max(map(len, pieces))


def _parts(part: State | None, name: str) -> list[State]:
    """The steps of a normaliser or pre-tokeniser."""
    if part is None:
        return []
    if part.get("type") == "Sequence":
        return [step for inner in part.get(name, []) for step in _parts(inner, name)]
    return [part]


def _joined(normalizer: State | None) -> int | None:
    """The most characters that a normaliser makes one of."""
    most = 1
    for step in _parts(normalizer, "normalizers"):
        factor = _NORMALIZERS.get(str(step.get("type")))
        if factor is None and step.get("type") == "Replace":
            old, new = step.get("pattern", {}).get("String"), step.get("content")
            factor = 1 if old and new and len(new) >= len(old) else None
        if factor is None:
            return None
        most *= factor
    return most


def _keeps_all(splitter: State) -> bool:
    return splitter.get("type") in _SPLITTERS and splitter.get("behavior") != "Removed"


def _knows_all(state: State, model: State, alphabet: Mapping[str, int]) -> bool:
    """Whether any text is made of the model's own tokens, down to its bytes."""
    vocabulary = cast(Mapping[str, int], model["vocab"])
    steps = [*_parts(state.get("normalizer"), "normalizers"), *_parts(state.get("pre_tokenizer"), "pretokenizers")]
    if any(step.get("type") == "ByteLevel" for step in steps):
        return all(char in vocabulary for char in alphabet)
    return bool(model.get("byte_fallback")) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
