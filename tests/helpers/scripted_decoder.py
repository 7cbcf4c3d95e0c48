"""A speculative decoder for tests: drafts what followed the last token when it was last seen, now and then nonsense."""

from __future__ import annotations

from fwk import SpeculativeDecoderSpec, hookimpl
from fwk.interfaces.speculative import Drafts, DraftView, SpeculativeContext, SpeculativeDecoder, Verified

NUM_DRAFTS = 4


class EchoDecoder(SpeculativeDecoder):
    """Counts what became of its drafts in a list the test can reach."""

    verified: list[tuple[int, int]] = []
    max_drafts = NUM_DRAFTS

    def __init__(self, context: SpeculativeContext) -> None:
        super().__init__(context)
        self.verified.clear()
        self._calls = 0

    def propose(self, view: DraftView) -> Drafts:
        self._calls += 1
        found: list[list[int]] = []
        for slot, length in zip(view.slots.tolist(), view.num_tokens.tolist(), strict=True):
            tokens = view.token_ids[slot, :length].tolist()
            last, before = tokens[-1], tokens[:-1]
            at = len(before) - before[::-1].index(last) if last in before else len(tokens)
            drafts = tokens[at : at + NUM_DRAFTS]
            if self._calls % 3 == 0:
                drafts = [(last + i) % 300 for i in range(NUM_DRAFTS)]
            found.append(drafts)
        return Drafts(found)

    def observe(self, verified: Verified) -> None:
        self.verified += zip(verified.num_drafts.tolist(), verified.num_accepted.tolist(), strict=True)


class EchoPlugin:
    """Declares it, as a package would."""

    @hookimpl
    def speculative_decoders(self) -> list[SpeculativeDecoderSpec]:
        return [SpeculativeDecoderSpec(name="echo", load="tests.helpers.scripted_decoder:EchoDecoder")]
