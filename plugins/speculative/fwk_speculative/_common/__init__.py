"""What speculative decoders share: the option that bounds their drafts, and how deep to draft for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fwk.config import Options, option

if TYPE_CHECKING:
    import numpy as np

    from fwk.interfaces.speculative import Verified


class DraftOptions(Options):
    """How much is drafted."""

    speculative_num_draft_tokens: int = option(
        5,
        "Most tokens drafted for one sequence in a step.",
        aliases=["speculative-num-steps", "gen-num-per-cycle"],
        ge=1,
        le=64,
        stability="beta",
    )
    speculative_adaptive: bool = option(
        True,
        "Draft less for sequences whose drafts were rejected, and more again once they are accepted.",
        stability="beta",
    )


class DraftDepth:
    """How many tokens are worth drafting for each slot.

    One more than were accepted the last time; twice as many after everything was, up to ``most``.
    """

    def __init__(self, num_slots: int, most: int, is_adaptive: bool) -> None:
        import numpy as np  # noqa: PLC0415 - the declarations alongside this class are light

        self.most = most
        self._is_adaptive = is_adaptive
        self._depths = np.full(num_slots, most, np.int64)

    def observe(self, verified: Verified) -> None:
        """Learn from a step's drafts; sequences that had none keep their depth."""
        if not self._is_adaptive:
            return
        for slot, drafted, kept in zip(
            verified.slots.tolist(), verified.num_drafts.tolist(), verified.num_accepted.tolist(), strict=True
        ):
            if drafted:
                depth = 2 * int(self._depths[slot]) if kept == drafted else kept + 1
                self._depths[slot] = min(depth, self.most)

    def reset(self, slots: list[int]) -> None:
        """New sequences begin with everything."""
        self._depths[slots] = self.most

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Tokens worth drafting: [num_seqs] int64."""
        return self._depths[slots]
