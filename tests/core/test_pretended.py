"""A tiny model on a pretended device: the CPU's tokens, and nothing that a real device would trip over."""

from __future__ import annotations

import contextlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.pretend_cuda import JOURNAL, Steps, pretended, serving
from tests.helpers.pretend_cuda.device import PretendedEvent

import fwk
from fwk import SamplingParams
from fwk.plugins import answers
from fwk.worker.runner.in_flight import InFlight
from fwk.worker.runner.inputs import InputBuffers
from fwk.worker.runner.staging import StagingRing
from fwk_kit.testing.serving import TINY
from fwk_sampling.processors.penalties import Penalties

PROMPTS = [[1, 7, 3, 9] * 9, list(range(40, 75))]
"""Of several steps each that choose no token: nothing waits for those."""
TORCH = {name: "torch" for name in ("attention_backend", "operator_backend", "sampling_backend")}
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 2048,
    "max_running_requests": 8,
    "chunked_prefill_size": 6,
    "dtype": "float32",
    "check_blocks": True,
    **TORCH,
}
GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)


@cache
def on_cpu(folder: Path) -> list[list[int]]:
    """What the same operators say on the CPU."""
    return tokens_on_cpu(folder, GREEDY)


def tokens_on_cpu(folder: Path, sampling: SamplingParams, **options: Any) -> list[list[int]]:
    with fwk.LLM(str(folder), device="cpu", **OPTIONS | options) as llm:
        return [done.token_ids for done in llm.generate(PROMPTS, sampling)]


def elsewhere(folder: Path, sampling: SamplingParams = GREEDY, **options: Any) -> list[list[int]]:
    """The same on the pretended device; what happened while it generated is in the journal."""
    with serving(folder, **OPTIONS | options) as llm:
        assert llm.engine.info.chosen["devices"] == "pretended"
        return [done.token_ids for done in llm.generate(PROMPTS, sampling)]


def test_the_tokens_are_the_cpus(tiny_folder: Path) -> None:
    assert elsewhere(tiny_folder) == on_cpu(tiny_folder)
    assert JOURNAL.faults == []
    assert sum(JOURNAL.launches.values()) > 50, "nothing ran there"


