"""Penalties and temperature against transformers and OpenAI's formula."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.lazy import lazy

from fwk.types import SamplingParams
from fwk_sampling.processors.penalties import Penalties
from fwk_sampling.processors.temperature import Temperature

transformers = lazy("transformers")

VOCAB = 300
CLOSE = {"rtol": 1e-6, "atol": 1e-5}


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5


def random_text(length: int, seed: int) -> list[int]:
    return torch.randint(0, VOCAB // 4, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def openai(logits: torch.Tensor, output: list[int], frequency: float, presence: float) -> torch.Tensor:
    """mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, with c counted over the output."""
    expected = logits.double().clone()
    for token_id, count in Counter(output).items():
        expected[token_id] -= count * frequency + presence
    return expected


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0, 1000.0])
@pytest.mark.parametrize("num_prompt_tokens", [1, 20, 40])
def test_repetition_is_transformers_over_prompt_and_output(apply: Any, penalty: float, num_prompt_tokens: int) -> None:
    logits, text = random_logits(1), random_text(40, 1)
    logits[0, text[0]], logits[0, text[1]] = 0.0, -float("inf")
    out = apply(Penalties, logits, [{"repetition_penalty": penalty}], [text], [num_prompt_tokens])
    assert torch.equal(out, transformers.RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([text]), logits))


@pytest.mark.parametrize(("frequency", "presence"), [(0.7, 0.0), (0.0, 1.5), (0.3, -2.0), (-2.0, 2.0)])
def test_frequency_and_presence_are_openais_over_the_output(apply: Any, frequency: float, presence: float) -> None:
    logits, text = random_logits(1), random_text(500, 2)
    fields = {"frequency_penalty": frequency, "presence_penalty": presence}
    out = apply(Penalties, logits, [fields], [text], [100])
    torch.testing.assert_close(out[0].double(), openai(logits[0], text[100:], frequency, presence), **CLOSE)


def test_all_three_follow_one_another_on_the_rows_that_asked(apply: Any) -> None:
    logits, texts = random_logits(4), [random_text(30 + 10 * i, i) for i in range(4)]
    settings = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.25},
        {},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 0.8},
    ]
    out = apply(Penalties, logits, settings, texts, [10, 10, 10, 10])
    repeated = transformers.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([texts[0]]), logits[:1])[0]
    torch.testing.assert_close(out[0].double(), openai(repeated, texts[0][10:], 0.5, 0.25), **CLOSE)
    assert torch.equal(out[1], logits[1])
    torch.testing.assert_close(out[2].double(), openai(logits[2], texts[2][10:], 1.0, 0.0), **CLOSE)
    assert torch.equal(
        out[3:], transformers.RepetitionPenaltyLogitsProcessor(0.8)(torch.tensor([texts[3]]), logits[3:])
    )


def test_before_any_output_only_the_prompt_is_repeated(apply: Any) -> None:
    logits, text = random_logits(1), random_text(10, 3)
    fields = {"repetition_penalty": 1.5, "frequency_penalty": 1.0, "presence_penalty": 1.0}
    out = apply(Penalties, logits, [fields], [text])
    assert torch.equal(out, transformers.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([text]), logits))


def test_a_slot_forgets_its_sequence(make_context: Any, make_view: Any) -> None:
    processor = Penalties(make_context(VOCAB))
    logits = random_logits(1)
    for text in ([1, 2, 3], [4, 5, 6]):
        assert processor.add(5, SamplingParams(repetition_penalty=2.0))
        out = processor.apply(logits.clone(), make_view([text]))
        assert torch.equal(out, transformers.RepetitionPenaltyLogitsProcessor(2.0)(torch.tensor([text]), logits))
        processor.remove(5)
    assert processor.add(5, SamplingParams()) is False


def test_outputs_grow_and_shrink_with_drafts(make_context: Any, make_view: Any) -> None:
    processor = Penalties(make_context(VOCAB))
    processor.add(5, SamplingParams(frequency_penalty=1.0, repetition_penalty=1.2))
    logits = random_logits(1)
    for text in ([1, 2, 3], [1, 2, 3, 7, 7, 7], [1, 2, 3, 8]):  # two drafts are rejected on the way
        out = processor.apply(logits.clone(), make_view([text], [2]))
        repeated = transformers.RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([text]), logits)[0]
        torch.testing.assert_close(out[0].double(), openai(repeated, text[2:], 1.0, 0.0), **CLOSE)


def test_texts_that_grow_are_counted_as_a_whole(make_context: Any, make_view: Any) -> None:
    """Whatever was kept from the step before, among others and alone, with drafts in between or not."""
    draw = np.random.default_rng(4)
    kept = Penalties(make_context(VOCAB))
    fields = [{"frequency_penalty": 0.7}, {"repetition_penalty": 1.3, "presence_penalty": 0.4}, {}]
    texts = [draw.integers(0, 9, 4).tolist() for _ in fields]
    for i, some in enumerate(fields):
        kept.add(5 + i, SamplingParams(**some))
    for step in range(90):  # past the room that there is at first
        for text in texts:
            text += draw.integers(0, VOCAB, 1 + (step % 7 == 0)).tolist()
        logits = random_logits(3, seed=step)
        fresh = Penalties(make_context(VOCAB))
        for i, some in enumerate(fields):
            fresh.add(5 + i, SamplingParams(**some))
        if step % 5 == 0:
            view = make_view([[*text, 3, 3] for text in texts], [4] * 3)
            view.has_drafts = True
            kept.apply(logits.clone(), view)
        view = make_view(texts, [4] * 3)
        assert torch.equal(kept.apply(logits.clone(), view), fresh.apply(logits.clone(), view))
        alone = make_view(texts[:1], [4])
        assert torch.equal(kept.apply(logits[:1].clone(), alone), fresh.apply(logits[:1].clone(), alone))
        repeated = transformers.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([texts[1]]), logits[1:2])[0]
        found = kept.apply(logits.clone(), view)[1].double()
        torch.testing.assert_close(found, openai(repeated, texts[1][4:], 0.0, 0.4), **CLOSE)


def test_temperature_is_transformers(apply: Any) -> None:
    logits = random_logits(8)
    temperatures = [0.3, 1.0, 0.0, 2.0, 100.0, 0.7, 1.3, 0.5]
    out = apply(Temperature, logits, [{"temperature": t} for t in temperatures])
    for row, t in enumerate(temperatures):
        expected = (
            transformers.TemperatureLogitsWarper(t)(torch.tensor([[1]]), logits[row : row + 1])[0] if t else logits[row]
        )
        torch.testing.assert_close(out[row], expected, rtol=1e-6, atol=0)


def test_temperature_of_few_rows_leaves_the_others_bit_for_bit(apply: Any) -> None:
    logits = random_logits(8)
    out = apply(Temperature, logits, [{}, {}, {"temperature": 0.25}])
    expected = logits.clone()
    expected[2] *= 4
    assert torch.equal(out, expected)


def test_a_tiny_temperature_overflows_nothing(apply: Any) -> None:
    logits = random_logits(1) * 1000
    for temperature, num_left in ((1e-300, 1), (1e-5, logits.numel())):
        out = apply(Temperature, logits, [{"temperature": temperature}])
        assert out.isfinite().sum() == num_left
        assert out.argmax() == logits.argmax()


def test_greedy_rows_keep_their_temperature(make_context: Any) -> None:
    processor = Temperature(make_context(VOCAB))
    assert [processor.add(i, SamplingParams(temperature=t)) for i, t in enumerate([0.0, 1.0, 0.5])] == [
        False,
        False,
        True,
    ]
