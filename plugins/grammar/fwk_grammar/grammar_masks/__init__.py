"""Sequences are kept inside their grammars, which a backend compiles, where their tokens are chosen."""

from __future__ import annotations

from fwk import FeatureSpec, Options, hookimpl, option


class GrammarMasksOptions(Options):
    """Options of ``features.grammar_masks``."""

    grammar_in_reasoning: bool = option(
        False,
        "Hold grammars from a chat's first token on, so that constrained answers have no thinking. By default a "
        "grammar binds the answer behind the thinking that --reasoning-parser finds.",
        aliases=["enable-in-reasoning"],
    )
    grammar_timeout: float = option(
        2.0,
        "Seconds of CPU time that compiling the grammar of one request may take; one that takes more is refused (400).",
        gt=0,
        le=60,
    )


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="grammar_masks",
            server="fwk_grammar.grammar_masks.server:GrammarRequests",
            engine="fwk_grammar.grammar_masks.engine:GrammarGate",
            worker="fwk_grammar.grammar_masks.worker:GrammarPart",
            job="fwk_grammar.grammar_masks.jobs:GrammarJobs",
            options=GrammarMasksOptions,
            server_options=("grammar_in_reasoning", "grammar_timeout"),
            changes_kv=False,
            summary="masks tokens that a request's grammar forbids, which a grammar backend compiles",
        )
    ]
