"""How much a tokenizer.json may make of a text: read off its parts, before the library builds anything of them.

Tokenizers come with models, which need not be trusted: 24 replacements of ``a`` by ``aa`` take 2 kB of a file and make
16 million characters of one. What is bounded here is bounded for every text; patterns that are slow are found by a
trial (``fwk_tokenizer.check``).
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import msgspec

from fwk_errors import ModelLoadError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MAX_STEPS = 64
"""Normalisers, splitters, post-processors and decoders together; real tokenizers have about ten."""

MAX_GROWTH = 4096
"""Times as many characters as a text had may leave the normaliser; the most careful of real ones (NFKD, lower case and
a table of characters) stay below 2,000 by this count, and below 20 for any text there is."""

MAX_STEP_GROWTH = 18
"""Times as many characters one step may make of a text."""

MAX_SPLITTER_GROWTH = MAX_DECODER_GROWTH = 16
MAX_COPIES = 4
"""Of a text in the post-processor's template."""

MAX_ADDED_IDS = 4096
"""Special tokens that the post-processor puts around a text."""

MAX_ADDED_CHARACTERS = 2**26
"""Of all added tokens together once they are normalised, which the library does as it reads them."""

_GROWTH = {
    "ByteLevel": 4.0,  # a character has up to four bytes, each of which is one
    "Metaspace": 2.0,
    "Lowercase": 2.0,
    "NFC": 3.0,
    "NFD": 4.0,
    "NFKC": 18.0,  # U+FDFA
    "NFKD": 18.0,
    "BertNormalizer": 18.0,  # spaces around CJK, NFD without marks, lower case
}
"""Characters that a step may make of one, where it has no content of its own."""


PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


class _AddedToken(msgspec.Struct):
    content: str
    normalized: bool = True


class _Piece(msgspec.Struct):
    id: str = ""


class _Special(msgspec.Struct):
    ids: list[int] = []


class _Template(msgspec.Struct):
    """``TemplateProcessing``, as the library writes it."""

    single: list[dict[str, _Piece]]
    pair: list[dict[str, _Piece]]
    special_tokens: dict[str, _Special]


class _File(msgspec.Struct):
    """What is read of a tokenizer.json; the rest is passed over."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None
    added_tokens: list[_AddedToken] = []


def load_tokenizer(data: bytes, path: object) -> Tokenizer:
    """The ``Tokenizer`` of a tokenizer.json, once ``check_tokenizer_file`` lets it pass. Raises ``ModelLoadError``."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - as below

    check_tokenizer_file(data, path)
    try:
        return Tokenizer.from_buffer(data)
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelLoadError(f"{path}: not a tokeniser ({error}); fetch the file again") from None


def check_tokenizer_file(data: bytes, path: object) -> None:
    """Check the content of a tokenizer.json before a ``Tokenizer`` is made of it. ``path`` names it in errors.

    Raises ``ModelLoadError`` for one that is damaged, or may make far more of a text than it is.
    """
    from tokenizers import Tokenizer  # noqa: PLC0415 - only who tokenises needs it

    try:
        file = msgspec.json.decode(data, type=_File)
        empty: dict[str, Any] = {
            "version": "1.0",
            "added_tokens": [],
            "model": {"type": "BPE", "vocab": {}, "merges": []},
        }
        given = empty | {name: getattr(file, name) for name in PARTS}
        parts = parts_of(Tokenizer.from_str(msgspec.json.encode(given).decode()))
    except BaseException as error:  # the library raises bare Exception, and panics
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ModelLoadError(f"{path}: not a tokeniser ({error}); fetch the file again") from None
    check_tokenizer_parts(parts, path)
    length = sum(len(token.content) for token in file.added_tokens if token.normalized)
    if length * growth_of_all(parts["normalizer"]) > MAX_ADDED_CHARACTERS:
        raise _refused(path, f"has added tokens of {length} characters, which its normaliser makes far longer")


def parts_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer's parts as JSON, in the one spelling that the library writes; it reads several."""
    found = {name: getattr(tokenizer, name) for name in PARTS}
    return {name: None if part is None else json.loads(part.__getstate__()) for name, part in found.items()}


