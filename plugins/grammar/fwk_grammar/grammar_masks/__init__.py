"""Sequences are kept inside their grammars, which a backend compiles, where their tokens are chosen."""

from __future__ import annotations

from fwk import FeatureSpec, hookimpl


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="grammar_masks",
            worker="fwk_grammar.grammar_masks.worker:GrammarPart",
            changes_kv=False,
            summary="masks tokens that a request's grammar forbids, which a grammar backend compiles",
        )
    ]
