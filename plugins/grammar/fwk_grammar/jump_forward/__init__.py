"""Text that a grammar leaves no choice about is drafted, and verified in one step."""

from __future__ import annotations

import msgspec

from fwk import FeatureSpec, Limit, Options, hookimpl, option
from fwk.interfaces.feature import Wire


class JumpForwardOptions(Options):
    """Options of ``features.jump_forward``."""

    disable_jump_forward: bool = option(
        False,
        "Write text that a grammar leaves no choice about one token a step, as any other; outputs are the same.",
        stability="beta",
    )


class Constrained(msgspec.Struct, frozen=True):
    """The sequence has a grammar."""


@hookimpl
def features() -> list[FeatureSpec]:
    return [
        FeatureSpec(
            name="jump_forward",
            engine="fwk_grammar.jump_forward.parts:ConstrainedSequences",
            worker="fwk_grammar.jump_forward.parts:ForcedTokens",
            wire=Wire(sequence=Constrained),
            options=JumpForwardOptions,
            disabled_by=("disable_jump_forward",),
            changes_kv=False,
            limits=(Limit("pp_size", (1,), "what it drafts is embedded where no grammar is"),),
            runners=("generate", "pool"),
            summary="Text that a grammar leaves no choice about is verified in one step.",
        )
    ]