def check_tokenizer_parts(parts: Mapping[str, Any], path: object) -> None:
    """The same for parts of a tokenizer as JSON: ``normalizer``, ``pre_tokenizer``, ``post_processor``, ``decoder``."""
    num_steps = sum(1 for part in parts.values() for _ in steps(part))
    if num_steps > MAX_STEPS:
        raise _refused(
            path, f"has {num_steps} normalisers, splitters, post-processors and decoders, and {MAX_STEPS} is the most"
        )
    each = max((growth_of(step) for step in steps(parts.get("normalizer"))), default=1.0)
    if each > MAX_STEP_GROWTH:
        raise _refused(path, f"has a normaliser that can make {each:.3g} characters of one: {MAX_STEP_GROWTH} at most")
    limits = {"normalizer": MAX_GROWTH, "pre_tokenizer": MAX_SPLITTER_GROWTH, "decoder": MAX_DECODER_GROWTH}
    for name, most in limits.items():
        growth = growth_of_all(parts.get(name))
        if growth > most:
            raise _refused(path, f"has a {name} that can make a text {growth:.3g} times as long; {most} is the most")
    copies, ids = _template(parts.get("post_processor"))
    if copies > MAX_COPIES or ids > MAX_ADDED_IDS:
        raise _refused(
            path,
            f"has a post_processor that repeats a text {copies} times with {ids} tokens around it; {MAX_COPIES} times "
            f"and {MAX_ADDED_IDS} tokens are the most",
        )


def growth_of_all(part: Any) -> float:
    """How many characters all steps of a normaliser, splitter or decoder may make of one."""
    growth = 1.0
    for step in steps(part):
        growth *= growth_of(step)
    return growth


def steps(part: Any) -> Iterator[dict[str, Any]]:
    """Every object with a type in a part, in the order in which they are used, however deep."""
    found = [part]
    while found:
        one = found.pop()
        if isinstance(one, dict):
            step = cast("dict[str, Any]", one)
            if "type" in step:
                yield step
            found.extend(reversed(step.values()))
        elif isinstance(one, list):
            found.extend(reversed(cast("list[Any]", one)))


def growth_of(step: Mapping[str, Any]) -> float:
    """How many characters one step may make of one."""
    kind, content = step.get("type"), step.get("content")
    if kind == "Replace" and isinstance(content, str):
        pattern: Any = step.get("pattern")
        fixed: object = cast("dict[str, Any]", pattern).get("String") if isinstance(pattern, dict) else None
        if isinstance(fixed, str) and fixed:
            return max(1.0, len(content) / len(fixed))
        return 1.0 + len(content)  # a pattern may match between any two characters
    if kind == "Prepend":
        return 1.0 + len(str(step.get("prepend", "")))
    if kind == "Precompiled":
        return float(_longest_replacement(step.get("precompiled_charsmap")))
    return _GROWTH.get(str(kind), 1.0)


def _longest_replacement(charsmap: object) -> int:
    """Of sentencepiece's table: a trie, after its size, then texts with a zero after each."""
    try:
        table = base64.b64decode(str(charsmap or ""))
        (size,) = struct.unpack_from("<I", table)
    except (binascii.Error, struct.error):
        return 1  # the library refuses it
    return max(1, *(len(text.decode(errors="replace")) for text in table[4 + size :].split(b"\0")))


def _template(part: Any) -> tuple[int, int]:
    """How often a text is repeated in post-processors, and how many special tokens they add to it."""
    copies, ids = 1, 0
    for step in steps(part):
        if step.get("type") != "TemplateProcessing":
            continue
        template = msgspec.convert(step, _Template)
        texts, tokens = [0], [0]
        for pieces in (template.single, template.pair):
            names = [piece["Sequence"].id for piece in pieces if "Sequence" in piece]
            texts += [names.count("A"), names.count("B")]
            marks = [piece["SpecialToken"].id for piece in pieces if "SpecialToken" in piece]
            tokens.append(
                sum(len(template.special_tokens[mark].ids) for mark in marks if mark in template.special_tokens)
            )
        copies, ids = copies * max(1, *texts), ids * max(1, *texts) + max(tokens)
    return copies, ids


def _refused(path: object, why: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: the tokenizer {why}; give another one with --tokenizer-path")
