"""Schedule policies: narrow questions; the Scheduler keeps the books."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fwk.interfaces.declaration import Declaration
from fwk.types import Request
from fwk_deprecated import follow_renamed_methods


class SequenceView(Protocol):
    """What a policy sees of a sequence. Read-only."""

    @property
    def request(self) -> Request:
        """What was asked."""
        ...

    @property
    def index(self) -> int:
        """Its number among the request's ``n`` sequences, from 0."""
        ...

    @property
    def arrival(self) -> float:
        """Monotonic seconds at which the request reached the engine; a pre-empted sequence keeps it."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of the output so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K/V are in its blocks; 0 while it waits."""
        ...

    @property
    def num_preemptions(self) -> int:
        """How often it gave its slot back."""
        ...

    @property
    def max_tokens(self) -> int:
        """Most tokens it may generate."""
        ...


class SchedulerView(Protocol):
    """What a policy sees of the engine. Read-only; every member costs O(1) unless it says otherwise."""

    @property
    def now(self) -> float:
        """Monotonic seconds, by the clock of ``SequenceView.arrival``."""
        ...

    @property
    def num_running(self) -> int:
        """Sequences that have a slot."""
        ...

    @property
    def num_waiting(self) -> int:
        """Sequences that have none."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, evictable cached ones included."""
        ...

    @property
    def num_reserved_blocks(self) -> int:
        """Of these, what ``--schedule-conservativeness`` keeps for the running sequences to grow."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        ...

    def cached_prefix_len(self, sequence: SequenceView) -> int:
        """Tokens of ``sequence`` the prefix cache holds now. O(length)."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduleContext:
    """What a policy is built with.

    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    options: Any = None


_FORMER_METHODS = {
    "displaced": "choose_preemption_victim",
    "ended": "on_finished",
    "started": "on_started",
    "waits": "on_waiting",
}


class SchedulePolicy:
    """Answers questions; cannot break the accounting whatever it answers.

    One that raises, gives an answer of another kind, or admits no request for 10 s while some wait and none runs, is
    replaced by these defaults for the engine's life: the log and /health say so.

    Every question has a default answer, that of first come, first served. Most policies are a ``rank``; one whose order
    changes while sequences wait overrides ``order``. ``on_waiting``, ``on_started`` and ``on_finished`` tell such a
    policy what happens; they and ``rank`` are called once for each event, ``order`` and ``choose_preemption_victim`` at
    most once a step.
    """

    def __init_subclass__(cls, **words: Any) -> None:
        super().__init_subclass__(**words)
        follow_renamed_methods(cls, _FORMER_METHODS)

    def __init__(self, context: ScheduleContext) -> None:
        self.context = context

    def rank(self, sequence: SequenceView, view: SchedulerView) -> Any:
        """The place of a sequence that comes to wait: lowest first, equals by arrival.

        Asked when it arrives and after each pre-emption; the answer holds until it ends or is pre-empted, so that
        keeping a queue of any length in order costs a few comparisons. It is its place among the waiting and then among
        the running, where prompts and the blocks that are left go by it. All ranks of a policy must be comparable with
        one another.
        """
        return 0

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterable[SequenceView]:
        """The waiting sequences in the order they should start; by default by rank.

        ``waiting`` stands in the order of the ranks. Called at most once a step, read only as far as there is room:
        answer lazily, and keep the cost flat in the queue's length. Nothing changes while it is read. Sequences left
        out keep waiting; strangers and repeats are ignored, up to as many as wait and 64 more.
        """
        return waiting

    def admit(self, sequence: SequenceView, num_blocks: int, view: SchedulerView) -> bool:
        """Whether a waiting sequence may start now, needing ``num_blocks`` new blocks for its first chunk.

        By default it may when, after it, the running sequences could still grow by the blocks that are reserved for
        them (one each unless ``--schedule-conservativeness`` says otherwise): starting one more only to pre-empt it a
        step later is work thrown away. After a no, none behind it in the order starts in this step, and it is asked
        again in the next one. An idle engine starts the first whatever is said.
        """
        return num_blocks + view.num_reserved_blocks <= view.num_free_blocks

    def victim(self, running: Sequence[SequenceView], view: SchedulerView) -> SequenceView:
        """Which sequence gives its blocks back for one that stands before all of ``running``; by default the last.

        The running sequences stand in the order of their ranks, equals by arrival. One that needs blocks gets them from
        those behind it, first of all from whom this answers, and waits with what it has when there are none: so the
        first always continues, and the engine cannot thrash for ever, whatever is answered.
        """
        return running[-1]

    def choose_preemption_victim(
        self, sequence: SequenceView, running: Sequence[SequenceView], view: SchedulerView
    ) -> SequenceView | None:
        """Which running sequence is pre-empted for a waiting one that does not fit alongside them; by default none.

        Asked for the first of the order, when slots, blocks or the step's tokens do not suffice for it, again until it
        fits or the answer is None. Overriding it is what switches pre-emption on, at the cost of a look at the running
        sequences in each step in which others wait. Two sequences must never displace one another in turn.
        """
        return None

    def chunk(self, sequence: SequenceView, remaining: int, budget: int, view: SchedulerView) -> int:
        """Tokens of a prompt to compute this step, given what remains of the prompt and of the step's budget."""
        return min(remaining, budget)

    def on_waiting(self, sequence: SequenceView, view: SchedulerView) -> None:
        """A sequence has come to wait: it has arrived, or was pre-empted (``num_preemptions`` > 0)."""

    def on_started(self, sequence: SequenceView, view: SchedulerView) -> None:
        """A waiting sequence runs now. Told after the step has been planned."""

    def on_finished(self, sequence: SequenceView, view: SchedulerView) -> None:
        """A waiting or running sequence is gone for good."""

    def close(self) -> None:
        """The engine stops, or another policy has taken over."""


@dataclass(frozen=True, kw_only=True)
class SchedulePolicySpec(Declaration):
    """Declares a schedule policy."""

    family: ClassVar[str] = "schedulers"
