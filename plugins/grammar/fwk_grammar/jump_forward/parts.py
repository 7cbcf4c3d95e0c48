"""The parts in the engine and in each worker."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from fwk.interfaces.feature import EnginePart, FeatureSequence, WorkerPart
from fwk.types import Request
from fwk_grammar.jump_forward import Constrained

log = logging.getLogger(__name__)


class ConstrainedSequences(EnginePart):
    """Has a part in the sequences that have a grammar."""

    def concerns(self, request: Request) -> bool:
        return request.sampling.grammar is not None

    def new(self, sequence: FeatureSequence) -> Constrained:
        return Constrained()


class ForcedTokens(WorkerPart):
    """Drafts a grammar's forced tokens: a text may be written in other tokens, and the model picks its own."""

    def next_tokens(self, slot: int) -> Sequence[int]:
        grammar = self.context.grammar(slot)
        if grammar is None:
            return ()
        try:
            return grammar.forced_tokens()
        except Exception as error:  # a matcher that met a limit: the next mask meets it again, and blames whom it must
            log.debug("no forced tokens: %s", error)
            return ()
