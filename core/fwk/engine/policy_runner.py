"""The schedule policy as the scheduler asks it: what it raises ends the engine, in the policy's name."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from typing import Any

from fwk.engine.sequence import Sequence
from fwk.errors import EngineDead, one_line_traceback
from fwk.interfaces.schedule import SchedulePolicy, SchedulerView

log = logging.getLogger(__name__)

_EVENTS = ("on_waiting", "on_started", "on_finished")


class PolicyRunner:
    """One policy, asked and told by name."""

    def __init__(self, policy: SchedulePolicy, view: SchedulerView, name: str = "") -> None:
        self.policy = policy
        self._view = view
        self._name = name or type(policy).__name__
        self._hears = {event for event in _EVENTS if _overrides(policy, event)}
        self.can_preempt = _overrides(policy, "choose_preemption_victim")

    def close(self) -> None:
        """The policy is asked nothing more; what it raises now harms nobody."""
        try:
            self.policy.close()
        except Exception as error:
            log.error("schedule policy %s raised in close: %s", self._name, one_line_traceback(error))

    def ask(self, question: str, *args: Any) -> Any:
        """The policy's answer. Raises ``EngineDead`` when it has none."""
        try:
            return getattr(self.policy, question)(*args, self._view)
        except Exception as error:
            raise self._failed(question, error) from error

    def tell(self, event: str, sequence: Sequence) -> None:
        """Pass an event on to a policy that wants to hear of it."""
        if event in self._hears:
            self.ask(event, sequence)

    def order(self, waiting: Collection[Sequence]) -> Iterator[Any]:
        """Whom the policy would start, first to last; it may name anything."""
        try:
            yield from self.policy.order(waiting, self._view)
        except Exception as error:
            raise self._failed("order", error) from error

    def _failed(self, question: str, error: Exception) -> EngineDead:
        return EngineDead(
            f"schedule policy '{self._name}' raised {type(error).__name__} in {question}", one_line_traceback(error)
        )


def _overrides(policy: SchedulePolicy, name: str) -> bool:
    return getattr(type(policy), name) is not getattr(SchedulePolicy, name)
