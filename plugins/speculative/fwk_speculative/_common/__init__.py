"""What speculative decoders share: the options that bound their drafts, and how deep to draft for each sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fwk import SpeculativeDecoderSpec
from fwk.config import Options, option

if TYPE_CHECKING:
    import numpy as np

    from fwk.interfaces.speculative import Acceptance, Verified

USUAL_STEPS = 5
PATIENCE, LONGEST_REST = 3, 16


class DraftOptions(Options):
    """How much is drafted."""

    speculative_num_draft_tokens: int | None = option(
        None,
        "Most tokens drafted for one sequence in a step; by default what --speculative-num-steps says, or "
        f"{USUAL_STEPS}.",
        aliases=["gen-num-per-cycle"],
        ge=1,
        le=64,
        stability="beta",
    )
    speculative_num_steps: int | None = option(
        None,
        "Most drafted tokens that follow one another; a tree may hold more of them side by side. By default what "
        f"--speculative-num-draft-tokens says, or {USUAL_STEPS} in a tree.",
        aliases=["mtp-step"],
        ge=1,
        le=64,
        stability="beta",
    )
    speculative_adaptive: bool = option(
        True,
        "Draft less for sequences whose drafts were rejected, for a while nothing, and more again once they are kept.",
        stability="beta",
    )

    speculative_accept_threshold_single: float = option(
        1.0,
        "Keep any sampled draft that the model gives at least this probability; below 1 this changes the distribution.",
        gt=0,
        le=1,
        stability="experimental",
    )
    speculative_accept_threshold_acc: float = option(
        1.0,
        "Keep a sampled draft with its probability divided by this; below 1 this changes the distribution.",
        gt=0,
        le=1,
        stability="experimental",
    )

    def acceptance(self) -> Acceptance:
        """What keeps a draft."""
        from fwk.interfaces.speculative import Acceptance  # noqa: PLC0415 - declarations alongside are light

        return Acceptance(self.speculative_accept_threshold_single, self.speculative_accept_threshold_acc)

    def chain_length(self) -> int:
        """Most tokens of a chain."""
        given = [n for n in (self.speculative_num_draft_tokens, self.speculative_num_steps) if n is not None]
        return min(given, default=USUAL_STEPS)


class DraftModelOptions(DraftOptions):
    """Of decoders that read a checkpoint of their own."""

    speculative_draft_model_path: str | None = option(
        None,
        "Model or head that drafts: a folder, a .gguf file, a hub id, or a name a model source knows.",
        aliases=["speculative-draft-model"],
        stability="beta",
    )
    speculative_draft_model_revision: str | None = option(
        None, "Branch, tag or commit of a draft model or head of the hub.", stability="beta"
    )

    def draft_model(self) -> str | None:
        """Its name as ``SpeculativeContext`` takes it."""
        path, revision = self.speculative_draft_model_path, self.speculative_draft_model_revision
        return f"{path}@{revision}" if path and revision else path


class TreeOptions(DraftOptions):
    """Of decoders that draft trees if they are asked to."""

    speculative_eagle_topk: int = option(
        1, "Drafts that continue from each step of a head; more than 1 drafts trees.", ge=1, le=16, stability="beta"
    )

    def tree_shape(self) -> tuple[int, int, int]:
        """Branches, levels and tokens of a tree; with one branch it is a chain."""
        width = self.speculative_eagle_topk
        if width == 1:
            return 1, self.chain_length(), self.chain_length()
        levels = self.speculative_num_steps or min(USUAL_STEPS, self.speculative_num_draft_tokens or USUAL_STEPS)
        return width, levels, self.speculative_num_draft_tokens or min(64, 2 * width + 2 * levels)


class TreeHeadSpec(SpeculativeDecoderSpec):
    """Of a head: needs tree masks only when it is to draft trees."""

    def required_features(self, options: Any) -> frozenset[str]:
        is_tree = options is not None and options.speculative_eagle_topk > 1
        return frozenset({"tree_mask"}) if is_tree else frozenset()


class DraftDepth:
    """How many tokens are worth drafting for each slot.

    One more than were accepted the last time; twice as many after everything was, up to ``most``. None for a while
    once nothing was accepted ``PATIENCE`` times in a row: for 2 steps, and for twice as many each time one more try
    fails, up to ``LONGEST_REST``.
    """

    def __init__(self, num_slots: int, most: int, is_adaptive: bool) -> None:
        import numpy as np  # noqa: PLC0415 - the declarations alongside this class are light

        self.most = most
        self._is_adaptive = is_adaptive
        self._depths = np.full(num_slots, most, np.int64)
        self._misses = np.zeros(num_slots, np.int64)  # steps in a row
        self._rests = np.zeros(num_slots, np.int64)  # steps without drafts that are left

    def observe(self, verified: Verified) -> None:
        """Learn from a step's drafts; sequences that had none keep their depth."""
        import numpy as np  # noqa: PLC0415 - the declarations alongside this class are light

        if not self._is_adaptive:
            return
        tried = verified.num_drafts > 0
        slots, drafted, kept = verified.slots[tried], verified.num_drafts[tried], verified.num_accepted[tried]
        deeper = np.where(kept == drafted, 2 * self._depths[slots], kept + 1)
        self._depths[slots] = np.minimum(deeper, self.most)
        misses = self._misses[slots] = np.where(kept > 0, 0, self._misses[slots] + 1)
        rests = misses >= PATIENCE
        doublings = np.minimum(misses[rests] - PATIENCE, LONGEST_REST)
        self._rests[slots[rests]] = np.minimum(2 << doublings, LONGEST_REST)

    def reset(self, slots: list[int]) -> None:
        """New sequences begin with everything."""
        self._depths[slots] = self.most
        self._misses[slots] = self._rests[slots] = 0

    def of(self, slots: np.ndarray) -> np.ndarray:
        """Tokens worth drafting in the step that is begun: [num_seqs] int64."""
        is_resting = self._rests[slots] > 0
        self._rests[slots] -= is_resting
        depths = self._depths[slots]
        depths[is_resting] = 0
        return depths
