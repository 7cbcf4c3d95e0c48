"""The zoo's processors, each against a plain numpy reference over thousands of random rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fwk.interfaces.sampling import LogitsProcessor, SamplingContext
from fwk.types import SamplingParams
from fwk_kit.testing.base import installed
from fwk_sampling.zoo.dry import Dry, run_lengths
from fwk_sampling.zoo.dynamic_temperature import DynamicTemperature
from fwk_sampling.zoo.mirostat import Mirostat
from fwk_sampling.zoo.truncations import TopA, TopNSigma, Typical
from fwk_sampling.zoo.watermark import Watermark, favoured
from fwk_sampling.zoo.xtc import Xtc

VOCAB = 47
ROWS = 40


@pytest.fixture(params=[15, pytest.param(250, marks=pytest.mark.sweep)])
def rounds(request: pytest.FixtureRequest) -> int:
    """Of ``ROWS`` rows for each processor."""
    return request.param


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row.astype(np.float64) - row.max())
    return weights / weights.sum()


def top_n_sigma(row: np.ndarray, extra: dict[str, Any]) -> np.ndarray:
    finite = row[np.isfinite(row)].astype(np.float64)
    return row >= finite.max() - extra["top_n_sigma"] * math.sqrt(((finite - finite.mean()) ** 2).mean())


def typical(row: np.ndarray, extra: dict[str, Any]) -> np.ndarray:
    p = softmax(row)
    entropy = -sum(x * math.log(x) for x in p if x > 0)
    distance = [abs(-math.log(x) - entropy) if x > 0 else math.inf for x in p]
    kept, mass = np.zeros(len(row), bool), 0.0
    for i in sorted(range(len(row)), key=lambda i: distance[i]):
        if mass >= extra["typical_p"]:
            break
        kept[i], mass = True, mass + p[i]
    return kept


def top_a(row: np.ndarray, extra: dict[str, Any]) -> np.ndarray:
    p = softmax(row)
    return p >= extra["top_a"] * p.max() ** 2


TRUNCATIONS: list[tuple[type[LogitsProcessor], Callable[..., np.ndarray], list[dict[str, Any]]]] = [
    (TopNSigma, top_n_sigma, [{"top_n_sigma": 0.3}, {"top_n_sigma": 1.0}, {"top_n_sigma": 2.5}]),
    (Typical, typical, [{"typical_p": 0.05}, {"typical_p": 0.5}, {"typical_p": 0.97}]),
    (TopA, top_a, [{"top_a": 0.1}, {"top_a": 0.5}, {"top_a": 1.0}]),
]


def random_rows(seed: int) -> torch.Tensor:
    """[ROWS, VOCAB] of all temperatures; some tokens are forbidden already."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(ROWS, VOCAB)) * generator.uniform(0.05, 6, (ROWS, 1))
    rows[generator.random(rows.shape) < 0.1] = -np.inf
    rows[:, 0] = 0.0
    return torch.from_numpy(rows.astype(np.float32))


@pytest.mark.parametrize(
    ("kind", "reference", "settings"), TRUNCATIONS, ids=lambda value: getattr(value, "__name__", "")
)
def test_truncations_keep_what_the_definition_keeps(
    apply: Any,
    kind: type[LogitsProcessor],
    reference: Callable[..., np.ndarray],
    settings: list[dict[str, Any]],
    rounds: int,
) -> None:
    wrong = 0
    for seed in range(rounds):
        logits = random_rows(seed)
        asked = [settings[i % len(settings)] for i in range(ROWS)]
        out = apply(kind, logits, [{"extra": extra} for extra in asked])
        for row, extra in enumerate(asked):
            kept = reference(logits[row].numpy(), extra) & np.isfinite(logits[row].numpy())
            wrong += int((np.isfinite(out[row].numpy()) != kept).any())
        assert torch.equal(out[out.isfinite()], logits[out.isfinite()])
    assert wrong <= 2  # a token at the very edge, where sums in another order round differently


