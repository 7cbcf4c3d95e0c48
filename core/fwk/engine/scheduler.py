"""The scheduler: what each step computes. Keeps every invariant; the policy only answers questions."""

from __future__ import annotations

import math
import sys
import time
from bisect import insort
from collections.abc import Callable, Iterable

from fwk.engine.admission import Admission
from fwk.engine.chunking import Chunking
from fwk.engine.encoder_prompt import placed
from fwk.engine.gate import Gate
from fwk.engine.kv_block_manager import KVBlockManager
from fwk.engine.plan import Counters, Limits, PlannedStep, StepPlan
from fwk.engine.preemption import Preemption
from fwk.engine.sequence import Sequence, Status
from fwk.engine.sequence_update import SequenceUpdate, append, plain_event
from fwk.errors import InvalidRequest
from fwk.features import engine as features
from fwk.features.engine import EngineFeatures
from fwk.interfaces.schedule import SchedulePolicy, SequenceView
from fwk.types import (
    Batch,
    EngineStats,
    FinishReason,
    NewSequence,
    Request,
    ScheduledSequence,
    SequenceResult,
    StepResult,
    TokenEvent,
)

ONLY_ONE = 4
"""Times as many tokens of prompts as ``max_start_tokens`` are started where each sequence ends with its first token."""


