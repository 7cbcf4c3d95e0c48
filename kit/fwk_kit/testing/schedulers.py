"""What every schedule policy must do."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from fwk.interfaces.schedule import ScheduleContext, SchedulePolicy, SchedulerView, SequenceView
from fwk.plugins import Registered
from fwk.types import Request, SamplingParams
from fwk_kit.testing.fake_engine import VOCAB, make_engine, reference
from fwk_kit.testing.served import ServedSuite

MAX_LOOKUPS = 1024
"""Prefix lookups in one step, each of which costs the length of a prompt, however long the queue is."""


class Watched(SchedulePolicy):
    """Hands every question on to the policy under test, and checks the answer."""

    def __init__(self, inner: SchedulePolicy) -> None:
        self.inner = inner

    def rank(self, sequence: SequenceView, view: SchedulerView) -> Any:
        answer = self.inner.rank(sequence, view)
        assert (answer < answer) is False, f"rank() answers {answer!r}, which cannot be ordered"
        return answer

    def choose_preemption_victim(
        self, sequence: SequenceView, running: Sequence[SequenceView], view: SchedulerView
    ) -> SequenceView | None:
        answer = self.inner.choose_preemption_victim(sequence, running, view)
        assert answer is None or any(answer is one for one in running), (
            "choose_preemption_victim() answers one that does not run"
        )
        return answer

    def on_waiting(self, sequence: SequenceView, view: SchedulerView) -> None:
        self.inner.on_waiting(sequence, view)

    def on_started(self, sequence: SequenceView, view: SchedulerView) -> None:
        self.inner.on_started(sequence, view)

    def on_finished(self, sequence: SequenceView, view: SchedulerView) -> None:
        self.inner.on_finished(sequence, view)

    def order(self, waiting: Collection[SequenceView], view: SchedulerView) -> Iterable[SequenceView]:
        counted = _Counting(view)
        before = list(waiting)
        answer: Iterator[SequenceView] = iter(self.inner.order(waiting, counted))  # type: ignore[arg-type]
        waits = {id(sequence) for sequence in before}
        for sequence in answer:
            assert id(sequence) in waits, "order() answers a sequence that is not waiting"
            assert counted.num_lookups <= MAX_LOOKUPS, f"order() looks up {counted.num_lookups} prefixes in one step"
            yield sequence

    def admit(self, sequence: SequenceView, num_blocks: int, view: SchedulerView) -> bool:
        answer = self.inner.admit(sequence, num_blocks, view)
        assert isinstance(answer, bool), f"admit() answers {answer!r}"
        return answer

    def victim(self, running: Sequence[SequenceView], view: SchedulerView) -> SequenceView:
        answer = self.inner.victim(running, view)
        assert any(answer is one for one in running), "victim() answers a sequence that does not run"
        return answer

    def chunk(self, sequence: SequenceView, remaining: int, budget: int, view: SchedulerView) -> int:
        answer = self.inner.chunk(sequence, remaining, budget, view)
        assert isinstance(answer, int), f"chunk() answers {answer!r}"
        assert 0 <= answer <= min(remaining, budget), f"chunk() answers {answer} of {remaining}, budget {budget}"
        return answer


class _Counting:
    """The scheduler's view, counting the lookups that cost something."""

    def __init__(self, view: SchedulerView) -> None:
        self._view = view
        self.num_lookups = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)

    def cached_prefix_len(self, sequence: SequenceView) -> int:
        self.num_lookups += 1
        return self._view.cached_prefix_len(sequence)


class SchedulePolicySuite(ServedSuite):
    """A policy in the real scheduler, over a K/V memory that holds token ids: a wrong block changes the output."""

    family = "schedulers"
    interface = SchedulePolicy

    def policy(self, item: Registered) -> Watched:
        """The policy, each of its answers checked."""
        return Watched(self.make(item, ScheduleContext(self.given(item))))

    def exercise(self, item: Registered) -> None:
        self.test_everybody_is_served_and_every_block_comes_back(item)

    def requests(self, count: int, seed: int = 0) -> list[Request]:
        """What is served: prompts of many lengths, half of them with a common beginning. Override to ask for more."""
        rng = random.Random(seed)
        shared = [rng.randrange(VOCAB) for _ in range(12)]
        return [
            Request(
                request_id=f"r{i}",
                prompt_token_ids=shared[: 12 * (i % 2)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
                sampling=SamplingParams(max_tokens=rng.randint(1, 20), temperature=0.0),
                priority=rng.randint(-2, 2),
            )
            for i in range(count)
        ]

    def serve(self, policy: SchedulePolicy, requests: list[Request], cancel: set[str], **engine: Any) -> None:
        """Run the requests, aborting those of ``cancel`` on their way; check every output and every block."""
        made = make_engine(policy_object=policy, **engine)
        rng, outputs, left = random.Random(1), {request.request_id: [] for request in requests}, list(requests)
        for _ in range(5000):
            for request in left[: rng.randint(0, 3)]:
                left.remove(request)
                assert made.add(request) == []
            for event in made.step():
                outputs[event.request_id] += event.token_ids
            if cancel and rng.random() < 0.3:
                made.abort(cancel.pop())
            if not left and not made.has_work:
                break
        else:
            raise AssertionError("the engine does not come to an end: somebody is never started")
        for request in requests:
            wanted = reference(request.prompt_token_ids, request.sampling.max_tokens or 0)
            got = outputs[request.request_id]
            assert got == wanted[: len(got)], request.request_id
            assert got == wanted or request.request_id in self.cancelled, f"{request.request_id} was not finished"
        stats = made.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_held_blocks) == (0, 0, 0)

    cancelled: frozenset[str] = frozenset()

    def test_everybody_is_served_and_every_block_comes_back(self, item: Registered) -> None:
        for seed in range(3):
            self.serve(self.policy(item), self.requests(24, seed), set())

    def test_a_small_pool_takes_blocks_back(self, item: Registered) -> None:
        """With eight growing sequences on room for three, victims are chosen again and again."""
        watched = self.policy(item)
        self.serve(watched, self.requests(16, 5), set(), num_blocks=20, step_tokens=16, chunk_tokens=8)

    def test_cancelled_requests_leave_nothing_behind(self, item: Registered) -> None:
        requests = self.requests(24, 7)
        self.cancelled = frozenset(request.request_id for request in requests[::2])
        self.serve(self.policy(item), requests, set(self.cancelled))

    def test_planning_ahead_changes_nothing(self, item: Registered) -> None:
        self.serve(self.policy(item), self.requests(16, 9), set(), depth=2)

    def test_an_empty_queue_is_an_empty_answer(self, item: Registered) -> None:
        policy = self.make(item, ScheduleContext(self.given(item)))
        assert list(policy.order([], _Nothing())) == []

    def test_a_long_queue_costs_few_lookups(self, item: Registered) -> None:
        """Thousands that wait are not each looked up in the prefix cache, step after step."""
        watched = self.policy(item)
        made = make_engine(policy_object=watched, num_blocks=32, max_running=2)
        for request in self.requests(3000, 3):
            made.add(request)
        for _ in range(5):
            made.step()

    def test_two_engines_have_policies_of_their_own(self, item: Registered) -> None:
        one, two = self.policy(item), self.policy(item)
        self.serve(one, self.requests(8, 1), set())
        self.serve(two, self.requests(8, 2), set())


class _Nothing:
    """The view of an engine that has nothing to do."""

    num_running = num_waiting = 0
    num_free_blocks = num_blocks = 64
    num_reserved_blocks = 0
    block_size = 16
    now = 0.0

    def cached_prefix_len(self, sequence: SequenceView) -> int:
        return 0
