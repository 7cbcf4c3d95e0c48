"""How byte-level BPE files cut text, against the rules of llama.cpp and the makers, run by another library."""

from __future__ import annotations

from typing import Any

import pytest
import regex

from fwk_loaders.gguf.letters import LETTERS_WITH_CASE
from fwk_loaders.gguf.tokenizer import PRE_TOKENIZERS

TEXTS = [
    "Hello world! HelloWorld camelCaseHere, don't I'LL we've",
    "  two  spaces\n\nlines\r\n\ttabs  \n ",
    "1234567 3.14 12,000 a1b22c333",
    "日本語テキスト、ひらがな カタカナ。中文字符 한국어",
    "path/to/file.py -> (x != y) && `code` /* note */\n//done",
    "हिन्दी में लिखा हुआ। वाक्य",
    "Ünïcödé ÀÉÎ straße СЛОВО слово e\u0301",
]
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
UPPER, LOWER = (rf"[[{kinds}\p{{Lm}}\p{{Lo}}\p{{M}}]--\p{{Han}}]" for kinds in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
KIMI = (
    rf"(?V1)\p{{Han}}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{{N}}{{1,3}}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
RULES: dict[str, tuple[str, ...]] = {
    "glm4": (CL100K,),
    "gpt-4o": (O200K,),
    "tekken": (TEKKEN,),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{LETTERS_WITH_CASE}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        r"\s+$",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        r"\p{N}",
    ),
    "qwen35": (QWEN35,),
    "kimi-k2": (KIMI,),
    "bloom": ("".join((" ?[^(", r"\s", "|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+")),),
    "falcon": (
        r"[\p{P}\$\+<=>\^~\|`]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"[0-9]{3}",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"),
}


def cut(text: str, rules: tuple[str, ...]) -> list[str]:
    """Each rule cuts what the ones before it left: matches, and what stands between them, are pieces."""
    pieces = [text]
    for rule in rules:
        found: list[str] = []
        for piece in pieces:
            end = 0
            for match in regex.finditer(rule, piece):
                found += [piece[end : match.start()], match.group()]
                end = match.end()
            found.append(piece[end:])
        pieces = [piece for piece in found if piece]
    return pieces


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", RULES)
def test_text_is_cut_by_the_familys_rule(name: str, text: str) -> None:
    found: Any = PRE_TOKENIZERS[name].build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == cut(text, RULES[name])
