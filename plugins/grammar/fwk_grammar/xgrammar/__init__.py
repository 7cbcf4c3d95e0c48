"""Constrained output by XGrammar (Dong et al. 2024).

``ebnf`` takes XGrammar's notation, which is llama.cpp's GBNF with a rule ``root``. Regular expressions match the whole
output. A JSON schema that uses a keyword XGrammar does not enforce is refused, not read without it.
"""

from fwk import GrammarBackendSpec, Needs, Options, hookimpl, option
from fwk_grammar._common.options import no_whitespace


class XGrammarOptions(Options):
    """Options of ``grammar.xgrammar``."""

    constrained_json_disable_any_whitespace: bool = no_whitespace()
    xgrammar_cache_bytes: int = option(
        256 << 20, "Memory for compiled grammars and parts of them, in bytes.", ge=1 << 20, le=1 << 36
    )


@hookimpl
def grammar_backends() -> list[GrammarBackendSpec]:
    return [
        GrammarBackendSpec(
            name="xgrammar",
            load="fwk_grammar.xgrammar.backend:XGrammarBackend",
            needs=Needs(packages=("xgrammar>=0.2,<0.3",)),
            kinds=frozenset(
                {
                    "json_object",
                    "json_schema",
                    "regex",
                    "choice",
                    "ebnf",
                    "tagged",
                    "structural_tag",
                    "calls",
                    "delayed",
                }
            ),
            rank=5,
            options=XGrammarOptions,
            summary="JSON schema, regex, choice and GBNF grammars by XGrammar",
        )
    ]
