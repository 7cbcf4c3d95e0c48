"""What a step made of one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from fwk.engine.sequence import Sequence
from fwk.features import engine as features
from fwk.types import FinishReason, ScheduledSequence, SequenceResult, TokenEvent, TokenLogprobs


@dataclass(slots=True)
class SequenceUpdate:
    """New tokens of a sequence, and whether it ended."""

    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_accepted_drafts: int = 0
    logprobs: list[TokenLogprobs] | None = None
    is_complete: bool = False
    error: str | None = None
    is_refusal: bool = False

    def event(self, sequence: Sequence) -> TokenEvent:
        """The news for the caller."""
        return TokenEvent(
            sequence.request.request_id,
            sequence.index,
            self.token_ids,
            self.finish_reason,
            self.stop_token_id,
            sequence.cached_tokens,
            self.logprobs,
            self.error,
            self.is_complete,
            self.is_refusal,
            sequence.num_drafts,
            sequence.num_accepted_drafts,
            features.event(sequence, sequence.parts) if sequence.parts else {},
        )


def plain_event(
    sequence: Sequence,
    scheduled: ScheduledSequence,
    result: SequenceResult,
    eos_token_ids: frozenset[int],
    *,
    has_states: bool = False,
) -> TokenEvent | None:
    """As ``append``, of tokens that end nothing and come alone, as most do; None, and no change, for any other result.

    Drafts that are to be verified may come with them.
    """
    tokens, drafted = result.token_ids, scheduled.draft_token_ids
    if not tokens or result.error is not None or result.is_complete or (drafted and has_states):
        return None
    if result.logprobs is not None or result.features:
        return None
    ending = sequence.ending_ids
    if ending is None:
        own = () if sequence.request.sampling.ignore_eos else eos_token_ids
        ending = sequence.ending_ids = frozenset((*sequence.request.sampling.stop_token_ids, *own))
    num_output = len(sequence.token_ids) + len(tokens) - len(sequence.request.prompt_token_ids)
    # The first token may bring what is told of the prompt.
    if num_output == len(tokens) or num_output >= sequence.max_tokens or not ending.isdisjoint(tokens):
        return None
    sequence.token_ids += tokens
    sequence.drafts = result.draft_token_ids
    if drafted:
        num_accepted = len(tokens) - 1
        sequence.num_computed_tokens -= len(drafted) - num_accepted
        sequence.num_drafts += len(drafted)
        sequence.num_accepted_drafts += num_accepted
    return TokenEvent(
        sequence.request.request_id,
        sequence.index,
        tokens,
        cached_tokens=sequence.cached_tokens,
        draft_tokens=sequence.num_drafts,
        accepted_draft_tokens=sequence.num_accepted_drafts,
    )


def append(
    sequence: Sequence,
    scheduled: ScheduledSequence,
    result: SequenceResult,
    eos_token_ids: frozenset[int],
    *,
    has_states: bool = False,
) -> SequenceUpdate:
    """Append a step's tokens to the sequence, up to the one that ends it; rejected drafts count as not computed.

    has_states: of recurrent layers. Where a draft was rejected, nothing of the step counts as computed.
    """
    update = SequenceUpdate([])
    if scheduled.draft_token_ids:
        update.num_accepted_drafts = len(result.token_ids) - 1
        num_rejected = len(scheduled.draft_token_ids) - update.num_accepted_drafts
        sequence.num_computed_tokens -= scheduled.num_new_tokens if num_rejected and has_states else num_rejected
        sequence.num_drafts += len(scheduled.draft_token_ids)
        sequence.num_accepted_drafts += update.num_accepted_drafts
    sequence.drafts = result.draft_token_ids
    for token in result.token_ids:
        sequence.token_ids.append(token)
        update.token_ids.append(token)
        update.finish_reason, update.stop_token_id = sequence.stop_reason(eos_token_ids)
        if update.finish_reason is not None:
            break
    num_new = len(update.token_ids)
    if result.is_complete and num_new == len(result.token_ids) and update.finish_reason != "stop":
        update.is_complete = True
        update.finish_reason = "stop"
    if scheduled.samples and not sequence.max_tokens:
        update.finish_reason = "stop"  # nothing was to follow
    if result.logprobs is not None:
        update.logprobs = result.logprobs[:num_new]
    return update
