"""The part in each worker."""

from __future__ import annotations

from collections.abc import Callable

from fwk.interfaces.feature import WorkerPart
from fwk.interfaces.grammar import Grammar, GrammarRequest
from fwk.interfaces.grammar_masks import GrammarStore
from fwk_grammar.grammar_masks.masks import CompiledGrammars


class GrammarPart(WorkerPart):
    """Masks where tokens are chosen: it has a part in no step besides."""

    def grammars(self, compile_grammar: Callable[[GrammarRequest], Grammar]) -> GrammarStore:
        return CompiledGrammars(compile_grammar)