@pytest.mark.parametrize(
    ("kind", "extra"),
    [
        (TopNSigma, {"top_n_sigma": 1.0}),
        (Typical, {"typical_p": 0.2}),
        (TopA, {"top_a": 0.9}),
        (Xtc, {"xtc_probability": 1.0}),
        (DynamicTemperature, {"dynatemp_range": 0.5}),
        (Mirostat, {"mirostat": 2}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_greedy_requests_are_left_alone(apply: Any, kind: type[LogitsProcessor], extra: dict[str, Any]) -> None:
    logits = random_rows(0)
    out = apply(kind, logits, [{"temperature": 0.0, "extra": extra}] * ROWS)
    assert torch.equal(out, logits)


def test_xtc_excludes_all_probable_tokens_but_the_least(apply: Any, rounds: int) -> None:
    for seed in range(rounds):
        logits = random_rows(seed)
        out = apply(Xtc, logits, [{"extra": {"xtc_probability": 1.0, "xtc_threshold": 0.15}}] * ROWS)
        for row in range(ROWS):
            p = softmax(logits[row].numpy())
            probable = sorted(np.flatnonzero(p >= 0.15), key=lambda i: p[i])
            gone = set(np.flatnonzero(~np.isfinite(out[row].numpy()) & np.isfinite(logits[row].numpy())))
            assert gone == set(probable[1:]), (seed, row)


def test_xtc_acts_as_often_as_it_is_told_and_by_seed_and_position_alone(make_context: Any, make_view: Any) -> None:
    processor = Xtc(make_context(4))
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    acted: list[bool] = []
    for length in range(1, 4001):
        if length == 1:
            processor.add(5, SamplingParams(extra={"xtc_probability": 0.3, "xtc_threshold": 0.1}))
        view = make_view([[1] * 2])
        view.num_tokens = np.array([length])
        out = processor.apply(logits[None].clone(), view)[0]
        assert torch.equal(out, processor.apply(logits[None].clone(), view)[0])
        acted.append(bool(out[0] == -torch.inf))
    assert abs(np.mean(acted) - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 4000)


def penalties(text: Sequence[int], extra: dict[str, Any], breakers: set[int]) -> np.ndarray:
    """[VOCAB]: DRY's definition, by comparing the text's end with every earlier place."""
    last_n, allowed = extra["dry_penalty_last_n"], extra["dry_allowed_length"]
    text = list(text)[-last_n:] if last_n > 0 else list(text)
    longest = np.zeros(VOCAB, int)
    for i in range(1, len(text)):
        length = 0
        while length < i and text[i - 1 - length] == text[-1 - length] and text[-1 - length] not in breakers:
            length += 1
        longest[text[i]] = max(longest[text[i]], length)
    out = extra["dry_multiplier"] * 1.75 ** (longest - float(allowed))
    out[longest < allowed] = 0.0
    out[list(breakers)] = 0.0
    return out


@pytest.mark.parametrize("size", [3, 12])
def test_dry_penalises_what_prolongs_a_repetition(make_context: Any, make_view: Any, size: int, rounds: int) -> None:
    names = [b"a", b"b: c", b"*"] + [b"x%d" % i for i in range(VOCAB - 3)]
    breakers = {1, 2}
    context: SamplingContext = make_context(VOCAB)
    context = SamplingContext(
        context.vocab_size, context.num_slots, context.device, context.eos_token_ids, token_bytes=lambda: names
    )
    generator = np.random.default_rng(size)
    for _ in range(5 * rounds):  # of 8 rows
        texts = [generator.integers(0, size, generator.integers(1, 40)).tolist() for _ in range(8)]
        asked = [
            {"dry_multiplier": 0.8, "dry_allowed_length": int(a), "dry_penalty_last_n": int(n)}
            for a, n in zip(generator.integers(1, 4, 8), generator.choice([-1, 5, 20], 8), strict=True)
        ]
        processor = Dry(context)
        for row, extra in enumerate(asked):
            assert processor.add(5 + row, SamplingParams(extra=extra))
        out = processor.apply(torch.zeros(8, VOCAB), make_view(texts)).numpy()
        for row, (text, extra) in enumerate(zip(texts, asked, strict=True)):
            np.testing.assert_allclose(out[row], -penalties(text, extra, breakers), rtol=1e-6)


def test_dry_on_a_long_repetition_is_bounded() -> None:
    lengths = run_lengths(np.full(20_000, 7, np.int32), np.array([], np.int32))
    assert lengths.max() == 128


def test_dynamic_temperature_follows_the_entropy(apply: Any, rounds: int) -> None:
    settings = {"temperature": 0.8, "extra": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.5}}
    for seed in range(rounds):
        logits = random_rows(seed)
        out = apply(DynamicTemperature, logits, [settings] * ROWS)
        for row in range(ROWS):
            values = logits[row].numpy()
            p = softmax(values)
            entropy = -sum(x * math.log(x) for x in p if x > 0)
            share = entropy / math.log(np.isfinite(values).sum())
            temperature = 0.3 + (1.3 - 0.3) * share**1.5
            finite = np.isfinite(values)
            np.testing.assert_allclose(
                out[row].numpy()[finite] / 0.8, values[finite] / temperature, rtol=1e-4, atol=1e-6
            )


def test_a_watermark_is_detected_and_plain_text_is_not(make_context: Any, make_view: Any) -> None:
    """Kirchenbauer et al. 2023, equation 3: z of marked text is large, of other text below 4."""
    generator = np.random.default_rng(0)
    processor = Watermark(make_context(VOCAB))
    processor.add(5, SamplingParams(extra={"watermark": True, "watermark_gamma": 0.25, "watermark_delta": 3.0}))
    texts = {"marked": [1], "plain": [1]}
    for _ in range(300):
        for name, text in texts.items():
            logits = torch.from_numpy(generator.normal(size=(1, VOCAB)).astype(np.float32))
            if name == "marked":
                logits = processor.apply(logits, make_view([text]))
            text.append(int(generator.choice(VOCAB, p=softmax(logits[0].numpy()))))
    z = {}
    for name, text in texts.items():
        hits = sum(token in favoured(before, VOCAB, 0.25) for before, token in pairwise(text))
        share = int(0.25 * VOCAB) / VOCAB
        z[name] = (hits - share * 300) / math.sqrt(300 * share * (1 - share))
    assert z["marked"] > 8
    assert abs(z["plain"]) < 4


def test_a_watermark_favours_a_share_of_the_tokens_by_the_one_before(apply: Any, rounds: int) -> None:
    """Algorithm 2 of the paper: the generator seeded by the token before, and ``delta`` for the favoured."""
    settings = [(0.5, 2.0), (0.25, 3.0), (0.9, 0.5)]
    for seed in range(rounds):
        logits = random_rows(seed)
        texts = np.random.default_rng(seed).integers(0, VOCAB, (ROWS, 3)).tolist()
        asked = [settings[i % 3] for i in range(ROWS)]
        fields = [{"extra": {"watermark": True, "watermark_gamma": g, "watermark_delta": d}} for g, d in asked]
        out = apply(Watermark, logits, fields, texts)
        for row, (gamma, delta) in enumerate(asked):
            generator = np.random.Generator(np.random.PCG64(15_485_863 * (texts[row][-1] + 1)))
            wanted = logits[row].numpy().copy()
            wanted[generator.permutation(VOCAB)[: int(gamma * VOCAB)]] += np.float32(delta)
            np.testing.assert_array_equal(out[row].numpy(), wanted)


class _Mirostat:
    """llama.cpp's two functions, a sequence at a time."""

    def __init__(self, version: int, tau: float, eta: float, temperature: float) -> None:
        self.version, self.tau, self.eta, self.temperature = version, tau, eta, temperature
        self.mu = 2 * tau

    def kept(self, row: np.ndarray) -> np.ndarray:
        """[vocab_size] float64: the distribution to pick from."""
        p = softmax(row / self.temperature)
        order = sorted(range(len(p)), key=lambda i: -p[i])
        if self.version == 1:
            some = [p[i] for i in order[:100] if p[i] > 0]
            t = [math.log((i + 2) / (i + 1)) for i in range(len(some) - 1)]
            b = [math.log(some[i] / some[i + 1]) for i in range(len(some) - 1)]
            s_hat = sum(x * y for x, y in zip(t, b, strict=True)) / sum(x * x for x in t)
            epsilon = s_hat - 1
            k = (epsilon * 2**self.mu / (1 - len(p) ** -epsilon)) ** (1 / s_hat)
            left = order[: max(int(min(k, len(p))), 1)]
        else:
            left = [i for i in order if p[i] > 0 and -math.log2(p[i]) <= self.mu] or order[:1]
        out = np.zeros(len(p))
        out[left] = p[left]
        return out / out.sum()

    def picked(self, kept: np.ndarray, token: int) -> None:
        self.mu -= self.eta * (-math.log2(kept[token]) - self.tau)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.sweep)])