def test_inputs_come_from_pinned_memory(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All those of a step in one copy."""
    steps = Steps(monkeypatch)
    elsewhere(tiny_folder)
    assert sum(n for where, n in JOURNAL.of_kind("pinned").items() if "packed" in where) <= len(steps.waits("launch"))
    staged = {where for kind, where in JOURNAL.copies if "runner/packed" in where}
    assert staged
    assert not [where for where in JOURNAL.of_kind("pageable") if "runner/packed" in where]


@pytest.fixture
def ring_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    real = StagingRing.__init__
    monkeypatch.setattr(StagingRing, "__init__", lambda self, device, where, size: real(self, device, where, 1))


@pytest.mark.sweep
@pytest.mark.usefixtures("ring_of_one")
def test_a_ring_of_one_without_events_is_overwritten_too_early(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the journal is for: it sees what the numbers, which the CPU holds, do not show."""
    monkeypatch.setattr(StagingRing, "sent", lambda self: None)
    assert elsewhere(tiny_folder) == on_cpu(tiny_folder)
    assert any("worker/runner/packed.py" in fault for fault in JOURNAL.faults)


@pytest.mark.usefixtures("ring_of_one")
def test_a_ring_of_one_is_waited_for_in_every_launch(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, steps = on_cpu(tiny_folder), Steps(monkeypatch)
    assert elsewhere(tiny_folder) == wanted
    assert JOURNAL.faults == []
    assert sum(steps.waits("launch")) >= len(steps.waits("launch")) - 1


@pytest.mark.sweep
def test_one_buffer_for_the_tokens_of_two_steps_is_not_enough(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = InFlight.__init__
    monkeypatch.setattr(InFlight, "__init__", lambda self, *parts, **more: real(self, *parts, **more | {"size": 1}))
    with contextlib.suppress(OverflowError):  # ids that are no tokens are nothing to decode
        assert elsewhere(tiny_folder) != on_cpu(tiny_folder)


def test_mixed_devices_are_refused(tiny_folder: Path) -> None:
    with pretended():
        there = torch.ones(3, device="privateuseone")
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)
    assert JOURNAL.faults


SAMPLED = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.9, top_k=20, seed=3, ignore_eos=True)


PENALISED = SamplingParams(
    max_tokens=8, temperature=0.0, logit_bias={50: 3.0}, frequency_penalty=1.9, repetition_penalty=1.1, ignore_eos=True
)
"""Says 50 until that has been said too often: the newest token counts."""


@pytest.mark.gate(1)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_launch_waits_for_nothing_and_a_collected_step_at_most_once(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    steps = Steps(monkeypatch)
    assert elsewhere(tiny_folder, sampling) == tokens_on_cpu(tiny_folder, sampling)
    assert JOURNAL.faults == []
    assert steps.halves[:3] == [("launch", 0), ("launch", 0), ("collect", 1)], "two steps are in flight"
    assert set(steps.waits("launch")) == {0}
    assert set(steps.waits("collect")) <= {0, 1}
    assert not JOURNAL.of_kind("blocking")


def test_one_that_says_it_reads_no_history_and_does_is_found_out(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Penalties, "reads_history", False)
    assert elsewhere(tiny_folder, PENALISED) != tokens_on_cpu(tiny_folder, PENALISED)


def test_tokens_read_before_their_event_are_not_the_tokens(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendedEvent, "wait", lambda self: None)
    monkeypatch.setattr(answers, "_guarded_class", lambda *_: None)  # a guard has the method that was there
    with pytest.raises(IndexError):  # -77 is no token, and no reason why there is none
        elsewhere(tiny_folder)


@pytest.mark.sweep
def test_inputs_that_forget_the_newest_tokens_say_something_else(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InputBuffers, "_send_with_newest", lambda self, forward, *_: self._send(forward))
    assert elsewhere(tiny_folder) != on_cpu(tiny_folder)


def test_log_probabilities_are_the_cpus(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They come with the tokens, in one copy."""
    asked = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2, ignore_eos=True)

    def logprobs(llm: fwk.LLM) -> list[float]:
        first, second = llm.generate(PROMPTS, [asked, GREEDY])
        assert (second.token_ids, second.logprobs) == (on_cpu(tiny_folder)[1], None)
        assert [found.token_id for found in first.logprobs or []] == first.token_ids
        return [found.logprob for found in first.logprobs or []]

    with fwk.LLM(str(tiny_folder), device="cpu", **OPTIONS) as llm:
        want = logprobs(llm)
    steps = Steps(monkeypatch)
    with serving(tiny_folder, steps, **OPTIONS) as llm:
        assert len(want) == 6
        assert logprobs(llm) == pytest.approx(want, abs=1e-4)
        assert set(steps.waits("launch")) == {0}
        assert set(steps.waits("collect")) <= {0, 1}
        assert not JOURNAL.of_kind("blocking")
    assert JOURNAL.faults == []


@pytest.mark.sweep
def test_slots_change_hands_while_steps_are_in_flight(tiny_folder: Path) -> None:
    """More requests than slots, of different lengths: a new sequence gets nothing chosen for the one before."""
    prompts = [[n, 3 * n % 200 + 5, 7] for n in range(1, 9)]
    params = [SamplingParams(max_tokens=1 + n % 4, temperature=0.0, ignore_eos=True) for n in range(8)]
    few = {**OPTIONS, "max_running_requests": 2}
    with fwk.LLM(str(tiny_folder), device="cpu", **few) as llm:
        want = [done.token_ids for done in llm.generate(prompts, params)]
    with serving(tiny_folder, **few) as llm:
        assert [done.token_ids for done in llm.generate(prompts, params)] == want
    assert JOURNAL.faults == []


@pytest.mark.sweep
def test_a_preempted_sequence_goes_on_with_the_tokens_it_had(tiny_folder: Path) -> None:
    """What a step in flight chose for it is computed again, or was accepted; never both, and never neither."""
    prompts = [[n, 5, 9, 2 * n] for n in range(1, 7)]
    grown = SamplingParams(max_tokens=30, temperature=0.8, seed=5, ignore_eos=True)
    tight = {**OPTIONS, "max_total_tokens": 96, "page_size": 4, "schedule_conservativeness": 0.05}
    with fwk.LLM(str(tiny_folder), device="cpu", **tight) as llm:
        want = [done.token_ids for done in llm.generate(prompts, grown)]
    with serving(tiny_folder, **tight) as llm:
        assert [done.token_ids for done in llm.generate(prompts, grown)] == want
        assert llm.engine.stats().preemptions > 0, "nothing was pre-empted"
    assert JOURNAL.faults == []


WITH: dict[str, dict[str, Any]] = {
    "n-gram drafts": {"speculative_algorithm": "ngram"},
    "n-gram trees": {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
    "cache tiers": {"prefix_cache": "hierarchical"},
    "int8 K/V": {"kv_cache_dtype": "int8"},
    "fp8 K/V": {"kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
    "no overlap": {"disable_overlap_schedule": True},
}


@pytest.mark.gate(3)
@pytest.mark.parametrize("options", WITH.values(), ids=WITH)
def test_features_say_what_they_say_on_the_cpu(tiny_folder: Path, options: dict[str, Any]) -> None:
    repeated = SamplingParams(max_tokens=8, temperature=0.0, logit_bias={50: 3.0, 51: 3.0}, ignore_eos=True)
    assert elsewhere(tiny_folder, repeated, **options) == tokens_on_cpu(tiny_folder, repeated, **options)
    assert JOURNAL.faults == []


@pytest.mark.sweep
def test_weights_are_encoded_where_they_will_be(tiny_folder: Path) -> None:
    """Not by the host, which would take minutes for a model of billions."""

    def launches(quantization: str) -> int:
        options: dict[str, Any] = {**OPTIONS, "quantization": quantization}
        with pretended() as plugins, fwk.LLM(str(tiny_folder), plugins=plugins, device="pretended", **options):
            return JOURNAL.launches.total()

    plain = launches("none")
    for quantization in ("int4", "int8", "fp8"):
        assert launches(quantization) > plain + 10 * TINY["num_hidden_layers"], quantization
