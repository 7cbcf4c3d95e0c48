"""The waiting queue: the policy's order, and the gates that hold sequences back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fwk.engine.gate import Gate, PauseGate
from fwk.engine.plan import Limits
from fwk.engine.policy_runner import PolicyRunner
from fwk.engine.sequence import Sequence, Status
from fwk.engine.waiting_queue import WaitingQueue
from fwk.errors import EngineDead
from fwk.features.engine import EngineFeatures
from fwk.interfaces.schedule import SchedulePolicy, SchedulerView


class Admission:
    """The waiting sequences, the policy that ranks them, and the gates that hold them back.

    policy: asked and told of all sequences, also those in ``running``, which are the scheduler's.
    """

    def __init__(
        self,
        limits: Limits,
        policy: SchedulePolicy,
        view: SchedulerView,
        running: list[Sequence],
        parts: EngineFeatures,
        gates: Iterable[Gate],
        policy_name: str,
        *,
        keeps_policy: bool,
    ) -> None:
        """As for ``Scheduler``. view: what the policy sees."""
        self._limits = limits
        self._view = view
        self._running = running
        self._parts = parts
        self._pauses = PauseGate()
        self._gates = (self._pauses, *gates)
        self._steps_since_look = 0
        self.waiting = WaitingQueue()
        self.policy = PolicyRunner(policy, view, policy_name, None if keeps_policy else self._forget_ranks)
        self.paused = self._pauses.paused
        """Ids of requests that may not run."""

    def is_looked_at(self) -> bool:
        """Whether this step is one of those that look at the waiting queue."""
        self._steps_since_look += 1
        if not self.waiting or (self._running and self._steps_since_look < self._limits.admission_interval):
            return False
        self._steps_since_look = 0
        return True

    def candidates(self) -> Iterator[Sequence]:
        """Waiting sequences in the policy's order, without those that a gate of theirs holds back."""
        if not self.waiting:
            return
        for gate in (*self._gates, *self._parts.polled):
            gate.poll()
        for candidate in self.policy.order(self.waiting):
            closed = next((gate for gate in self._gates_of(candidate) if not gate.lets_through(candidate)), None)
            if closed is None:
                yield candidate
            elif closed.is_full:
                return  # the others need not wait for it otherwise

    def push(self, sequence: Sequence) -> None:
        """Let a sequence wait, in the place the policy gives it."""
        sequence.rank = self.policy.rank(sequence)
        try:
            self.waiting.push(sequence, sequence.rank)
        except Exception as error:  # it cannot be compared with the others'
            self.policy.fail("rank", error)
            sequence.rank = 0
            self.waiting.push(sequence, 0)
        self.policy.tell("on_waiting", sequence)
        for gate in self._gates_of(sequence):
            gate.arrived(sequence)

    def start(self, sequence: Sequence) -> None:
        """It runs now, and waits no more."""
        self._leave(sequence)
        for gate in self._gates_of(sequence):
            gate.started(sequence)
        self.policy.tell("on_started", sequence)

    def end(self, sequence: Sequence) -> None:
        """It waits no more, and has not run."""
        self._leave(sequence)
        for gate in self._gates_of(sequence):
            gate.ended(sequence)

    def wait(self) -> None:
        """Nothing can be computed: let time pass if that is because of a gate, a part or the policy."""
        for gate in (*self._gates, *self._parts.waiting, self.policy):
            gate.wait()

    def _leave(self, sequence: Sequence) -> None:
        try:
            self.waiting.remove(sequence)
        except Exception as error:  # its rank is not where it was put
            self.policy.fail("rank", error)

    def _gates_of(self, sequence: Sequence) -> tuple[Gate, ...]:
        return (*self._gates, *sequence.parts) if sequence.parts else self._gates

    def switch_policy(self, policy: SchedulePolicy, name: str) -> None:
        """Ask another policy from now on: it ranks all who wait, and is told of all who run.

        Raises ``EngineDead`` when it fails at that; then the old one continues.
        """
        policy_runner = PolicyRunner(policy, self._view, name)
        sequences = [*self._running, *self.waiting]
        waiting = WaitingQueue()
        ranks = [policy_runner.rank(sequence) for sequence in sequences]
        try:
            for sequence, rank in zip(sequences, ranks, strict=True):
                if sequence.status is Status.WAITING:
                    waiting.push(sequence, rank)
                policy_runner.tell("on_waiting", sequence)
            for sequence in self._running:
                policy_runner.tell("on_started", sequence)
            sorted(ranks)  # those of the running are compared with one another, too
        except TypeError as error:
            raise EngineDead(f"the ranks of schedule policy {name} cannot be compared: {error}") from error
        for sequence, rank in zip(sequences, ranks, strict=True):
            sequence.rank = rank
        self._running.sort(key=lambda s: s.place)
        self.policy.close()
        policy_runner.may_fail(self._forget_ranks)
        self.policy, self.waiting = policy_runner, waiting

    def _forget_ranks(self) -> None:
        """Put all sequences in the order of arrival, which is that of a policy's defaults."""
        waiting, self.waiting = self.waiting, WaitingQueue()
        for sequence in [*self._running, *waiting]:
            sequence.rank = 0
            if sequence in waiting:
                self.waiting.push(sequence, 0)
        self._running.sort(key=lambda s: s.place)
