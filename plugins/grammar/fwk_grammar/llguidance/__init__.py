"""Constrained output by llguidance.

Regular expressions are those of Rust's ``regex`` without look-around; they match the whole output. ``ebnf`` takes two
notations: llguidance's Lark (``start: ...``) and llama.cpp's GBNF (``root ::= ...``), told apart by ``::=``. A JSON
schema that uses a keyword llguidance does not enforce is refused, not read without it.
"""

from fwk import GrammarBackendSpec, Needs, Options, hookimpl, option
from fwk_grammar._common.options import no_whitespace, whitespace_pattern


class LLGuidanceOptions(Options):
    """Options of ``grammar.llguidance``."""

    constrained_json_whitespace_pattern: str = whitespace_pattern()
    constrained_json_disable_any_whitespace: bool = no_whitespace()
    constrained_json_open_objects: bool = option(
        False,
        "Let the objects of a JSON schema that lists properties have others as well unless the schema forbids it, as "
        "the standard has it. By default such objects are closed: a small model otherwise invents keys without end.",
    )
    constrained_json_end_loops: bool = option(
        True,
        "End a string of constrained JSON that repeats itself for 64 tokens, where the schema lets it end: a small "
        "model otherwise continues to the length limit, and its JSON cannot be read.",
    )


@hookimpl
def grammar_backends() -> list[GrammarBackendSpec]:
    return [
        GrammarBackendSpec(
            name="llguidance",
            load="fwk_grammar.llguidance.backend:LLGuidanceBackend",
            needs=Needs(packages=("llguidance>=1.6,<2",)),
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
                    "free_calls",
                    "delayed",
                }
            ),
            rank=10,
            options=LLGuidanceOptions,
            summary="JSON schema, regex, choice, Lark and GBNF grammars by llguidance",
        )
    ]
