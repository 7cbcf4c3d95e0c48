"""The schedule policy as the scheduler asks it: one that fails is replaced, and its name is told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from operator import index
from typing import Any, cast

from fwk.engine.gate import rest
from fwk.engine.sequence import Sequence
from fwk.errors import EngineDead, one_line_traceback
from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView

log = logging.getLogger(__name__)

_EVENTS = ("on_waiting", "on_started", "on_finished")
MAX_IDLE_SECONDS = 10.0
"""So long an engine may stand idle while a policy starts none of those that wait."""
MAX_STRANGERS = 64
"""Sequences that an order may name besides those that wait, each of which it may name twice."""


class WrongAnswer(Exception):
    """An answer that is none."""


class PolicyRunner:
    """One policy, asked and told by name. When it fails, the defaults answer: first come, first served."""

    def __init__(
        self, policy: SchedulePolicy, view: SchedulerView, name: str = "", replaced: Callable[[], None] | None = None
    ) -> None:
        """name: for messages, in quotes, with its package.

        replaced: called when the policy has failed: all ranks are 0 from then on. None: a failure is raised.
        """
        self._view = view
        self._name = name or repr(type(policy).__name__)
        self._replaced = replaced
        self.failure = ""
        """Why the policy was replaced."""
        self._idle_since: float | None = None  # since when its order is empty while requests wait and none runs
        self._use(policy)

    def may_fail(self, replaced: Callable[[], None]) -> None:
        """From now on a failure is no longer raised: as ``replaced`` says."""
        self._replaced = replaced

    def close(self) -> None:
        """The policy is asked nothing more; what it raises now harms nobody."""
        try:
            self.policy.close()
        except Exception as error:
            log.error("schedule policy %s raised in close: %s", self._name, one_line_traceback(error))

    def rank(self, sequence: Sequence) -> Any:
        """Its place, which is equal to itself, as is every part of it: numbers that are none have no order."""
        try:
            rank = self.policy.rank(sequence, self._view)
            parts = cast("tuple[Any, ...]", rank) if isinstance(rank, tuple) else (rank,)
            for part in parts:
                if not part == part or part < part:
                    raise WrongAnswer(f"{rank!r} has no order")
        except (Exception, SystemExit) as error:
            self.fail("rank", error)
            return 0
        return cast("Any", rank)

    def chunk(self, sequence: Sequence, remaining: int, budget: int) -> int:
        """How much of a prompt to compute: 1 to ``budget`` tokens."""
        try:
            answer = self.policy.chunk(sequence, remaining, budget, self._view)
            return max(1, min(budget, index(answer)))
        except (Exception, SystemExit) as error:
            self.fail("chunk", error)
            return budget

    def admit(self, sequence: Sequence, num_blocks: int) -> bool:
        """Whether a waiting sequence may start."""
        try:
            answer = cast("object", self.policy.admit(sequence, num_blocks, self._view))
            if answer is None:
                raise WrongAnswer("it answered None, neither True nor False")
            return bool(answer)
        except (Exception, SystemExit) as error:
            self.fail("admit", error)
            return self.policy.admit(sequence, num_blocks, self._view)

    def victim(self, question: str, *args: Any) -> Any:
        """Whom ``victim`` or ``choose_preemption_victim`` names; anything else than a sequence stands for none."""
        try:
            return getattr(self.policy, question)(*args, self._view)
        except (Exception, SystemExit) as error:
            self.fail(question, error)
            return None

    def tell(self, event: str, sequence: Sequence) -> None:
        """Pass an event on to a policy that wants to hear of it."""
        if event in self._hears:
            try:
                getattr(self.policy, event)(sequence, self._view)
            except (Exception, SystemExit) as error:
                self.fail(event, error)

    def order(self, waiting: Collection[Sequence]) -> Iterator[Sequence]:
        """Whom the policy would start, first to last, as far as they wait: each once."""
        met, most = set[Sequence](), 2 * len(waiting) + MAX_STRANGERS
        try:
            for count, candidate in enumerate(self.policy.order(waiting, self._view)):
                if count > most:
                    raise WrongAnswer(f"it named more than {most} sequences, and {len(met)} of them wait")
                if isinstance(candidate, Sequence) and candidate in waiting and candidate not in met:
                    met.add(candidate)
                    self._idle_since = None
                    yield candidate
            self._note_idle(is_idle=bool(waiting) and not met and not self._view.num_running)
        except (Exception, SystemExit) as error:
            self.fail("order", error)
            yield from sorted((one for one in waiting if one not in met), key=lambda one: one.order)

    def wait(self) -> None:
        """Nothing can be computed: let time pass if it is the policy that admits no request."""
        if self._idle_since is not None:
            rest()

    def _note_idle(self, *, is_idle: bool) -> None:
        if not is_idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._view.now
        elif self._view.now - self._idle_since > MAX_IDLE_SECONDS:
            self._idle_since = None
            raise WrongAnswer(f"it has admitted no request for {MAX_IDLE_SECONDS:.0f} s while none ran")

    def fail(self, question: str, error: BaseException) -> None:
        """Replace the policy by the defaults. Raises ``EngineDead`` where nothing replaces it."""
        what = str(error) if isinstance(error, WrongAnswer) else f"raised {type(error).__name__}"
        sentence = f"schedule policy {self._name} failed in {question}: {what}"
        if self._replaced is None or self.failure:
            raise EngineDead(sentence, one_line_traceback(error)) from error
        self.failure = f"{sentence}; requests are served first come, first served"
        log.error("%s: %s", self.failure, one_line_traceback(error))
        self.close()
        self._use(SchedulePolicy(ScheduleContext()))
        self._replaced()

    def _use(self, policy: SchedulePolicy) -> None:
        self.policy = policy
        self._hears = {event for event in _EVENTS if _overrides(policy, event)}
        self.can_preempt = _overrides(policy, "choose_preemption_victim")


def _overrides(policy: SchedulePolicy, name: str) -> bool:
    return getattr(type(policy), name) is not getattr(SchedulePolicy, name)
