"""Grammars that bind the answer behind the thinking."""

from __future__ import annotations

import json

from fwk.interfaces.dialect import Frontend
from fwk.interfaces.parser import ThinkingMarks
from fwk.types import GrammarRequest


def behind_thinking(grammar: GrammarRequest, prompt_tail: str, frontend: Frontend) -> GrammarRequest | None:
    """The grammar, from the end of the thinking on.

    None where it holds from the first token on: the server does not tell thinking from the answer, or was asked for it
    (``--grammar-in-reasoning``), or its grammar backend cannot wait, or the prompt has ended the thinking.
    """
    if "delayed" not in frontend.grammar_kinds:
        return None
    parser = frontend.reasoning_parser(prompt_tail) if not frontend.grammar_in_reasoning else None
    marks = parser.thinking_marks() if parser is not None else None
    if marks is None or prompt_tail.rstrip().endswith(marks.closes):
        return None
    encode = frontend.text.encode
    close = marks.closes[0]
    follows = marks.end.removeprefix(close)  # white space is not needed
    closes = [close, *(other for other in marks.closes[1:] if not follows.strip() and _ends(other, marks, frontend))]
    source = {
        "kind": grammar.kind,
        "source": grammar.source,
        "opens": encode(marks.opens, False) if marks.opens else [],
        "closes": [encode(mark, False) for mark in closes],
        "follows": encode(follows, False) if follows.strip() else [],
    }
    return GrammarRequest("delayed", json.dumps(source))


def _ends(mark: str, marks: ThinkingMarks, frontend: Frontend) -> bool:
    """Whether a mark ends the thinking and is no part of the answer, as those of tool calls are."""
    parser = frontend.reasoning_parser()
    parsed = [parser.feed(f"{marks.opens}x{mark}y"), parser.finish()] if parser is not None else []
    return "".join(piece.content for piece in parsed) == "y"
