"""What bounds a step, what a step is, and what is counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from fwk.engine.sequence import Sequence
from fwk.interfaces.feature import StepPace
from fwk.interfaces.model import EncoderInput
from fwk.types import Batch, NewSequence, ScheduledSequence, StepResult


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and a request.

    ``generates``: of a model that does not, requests have ``max_tokens`` 0, and only they do: nothing follows a prompt.
    ``whole_prompts``: it needs each prompt in one step, all of it, and a prefix cache that never finds anything.
    ``max_start_tokens``: tokens of prompts in a step from which it starts no further prompt, ``ONLY_ONE`` times
    as many where that one ends with its first token; None: as many as fit.
    ``max_prompts``: prompts in a step, begun ones included, from which it starts no further one; None: as many as fit.
    ``max_chunk_tokens`` of None: a prompt is cut only if it is longer than a step.
    ``max_decode_gap``: a step with prompts takes at most so many times one in which all that run and wait only decode,
    as the ``pace`` made for it expects; None, or without a pace: no bound.
    ``conservativeness``: blocks kept free for each running sequence to grow when another one starts.
    ``is_mixed``: prompts and decoding may share a step; if not, they take turns.
    ``num_state_places``: states of recurrent layers that workers keep for the prefix cache, one every
    ``state_interval`` generated tokens; None: the model has no such layers.
    ``num_window_groups``: block tables in addition to the first, for layers that see ``window`` tokens only.
    ``encoder``: one reads the prompts. ``max_model_len`` then has room for what ``encoder_prompt.placed`` adds.
    ``runs_ahead``: steps may be planned while drafts of their sequences are being verified, if the worker says so.
    ``num_stages``: in which a step is computed, one after another. With several, a sequence has a part in one step at a
    time but for chunks of its prompt, and those that decode are divided among as many steps, each of at most
    ``max_micro_batch`` of them.
    ``admission_interval``: steps between two looks at the waiting queue while sequences run.
    """

    max_model_len: int
    max_step_tokens: int
    max_chunk_tokens: int | None
    max_running: int
    block_size: int
    eos_token_ids: frozenset[int]
    seed: int = 0
    num_lookahead: int = 0  # tokens past the newest one that the workers may draft, and need blocks for
    check_blocks: bool = False
    generates: bool = True
    whole_prompts: bool = False
    conservativeness: float = 1.0
    is_mixed: bool = True
    admission_interval: int = 1
    max_start_tokens: int | None = None
    max_prompts: int | None = None
    max_decode_gap: float | None = None
    pace: Callable[[float], StepPace] | None = None
    num_window_groups: int = 0
    window: int = 0
    num_state_places: int | None = None
    state_interval: int = 256
    encoder: EncoderInput | None = None
    runs_ahead: bool = False
    num_stages: int = 1
    max_micro_batch: int | None = None

    def max_decoding(self, num_running: int) -> int:
        """Sequences that decode in one step."""
        share = -(-num_running // self.num_stages)
        return share if self.max_micro_batch is None else min(share, self.max_micro_batch)

    @property
    def max_request_len(self) -> int:
        """Tokens of a request that fit into the model and, where it is computed in one, into a step."""
        return min(self.max_model_len, self.max_step_tokens) if self.whole_prompts else self.max_model_len


@dataclass(slots=True)
class PlannedStep:
    """A batch, and the sequences behind it in the same order, each with the number of its life between pre-emptions.

    ``counts``: sequences that decode, and tokens of prompts; None: how long it takes tells nothing of them.
    """

    batch: Batch
    sequences: list[tuple[Sequence, int]]
    counts: tuple[int, int] | None = (0, 0)


@dataclass(slots=True)
class Counters:
    """Grow for the engine's life; reported as ``EngineStats``."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    steps: int = 0
    finished: int = 0
    aborted: int = 0
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    restored_prompt_tokens: int = 0
    verifications: int = 0
    accepted_by_position: list[int] = field(default_factory=list[int])
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def timed(self, result: StepResult, *, has_drafts: bool) -> None:
        """A step has ended."""
        self.draft_seconds += result.draft_seconds
        if has_drafts:
            self.verify_seconds += result.total_seconds - result.draft_seconds

    def verified(self, num_drafts: int, num_accepted: int) -> None:
        """A sequence's drafts were verified."""
        self.draft_tokens += num_drafts
        self.accepted_draft_tokens += num_accepted
        self.verifications += 1
        by_position = self.accepted_by_position
        by_position += [0] * (num_accepted - len(by_position))
        for position in range(num_accepted):
            by_position[position] += 1


@dataclass(slots=True)
class StepPlan:
    """A step while it is being put together. ``is_short``: a sequence did not get the blocks to continue.

    ``counts``: as of ``PlannedStep``.
    """

    budget: int
    is_short: bool = False
    counts: tuple[int, int] = (0, 0)
    new: dict[Sequence, NewSequence] = field(default_factory=dict[Sequence, NewSequence])
    scheduled: dict[Sequence, ScheduledSequence] = field(default_factory=dict[Sequence, ScheduledSequence])