def test_mirostat_is_that_of_the_paper_and_steers_to_its_surprise(
    make_context: Any, make_view: Any, version: int, times: int
) -> None:
    generator = np.random.default_rng(version)
    wrong = 0
    for sequence, (tau, temperature) in enumerate([(1.0, 1.0), (2.0, 0.7), (3.0, 1.5), (2.5, 1.0)] * times):
        extra = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": 0.1}
        processor = Mirostat(make_context(VOCAB))
        assert processor.add(5, SamplingParams(temperature=temperature, extra=extra))
        reference, text, surprises = _Mirostat(version, tau, 0.1, temperature), [1], list[float]()
        for _ in range(250):
            logits = torch.from_numpy(generator.normal(size=(1, VOCAB)).astype(np.float32) * 2)
            logits[0, generator.random(VOCAB) < 0.05] = -torch.inf
            kept = reference.kept(logits[0].double().numpy())
            out = processor.apply(logits, make_view([text]))[0].numpy()
            wrong += int((np.isfinite(out) != (kept > 0)).any())
            token = int(generator.choice(VOCAB, p=kept))
            reference.picked(kept, token)
            surprises.append(-math.log2(kept[token]))
            processor.ends(5, [token])
            text.append(token)
        assert processor._states[5].bound == pytest.approx(reference.mu, abs=1e-3), sequence
        assert np.mean(surprises[50:]) == pytest.approx(tau, abs=0.2)
    assert wrong <= max(1, times // 2)  # of 1,000 rows each: a token at the very edge


def test_mirostat_follows_drafts_and_comes_back_after_a_pre_emption(make_context: Any, make_view: Any) -> None:
    settings = SamplingParams(extra={"mirostat": 2, "mirostat_tau": 1.5, "mirostat_eta": 0.3})
    rows = random_rows(3)[:12]
    step_by_step, at_once = Mirostat(make_context(VOCAB)), Mirostat(make_context(VOCAB))
    for processor in (step_by_step, at_once):
        processor.add(5, settings)
    text, wanted = [4, 2], list[torch.Tensor]()
    for row in rows:
        wanted.append(step_by_step.apply(row[None].clone(), make_view([text]))[0])
        text.append(int(wanted[-1].argmax()))
        step_by_step.ends(5, text[-1:])
        step_by_step.remove(5)  # it leaves its slot and comes back
        step_by_step.add(5, settings)
    view = make_view([text])
    for start, end, stand in ((0, 3, 2), (2, 6, 4), (6, 12, 6)):  # some drafts do not stand
        view.slots = np.full(end - start, 5)
        view.num_tokens = np.arange(start, end) + 2
        out = at_once.apply(rows[start:end].clone(), view)
        for place in range(start, end):
            assert torch.equal(out[place - start], wanted[place]), place
        at_once.ends(5, text[start + 2 : start + 2 + stand])
    assert at_once._states[5].bound == pytest.approx(_bound_of(rows, wanted, text[2:], 1.5, 0.3), abs=1e-4)


def _bound_of(rows: torch.Tensor, kept: list[torch.Tensor], tokens: list[int], tau: float, eta: float) -> float:
    bound = 2 * tau
    for row, left, token in zip(rows, kept, tokens, strict=True):
        assert row[token] == left[token]
        bound -= eta * (-float(left.double().log_softmax(-1)[token]) / math.log(2) - tau)
    return bound


def test_fields_out_of_range_are_refused() -> None:
    params = {
        name: field
        for item in installed().family("logits_processors")
        for name, field in getattr(item.declaration.params, "model_fields", {}).items()
    }
    assert {"typical_p", "top_n_sigma", "top_a", "xtc_probability", "dry_multiplier", "dynatemp_range"} <= set(params)
