"""One of several given texts."""

from __future__ import annotations

from fwk import GrammarBackendSpec, hookimpl


@hookimpl
def grammar_backends() -> list[GrammarBackendSpec]:
    return [
        GrammarBackendSpec(
            name="mine",
            load="fwk_mine.plugin:MineGrammars",
            kinds=frozenset({"choice"}),
            summary="one of several given texts",
        )
    ]