class Scheduler:
    """Decides what each step computes and keeps the books of sequences, slots and blocks."""

    def __init__(
        self,
        limits: Limits,
        kv_blocks: KVBlockManager,
        policy: SchedulePolicy,
        now: Callable[[], float] = time.monotonic,
        gates: Iterable[Gate] = (),
        policy_name: str = "",
        parts: EngineFeatures | None = None,
        *,
        keeps_policy: bool = False,
    ) -> None:
        """parts: of features; those that concern a sequence are asked about it, and told of it.

        keeps_policy: one that fails ends the engine, as suites want it, in place of being replaced.
        """
        self.limits = limits
        self.parts = parts or EngineFeatures()
        self._kv_blocks = kv_blocks
        self._now = now
        self._running: list[Sequence] = []  # by place
        self._queue = Admission(
            limits, policy, self, self._running, self.parts, gates, policy_name, keeps_policy=keeps_policy
        )
        self._chunking = Chunking(limits, kv_blocks, self._queue)
        self._by_request: dict[str, list[Sequence]] = {}
        self._free_slots = list(range(limits.max_running - 1, -1, -1))
        self._freed_slots: list[int] = []  # to tell the workers with the next batch
        self._counters = Counters()
        self._preemption = Preemption(
            limits, kv_blocks, self._queue, self._chunking, self, self._running, self._free_slots, self._release
        )
        self._num_arrived = 0
        self._troubles: tuple[str, ...] = ()  # of the workers
        self._was_prompts = False  # what the last step computed, where prompts and decoding take turns

    # What policies see (SchedulerView).

    @property
    def now(self) -> float:
        return self._now()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue.waiting)

    @property
    def num_blocks(self) -> int:
        return self._kv_blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._kv_blocks.num_available

    @property
    def num_reserved_blocks(self) -> int:
        return math.ceil(self.limits.conservativeness * len(self._running) * self._kv_blocks.num_tables)

    @property
    def block_size(self) -> int:
        return self.limits.block_size

    def cached_prefix_len(self, sequence: SequenceView) -> int:
        assert isinstance(sequence, Sequence)
        return self._kv_blocks.match(sequence).num_tokens

    @property
    def max_sequence_tokens(self) -> int:
        """Tokens of the longest request that can be served."""
        room = min(self.limits.max_request_len, self._kv_blocks.max_sequence_tokens)
        encoder = self.limits.encoder
        return room if encoder is None else room - encoder.max_added(self.limits.block_size)

    @property
    def shared_blocks(self) -> list[int] | None:
        """The prefix cache's blocks that sequences use; None: they may use any."""
        return self._kv_blocks.shared_by(self._running)

    @property
    def policy(self) -> SchedulePolicy:
        return self._queue.policy.policy

    def switch_policy(self, policy: SchedulePolicy, name: str) -> None:
        """As ``Admission.switch_policy``."""
        self._queue.switch_policy(policy, name)

    def close(self) -> None:
        """Nothing is scheduled any more."""
        self._queue.policy.close()
        self.parts.close()

    # Requests come and go.

    @property
    def has_work(self) -> bool:
        num_paused = sum(len(self._by_request[request_id]) for request_id in self._queue.paused)
        return bool(self._running) or len(self._queue.waiting) > num_paused or self.parts.is_busy

    def knows(self, request_id: str) -> bool:
        """Whether any sequence of the request is still waiting or running."""
        return request_id in self._by_request

    def add(self, request: Request) -> None:
        """Queue a request. Raises ``InvalidRequest`` for what could never be served."""
        max_tokens = request.sampling.max_tokens
        length = len(request.prompt_token_ids) + (1 if max_tokens is None else max_tokens)
        if not request.prompt_token_ids:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.request_id in self._by_request:
            raise InvalidRequest(f"request id {request.request_id} is in use", "request_id")
        if self.limits.generates == (max_tokens == 0):
            raise InvalidRequest("this engine's model serves requests of another kind", "max_tokens")
        room = self.max_sequence_tokens
        if length > room:
            raise InvalidRequest(
                f"prompt ({len(request.prompt_token_ids)} tokens) and max_tokens ({request.sampling.max_tokens}) "
                f"need {length} tokens; this server has room for {room} per request",
                "max_tokens",
            )
        if self.limits.encoder is not None:
            request = placed(request, self.limits.encoder, self.limits.block_size)
        parts = self.parts.of(request)
        arrival = self._now()
        sequences = [Sequence(request, i, self._num_arrived + i, arrival, parts) for i in range(request.n)]
        self._num_arrived += request.n
        self._by_request[request.request_id] = sequences
        for sequence in sequences:
            self._queue.push(sequence)

    def abort(self, request_id: str, index: int | None = None) -> list[TokenEvent]:
        """End a request, or one of its sequences, wherever it is. Unknown ids are ignored."""
        events: list[TokenEvent] = []
        for sequence in list(self._by_request.get(request_id, ())):
            if index is None or sequence.index == index:
                self._counters.aborted += 1
                events.append(self._finish(sequence, "abort"))
        return events

    def pause(self, request_id: str, is_on: bool) -> None:
        """Keep a request's sequences waiting, without blocks, until it may continue. Unknown ids are ignored."""
        if not is_on or request_id not in self._by_request:
            self._queue.paused.discard(request_id)
            return
        self._queue.paused.add(request_id)
        for sequence in self._by_request[request_id]:
            if sequence.status is Status.RUNNING:
                self._preemption.preempt(sequence)

    def drop_cache(self) -> None:
        """Forget the K/V of everything that was computed so far. No sequence may be running."""
        assert not self._running, "the K/V of running sequences are those of the weights they started with"
        self._kv_blocks.drop()
        if self.limits.check_blocks:
            self.check()

    def fail(self, sequence: Sequence, error: str, is_refusal: bool = False) -> TokenEvent:
        """End a sequence that could not be served; its siblings continue."""
        return self._finish(sequence, "error", error, is_refusal)

    def lose(self, error: str) -> list[TokenEvent]:
        """A step was not computed: end who runs, and forget all blocks, some of which were taken for computed."""
        events = [self.fail(sequence, error) for sequence in list(self._running)]
        self.drop_cache()
        return events

    # A step.

    def schedule(self) -> PlannedStep | None:
        """Plan a step: sequences under way first, then as many waiting ones as fit. None when nothing can run."""
        plan = StepPlan(self.limits.max_step_tokens)
        self._kv_blocks.free_duplicate_blocks()
        self.parts.planning()
        looks = self._queue.is_looked_at()
        if looks and self._queue.policy.can_preempt:
            self._preemption.displace()
        parts: list[Callable[[], None]] = [lambda: self._plan_decoding(plan), lambda: self._plan_prompts(plan, looks)]
        if not self.limits.is_mixed and not self._was_prompts:
            parts.reverse()
        for part in parts:
            part()
            if plan.scheduled and not self.limits.is_mixed:
                self._was_prompts = any(not s.samples or s.num_new_tokens > 1 for s in plan.scheduled.values())
                break
        if not plan.scheduled:
            self._queue.wait()
            return None
        self._counters.steps += 1
        batch = Batch(
            self._counters.steps,
            self._freed_slots,
            list(plan.new.values()),
            list(plan.scheduled.values()),
            self._kv_blocks.take_saves(),
        )
        self._freed_slots = []
        if self.limits.check_blocks:
            self.check()
        sequences = [(sequence, sequence.num_preemptions) for sequence in plan.scheduled]
        return PlannedStep(batch, sequences, None if self.parts.takes_longer() else plan.counts)

    def update(self, step: PlannedStep, result: StepResult) -> list[TokenEvent]:
        """Take in what a step made; returns the news for the callers. Results of ended sequences are dropped."""
        self._troubles = result.troubles
        self._kv_blocks.free_duplicate_blocks()
        self._counters.timed(result, has_drafts=any(s.draft_token_ids for s in step.batch.sequences))
        self._chunking.took(step.counts, result.total_seconds)
        results = {r.slot: r for r in result.sequences}
        has_states = self.limits.num_state_places is not None
        events: list[TokenEvent] = []
        for (sequence, epoch), scheduled in zip(step.sequences, step.batch.sequences, strict=True):
            if sequence.status is not Status.RUNNING or sequence.num_preemptions != epoch:
                continue  # ended or pre-empted while the step ran
            if scheduled.samples:
                sequence.num_pending -= 1 + len(scheduled.draft_token_ids)
                sequence.has_drafts_in_flight = False
            made = results.get(scheduled.slot)
            if made is None:
                if scheduled.samples:
                    raise AssertionError(f"step {result.step} has no result for slot {scheduled.slot}")
                continue
            sequence.runs_ahead |= made.runs_ahead and self.limits.runs_ahead
            event = plain_event(sequence, scheduled, made, self.limits.eos_token_ids, has_states=has_states)
            if event is not None:
                self._counters.generation_tokens += len(event.token_ids)
                if scheduled.draft_token_ids:
                    self._counters.verified(len(scheduled.draft_token_ids), len(event.token_ids) - 1)
                events.append(event)
                continue
            event = self._take(sequence, scheduled, made)
            if event is not None:
                events.append(event)
        events += self._with_failed_parts() if self.parts.failed else ()
        if self.limits.check_blocks:
            self.check()
        return events

    def stats(self) -> EngineStats:
        """Counters and gauges of now; O(1)."""
        total, free, cached = self._kv_blocks.num_blocks, self._kv_blocks.num_free, self._kv_blocks.num_cached
        c, of_parts = self._counters, (*self.parts.troubles, *(part.trouble() for part in self.parts.troubled))
        troubles = (self._queue.policy.failure, *of_parts, *self._troubles)
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._queue.waiting),
            num_blocks=total,
            num_free_blocks=free,
            num_held_blocks=total - free - cached,
            num_cached_blocks=cached,
            prompt_tokens=c.prompt_tokens,
            cached_prompt_tokens=c.cached_prompt_tokens,
            generation_tokens=c.generation_tokens,
            preemptions=self._preemption.count,
            steps=c.steps,
            finished=c.finished,
            aborted=c.aborted,
            draft_tokens=c.draft_tokens,
            accepted_draft_tokens=c.accepted_draft_tokens,
            restored_prompt_tokens=c.restored_prompt_tokens,
            verifications=c.verifications,
            accepted_by_position=tuple(c.accepted_by_position),
            draft_seconds=c.draft_seconds,
            verify_seconds=c.verify_seconds,
            features=self.parts.stats(),
            troubles=tuple(dict.fromkeys(filter(None, troubles))),
        )

    def check(self) -> None:
        """Prove the books: every block and slot has exactly one owner."""
        self._kv_blocks.check(self._running)
        self.parts.prove(self._running, list(self._queue.waiting))
        slots = [sequence.slot for sequence in self._running]
        if len(set(slots)) != len(slots) or len(slots) + len(self._free_slots) != self.limits.max_running:
            raise AssertionError("slots do not balance")
        for sequence in self._running:
            if sequence.num_computed_tokens >= sequence.num_tokens:
                raise AssertionError(f"sequence {sequence.key} has nothing left to compute, and has not ended")

    # Inside a step.

    def _plan_decoding(self, plan: StepPlan) -> None:
        """One token, and drafts, for each sequence whose prompt is computed: no prompt holds these up."""
        most = self.limits.max_decoding(len(self._running))
        for sequence in list(self._running):
            if len(plan.scheduled) >= most:
                break
            if sequence.num_computed_tokens < sequence.quiet_until and self._continue(sequence, plan):
                continue
            if sequence.status is Status.RUNNING and sequence.is_decoding:
                self._schedule_running(sequence, plan)

    def _continue(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Schedule the next token of a sequence of which nothing else changes: what most of a step's do."""
        known = len(sequence.token_ids) + sequence.num_pending
        step = sequence.plain_step
        if known != sequence.num_computed_tokens + 1 or step is None or plan.budget <= 0:
            return False
        if sequence.drafts or (sequence.num_pending and self._waits(sequence)):
            return False
        sequence.num_computed_tokens = known
        sequence.num_pending += 1
        plan.scheduled[sequence] = step
        plan.budget -= 1
        return True

    def _plan_prompts(self, plan: StepPlan, looks: bool) -> None:
        """Chunks of prompts under way, then of those that start, unless blocks have run out for somebody."""
        room, num_before = plan.budget, len(plan.scheduled)
        self._chunking.begin_step(num_before, room, min(self.num_running + self.num_waiting, self.limits.max_running))
        for sequence in list(self._running):
            if sequence.status is Status.RUNNING and not sequence.is_decoding and sequence not in plan.scheduled:
                self._schedule_running(sequence, plan)
        if looks and not plan.is_short:
            most = self.limits.max_start_tokens
            free = sys.maxsize if self.limits.max_prompts is None else self.limits.max_prompts
            free -= len(plan.scheduled) - num_before
            least = (0, 0) if most is None else (room - most, room - most * ONLY_ONE)
            self._admit_waiting(plan, *least, free)
        plan.counts = num_before, room - plan.budget
        self._chunking.end_step()

    def _schedule_running(self, sequence: Sequence, plan: StepPlan) -> None:
        if plan.budget <= 0 or sequence.is_last_token_launched:
            return
        if sequence.num_pending and (self._waits(sequence) or (sequence.drafts and not sequence.runs_ahead)):
            return
        remaining = sequence.num_uncomputed_tokens
        drafts: list[int] = []
        if remaining == 1:
            num_new = 1
            if sequence.drafts:
                left = sequence.max_tokens - sequence.num_output_tokens - sequence.num_pending
                room = min(plan.budget, left) - 1
                drafts = sequence.drafts[: max(room, 0)]
                num_new += len(drafts)
        else:
            num_new = self._chunking.size(sequence, remaining, plan.budget)
            if not num_new:
                return
        blocks = self._preemption.make_room(sequence, num_new, plan)
        if blocks is not None:
            self._schedule(sequence, num_new, blocks, drafts, plan)

    def _waits(self, sequence: Sequence) -> bool:
        """Whether its next step waits for the result of the launched one: for the drafts in it, which are worth more
        than a step's head start, or because the token is chosen in another stage than the one that embeds it."""
        if self.limits.num_stages > 1:
            return True
        return not sequence.runs_ahead and (sequence.has_drafts_in_flight or self.limits.num_lookahead > 0)

    def _admit_waiting(self, plan: StepPlan, rest: int, last_rest: int, count: int) -> None:
        """Start up to ``count`` sequences until no more than ``rest`` tokens of the budget, or no slots, are left;
        ``last_rest``: the same for sequences that end with their first token.
        """
        rest, last_rest = max(rest, 0), max(last_rest, 0)
        if plan.budget <= last_rest or count <= 0 or not self._free_slots:
            return
        admitted: list[Sequence] = []
        for candidate in self._queue.candidates():
            if candidate in plan.scheduled:
                continue
            is_last = candidate.max_tokens - candidate.num_output_tokens <= 1
            if plan.budget <= (last_rest if is_last else rest):
                break
            if not self._admit(candidate, plan):
                break  # whoever is first in the policy's order is not overtaken
            admitted.append(candidate)
            if len(admitted) == count or not self._free_slots:
                break
        for sequence in admitted:
            self._queue.start(sequence)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> bool:
        match = self._kv_blocks.match(sequence)
        self._kv_blocks.lock(sequence, match)
        num_new = self._chunking.size(sequence, len(sequence.token_ids) - match.num_tokens, plan.budget)
        count = self._kv_blocks.num_missing(sequence, match.num_tokens + num_new, len(match.block_ids))
        may_start = num_new > 0 and (not self._running or self._queue.policy.admit(sequence, count))
        if not may_start or count > self.num_free_blocks:
            self._kv_blocks.unlock(sequence, match)
            return False
        sequence.status = Status.RUNNING
        sequence.slot = self._free_slots.pop()
        self._kv_blocks.begin(sequence, match, count, len(self._running))
        computed = sequence.num_computed_tokens
        if not sequence.was_admitted:
            sequence.was_admitted = True
            sequence.cached_tokens = features.cached(sequence, sequence.parts, computed)
            self._counters.prompt_tokens += sequence.request.num_encoder_tokens or sequence.num_prompt_tokens
            self._counters.cached_prompt_tokens += sequence.cached_tokens
            self._counters.restored_prompt_tokens += computed - match.num_tokens
        try:
            insort(self._running, sequence, key=lambda s: s.place)
        except Exception as error:
            self._queue.policy.fail("rank", error)
            insort(self._running, sequence, key=lambda s: s.place)
        sequence.plain_step = ScheduledSequence(sequence.slot, 1, True, [], [])
        plan.new[sequence] = NewSequence(
            sequence.slot,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            computed,
            list(sequence.blocks),
            sequence.request.sampling,
            sequence.seed(self.limits.seed),
            self._kv_blocks.window_ids(sequence, len(sequence.blocks)),
            sequence.state_source,
            sequence.request.num_encoder_tokens,
            features.new(sequence, sequence.parts) if sequence.parts else {},
            sequence.request.cache_namespace,
        )
        # After what came back, the first chunk needs no more blocks than it would have without.
        remaining = len(sequence.token_ids) - computed
        num_new = min(num_new, remaining, self._chunking.size(sequence, remaining, plan.budget) or remaining)
        count = self._kv_blocks.num_missing(sequence, computed + num_new, len(sequence.blocks))
        self._schedule(sequence, num_new, self._kv_blocks.extend(sequence, count), [], plan)
        return True

    def _schedule(self, sequence: Sequence, num_new: int, blocks: list[int], drafts: list[int], plan: StepPlan) -> None:
        samples = sequence.num_computed_tokens + num_new - len(drafts) == sequence.num_tokens
        told = features.step(sequence, sequence.parts, sequence.num_computed_tokens, num_new) if sequence.parts else {}
        sequence.num_computed_tokens += num_new
        sequence.num_pending += samples + len(drafts)
        sequence.has_drafts_in_flight = bool(drafts)
        sequence.drafts = []
        replaced, sequence.replaced_blocks = sequence.replaced_blocks, []
        windowed = self._kv_blocks.window_ids(sequence, len(blocks))
        state_place = -1 if drafts else self._kv_blocks.save_state(sequence)
        plan.scheduled[sequence] = ScheduledSequence(
            sequence.slot, num_new, samples, blocks, drafts, replaced, windowed, state_place, told
        )
        plan.budget -= num_new
        self._kv_blocks.share(sequence, len(drafts))
        last = sequence.num_prompt_tokens + sequence.max_tokens - 1
        sequence.quiet_until = min(self._kv_blocks.quiet_until(sequence), last)
        if any(part.wants_steps for part in sequence.parts):
            sequence.quiet_until = 0

    def _take(self, sequence: Sequence, scheduled: ScheduledSequence, result: SequenceResult) -> TokenEvent | None:
        """Append a step's tokens to a sequence; end it when one of them ends it."""
        if result.error is not None:
            return self.fail(sequence, result.error, result.is_refusal)
        has_states = self.limits.num_state_places is not None
        update = append(sequence, scheduled, result, self.limits.eos_token_ids, has_states=has_states)
        if scheduled.draft_token_ids:
            self._counters.verified(len(scheduled.draft_token_ids), update.num_accepted_drafts)
        self._counters.generation_tokens += len(update.token_ids)
        if result.features:
            self.parts.took(sequence, sequence.parts, result.features)
        if update.finish_reason is not None:
            self._counters.finished += 1
            self._end(sequence)
            return self._event(sequence, update)
        return update.event(sequence) if update.token_ids else None

    def _with_failed_parts(self) -> list[TokenEvent]:
        """End the sequences in which a part has failed."""
        every = [sequence for siblings in self._by_request.values() for sequence in siblings]
        return [self.fail(one, why) for one in every if (why := self.parts.why_failed(one.parts)) is not None]

    def _event(self, sequence: Sequence, update: SequenceUpdate) -> TokenEvent:
        event = update.event(sequence)
        if sequence.status is Status.FINISHED:
            for part in sequence.parts:
                part.forget(sequence)
        return event

    def _finish(
        self, sequence: Sequence, reason: FinishReason, error: str | None = None, is_refusal: bool = False
    ) -> TokenEvent:
        """End a sequence for another reason than its tokens."""
        self._end(sequence)
        return self._event(sequence, SequenceUpdate([], reason, error=error, is_refusal=is_refusal))

    def _end(self, sequence: Sequence) -> None:
        for part in sequence.parts:
            part.finished(sequence)
        if sequence.status is Status.RUNNING:
            self._release(sequence)
            self._running.remove(sequence)
        else:
            self._queue.end(sequence)
        sequence.status = Status.FINISHED
        self._queue.policy.tell("on_finished", sequence)
        siblings = self._by_request[sequence.request.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._by_request[sequence.request.request_id]
            for part in sequence.parts:
                part.left(sequence.request)
            self._queue.paused.discard(sequence.request.request_id)

    def _release(self, sequence: Sequence) -> None:
        self._kv_blocks.release(sequence)
        self._free_slots.append(sequence.slot)
        self._freed_slots.append(sequence.slot)
        sequence.slot = -1
