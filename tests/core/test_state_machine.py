"""Prefix caching of recurrent layers under any order of arrivals, forks, pre-emptions, aborts and steps.

The fake worker's state is a hash of every token the sequence has seen, kept and taken up again where the engine says:
a checkpoint of another prefix, or one given to two, changes it and fails the step.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test
from tests.helpers.engine_machine import EngineMachine, request

from fwk_kit.testing.fake_engine import reference


class StateMachine(EngineMachine):
    """Small pools, few places for states, and chats whose turns begin where the last one ended."""

    counts: ClassVar[dict[str, int]] = {}

    @initialize(
        num_blocks=st.integers(16, 40),
        block_size=st.sampled_from([1, 3, 4]),
        policy=st.sampled_from(["fcfs", "lpm", "contrary"]),
        depth=st.integers(1, 3),
        step_tokens=st.sampled_from([3, 16, 40]),
        drafts=st.booleans(),
        chunk_tokens=st.sampled_from([None, 3, 32]),
        conservativeness=st.sampled_from([0.0, 0.0, 1.0]),
        num_state_places=st.integers(1, 12),
        state_interval=st.sampled_from([1, 4, 9]),
    )
    def start(self, num_blocks, block_size, policy, depth, step_tokens, drafts, **limits) -> None:  # type: ignore[no-untyped-def,override]
        self.turns: list[list[int]] = [[7] * 9]
        super().start(num_blocks, block_size, "radix", policy, depth, step_tokens, drafts, **limits)

    @rule(data=st.data(), own=st.lists(st.integers(0, 3), min_size=1, max_size=6), n=st.integers(1, 3))
    def next_turn(self, data: st.DataObject, own: list[int], n: int) -> None:
        """A prompt that continues an earlier prompt and its answer; n of it are forks of one prompt."""
        prompt = [*data.draw(st.sampled_from(self.turns)), *own]
        name = f"t{self.count}"
        self.count += 1
        if self.engine.add(request(name, prompt, 6, n)):
            return  # longer than the pool
        answer = reference(prompt, 6)
        self.turns = [*self.turns, [*prompt, *answer]][-6:]
        for i in range(n):
            self.open[name, i], self.wanted[name, i] = [], answer
        self.counts["forks"] = self.counts.get("forks", 0) + n - 1

    def check_invariants(self, *args: object, **kwargs: object) -> None:
        """Called by hypothesis after each step of the machine."""
        self.counts["steps"] = self.counts.get("steps", 0) + 1
        super().check_invariants(*args, **kwargs)

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "engine"):
            stats = self.engine.stats()
            for name in ("preemptions", "cached_prompt_tokens", "accepted_draft_tokens"):
                self.counts[name] = self.counts.get(name, 0) + getattr(stats, name)


@pytest.mark.parametrize(("num_examples", "num_steps"), [(15, 300), pytest.param(300, 10_000, marks=pytest.mark.sweep)])
def test_states_are_those_of_their_prefix(num_examples: int, num_steps: int) -> None:
    StateMachine.counts.clear()
    run_state_machine_as_test(
        StateMachine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=60,
            derandomize=True,
            phases=[Phase.generate],  # to make a failure shorter takes minutes
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    counts = StateMachine.counts
    assert counts["steps"] >= num_steps
    for name in ("forks", "preemptions", "cached_prompt_tokens", "accepted_draft_tokens"):
        assert counts[name] > 0, name
