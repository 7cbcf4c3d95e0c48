"""Schedule policies: narrow questions; the Scheduler keeps the books."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fwk.interfaces.declaration import Declaration
from fwk.types import Request


class SequenceView(Protocol):
    """What a policy sees of a sequence. Read-only."""

    @property
    def request(self) -> Request: ...
    @property
    def index(self) -> int: ...
    @property
    def arrival(self) -> float:
        """Monotonic seconds at which the request reached the engine; a pre-empted sequence keeps it."""
        ...

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_preemptions(self) -> int: ...


class SchedulerView(Protocol):
    """What a policy sees of the engine. Read-only; every member costs O(1) unless it says otherwise."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def num_free_blocks(self) -> int:
        """Blocks that could be handed out now, evictable cached ones included."""
        ...

    @property
    def block_size(self) -> int: ...

    def cached_prefix_len(self, sequence: SequenceView) -> int:
        """Tokens of ``sequence`` the prefix cache holds now. O(length)."""
        ...


@dataclass(frozen=True, slots=True)
class ScheduleContext:
    """What a policy is built with."""

    options: Any = None


class SchedulePolicy(ABC):
    """Answers questions; cannot break the accounting whatever it answers."""

    def __init__(self, context: ScheduleContext) -> None:
        self.context = context

    @abstractmethod
    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterable[SequenceView]:
        """The waiting sequences in the order they should start.

        ``waiting`` stands in order of arrival, pre-empted sequences first. Called once a step, read only as far as
        there is room: answer lazily, and keep the cost flat in the queue's length. The queue does not change while it
        is read. Sequences left out keep waiting; strangers and repeats are ignored.
        """

    def admit(self, sequence: SequenceView, num_blocks: int, view: SchedulerView) -> bool:
        """Whether a waiting sequence may start now, needing ``num_blocks`` new blocks for its first chunk.

        By default it may when, after it, each running sequence could still grow by one block: starting one more
        only to pre-empt it a step later is work thrown away. An idle engine starts the first whatever is said.
        """
        return num_blocks + view.num_running <= view.num_free_blocks

    def victim(self, running: Sequence[SequenceView], view: SchedulerView) -> SequenceView:
        """Which running sequence gives its blocks back when they run out; by default the last to have arrived.

        ``running`` stands in order of arrival. Pre-empting the youngest first means that the oldest always goes on,
        so the engine cannot thrash for ever.
        """
        return running[-1]

    def chunk(self, sequence: SequenceView, remaining: int, budget: int, view: SchedulerView) -> int:
        """Tokens of a prompt to compute this step, given what remains of the prompt and of the step's budget."""
        return min(remaining, budget)


@dataclass(frozen=True, kw_only=True)
class SchedulePolicySpec(Declaration):
    """Declares a schedule policy."""

    family: ClassVar[str] = "schedulers"
