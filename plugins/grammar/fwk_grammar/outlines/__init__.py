"""Constrained output by outlines-core: a regular expression as a finite automaton over tokens (Willard, Louf 2023).

JSON schemas become regular expressions first, so recursive ones are refused, and so are those that use keywords
outlines-core does not enforce. An automaton is built for the whole
vocabulary when a grammar is compiled: slow to compile, then nothing but a table to look up.
"""

from fwk import GrammarBackendSpec, Needs, Options, hookimpl
from fwk_grammar._common.options import whitespace_pattern


class OutlinesOptions(Options):
    """Options of ``grammar.outlines``."""

    constrained_json_whitespace_pattern: str = whitespace_pattern()


@hookimpl
def grammar_backends() -> list[GrammarBackendSpec]:
    return [
        GrammarBackendSpec(
            name="outlines",
            load="fwk_grammar.outlines.backend:OutlinesBackend",
            needs=Needs(packages=("outlines-core>=0.2.11,<0.3",)),
            kinds=frozenset({"json_schema", "regex", "choice", "tagged", "delayed"}),
            rank=1,
            options=OutlinesOptions,
            summary="JSON schema, regex, choice and forced tool calls by outlines-core's automata",
        )
    ]
