"""Steps that are launched while drafts are being verified: the device alone knows how long its sequences are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import EXACT, Steps, serving, triton_kernels
from tests.helpers.pretend_cuda.steps import Said, assert_same, said
from tests.helpers.tiny import save_llama

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.interfaces.speculative import Drafts, DraftView
from fwk.interfaces.step import LaunchedStep
from fwk.types import EngineStats, ScheduledSequence
from fwk.worker.runner.in_flight import InFlight
from fwk_kit.testing.serving import TINY
from fwk_speculative.drafting import draft_ahead
from fwk_speculative.drafting.draft_ahead import ComingDrafts
from fwk_speculative.drafting.draft_tree import DraftTree
from fwk_speculative.drafting.notes import StepNotes
from fwk_speculative.drafting.verify import Verifier
from fwk_speculative.ngram.decoder import NgramDecoder

pytestmark = interpreted

PROMPTS = [list(range(40, 53)), [5, 5, 6]]
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 256,
    "max_running_requests": 2,
    "chunked_prefill_size": 16,
    "random_seed": 7,
    **EXACT,
}
NGRAM: dict[str, Any] = {
    "attention_backend": "triton",
    "speculative_algorithm": "ngram",
    "speculative_num_draft_tokens": 3,
    "speculative_adaptive": False,
}


def asks(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 14, "temperature": 0.0, "ignore_eos": True, **more})


EAGER = {"disable_cuda_graph": True}
PRESSED = {**EAGER, "max_total_tokens": 48, "prefix_cache": "none"}
TREES: dict[str, Any] = {**EAGER, "speculative_num_draft_tokens": 6, "speculative_ngram_max_bfs_breadth": 2}
SAMPLES_IN_TRITON = {**EAGER, "sampling_backend": "triton"}
TWO_SEEDS = [asks(temperature=1.1, seed=3), asks(temperature=0.8, seed=4, top_k=30, top_p=0.95, min_p=0.01)]
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "captured": (asks(), {"cuda_graph_bs": (2,)}),
    "eager": (asks(), EAGER),
    "of adaptive depth": (asks(), {**EAGER, "speculative_adaptive": True}),
    "keys in parts": (asks(), {**EAGER, "triton_attention_split_tile_size": 16}),
    "that end early": ([asks(max_tokens=5), asks()], EAGER),
    "log-probabilities": ([asks(logprobs=2), asks()], EAGER),
    "alongside a sampled one": ([asks(), asks(temperature=0.9, seed=3)], EAGER),
    "alongside a grammar": ([asks(), asks(grammar=GrammarRequest("regex", "(ab|ac){20}"))], EAGER),
    "sampled, captured": (TWO_SEEDS, {}),
    "sampled, eager": (TWO_SEEDS, EAGER),
    "sampled without seeds": (asks(temperature=1.0, logprobs=2), EAGER),
    "sampled by Triton": ([asks(temperature=1.1, seed=3), asks()], SAMPLES_IN_TRITON),
    "sampled with a bias": (asks(temperature=0.9, seed=5, logit_bias={7: 2.0}), EAGER),
    "sampled alongside a penalty": ([asks(temperature=1.1, seed=3), asks(frequency_penalty=0.4)], EAGER),
    "sampled, pre-empted": (asks(max_tokens=24, temperature=1.1, seed=3), PRESSED),
    "pre-empted": (asks(max_tokens=24), PRESSED),
    "trees": ([asks(max_tokens=32, logprobs=2), asks(max_tokens=32)], TREES),
    "trees, other steps captured": (asks(max_tokens=32), {**TREES, "disable_cuda_graph": False}),
    "trees of adaptive depth": (asks(max_tokens=32), {**TREES, "speculative_adaptive": True}),
    "trees alongside a sampled one": ([asks(max_tokens=32), asks(temperature=0.9, seed=3)], TREES),
    "trees alongside a penalty": ([asks(max_tokens=32), asks(frequency_penalty=0.4)], TREES),
    "trees that end early": ([asks(max_tokens=9), asks(max_tokens=32)], TREES),
    "trees, pre-empted": (asks(max_tokens=32), {**TREES, **PRESSED, "page_size": 4}),
}


def on_cpu(model: Path, sampling: Any) -> Said:
    with fwk.LLM(str(model), device="cpu", **OPTIONS) as llm:
        return said(llm, sampling, PROMPTS)


def foretell(patch: pytest.MonkeyPatch, texts: list[list[int]]) -> None:
    """Have the decoder know what is coming, and be wrong about one token in six.

    In trees both what is coming and another token follow each node, the latter first at one place in three.
    """

    def propose(self: NgramDecoder, view: DraftView) -> Drafts:
        most = np.minimum(view.max_drafts, self._depth.of(view.slots))
        ahead = np.broadcast_to(view.ahead, most.shape)
        rows = zip(*(x.tolist() for x in (view.slots, view.num_tokens, most, ahead)), strict=True)
        texts = [(view.token_ids[slot, :length].tolist(), *counts) for slot, length, *counts in rows]
        if not self.drafts_trees:
            return Drafts([continued(known, count + more) for known, count, more in texts])
        trees = [grown(known, count, more) for known, count, more in texts]
        return Drafts([tokens for tokens, _ in trees], [parents for _, parents in trees])

    def other(token: int) -> int:
        return (token + 1) % TINY["vocab_size"]

    def whole(known: list[int]) -> list[int]:
        return next((text for text in texts if text[: len(known)] == known), known)

    def continued(known: list[int], count: int) -> list[int]:
        text = whole(known)
        places = range(len(known), min(len(known) + count, len(text)))
        return [text[i] if i % 6 else other(text[i]) for i in places]

    def grown(known: list[int], most: int, ahead: int) -> tuple[list[int], list[int]]:
        tokens = continued(known, ahead)
        parents = list(range(-1, len(tokens) - 1))
        at = len(tokens) - 1
        for i, token in enumerate(whole(known)[len(known) + ahead :][: most // 2], len(known) + ahead):
            is_second = i % 3 == 0
            parents += [at, at]
            at = len(tokens) + is_second
            tokens += [other(token), token] if is_second else [token, other(token)]
        return tokens, parents

    patch.setattr(NgramDecoder, "propose", propose)


def elsewhere(
    model: Path, sampling: Any, patch: pytest.MonkeyPatch, wanted: Said, **options: Any
) -> tuple[Said, EngineStats, Steps]:
    steps = Steps(patch)
    foretell(patch, [prompt + tokens for prompt, (tokens, _) in zip(PROMPTS, wanted, strict=True)])
    with triton_kernels(), serving(model, steps, **OPTIONS | NGRAM | options) as llm:
        return said(llm, sampling, PROMPTS), llm.engine.stats(), steps


def check(found: Said, wanted: Said, stats: EngineStats, steps: Steps, least: float = 0.4) -> None:
    """least: of the drafts that are accepted."""
    assert_same(found, wanted)
    steps.assert_one_wait()
    assert least * stats.draft_tokens < stats.accepted_draft_tokens < stats.draft_tokens
    assert steps.num_in_flight().count(2) > 3


class Trees:
    """Trees of sequences that run ahead: accepted paths that do not go by first children alone, and trees in flight."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.detours: list[list[int]] = []
        self.num_followed = 0  # steps with trees that were launched while another step's trees were being verified
        self._real = Verifier.gained, InFlight.add
        patch.setattr(Verifier, "gained", lambda own, *parts: self._gained(own, *parts))
        patch.setattr(InFlight, "add", lambda own, step: self._add(own, step))

    def _gained(
        self, own: Verifier, scheduled: ScheduledSequence, picked: list[int], row: int, tree: DraftTree | None
    ) -> Any:
        result = self._real[0](own, scheduled, picked, row, tree)
        path = tree.path if tree is not None and own._made.has_moved(scheduled.slot) else []
        if tree is not None and any(tree.parents.index(tree.parents[node]) != node for node in path):
            self.detours.append(path)
        return result

    def _add(self, own: InFlight, step: LaunchedStep) -> Any:
        others = [StepNotes.of(pending.step).stored for pending in own._pending]
        self.num_followed += StepNotes.of(step).stored is not None and any(one is not None for one in others)
        return self._real[1](own, step)


QUICK = "trees alongside a sampled one"
"""The gate's: trees of drafts are followed, and a sequence without any runs ahead next to them."""


@pytest.mark.parametrize("name", [n if n == QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in ASKED])
def test_steps_run_ahead_of_drafts(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    sampling, options = ASKED[name]
    wanted = on_cpu(tiny_folder, sampling)
    trees = Trees(monkeypatch)
    found, stats, steps = elsewhere(tiny_folder, sampling, monkeypatch, wanted, **options)
    check(found, wanted, stats, steps, 0.2 if "trees" in name else 0.4)
    assert (len(trees.detours) > 1) == (trees.num_followed > 1) == ("trees" in name), trees.detours
    assert (stats.preemptions > 0) == ("pre-empted" in name)


def save_loops(folder: Path, period: int) -> Path:
    """A model that repeats a few tokens: the next token depends on the newest one alone."""
    save_llama(folder, seed=1, tie_word_embeddings=False)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, weight in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    embedding = tensors["model.embed_tokens.weight"]
    tokens = torch.arange(len(embedding))
    after = torch.where(tokens % period < period - 1, tokens + 1, tokens - period + 1).clamp(max=len(embedding) - 1)
    tensors["lm_head.weight"] = torch.zeros_like(embedding).index_copy_(0, after, embedding)
    save_file(tensors, file, {"format": "pt"})
    return folder


@pytest.mark.sweep
@pytest.mark.parametrize("decoder", ["ngram", pytest.param("suffix", marks=pytest.mark.sweep)])
@pytest.mark.parametrize("period", [3, pytest.param(1, marks=pytest.mark.sweep)])
def test_text_that_repeats_fewer_tokens_than_are_in_flight_is_drafted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, period: int, decoder: str
) -> None:
    model, sampling = save_loops(tmp_path / "model", period), asks(max_tokens=32)
    options = {**OPTIONS, "load_format": "auto"}
    with fwk.LLM(str(model), device="cpu", **options) as llm:
        wanted = said(llm, sampling, PROMPTS)
    assert all(tokens[8:-period] == tokens[8 + period :] for tokens, _ in wanted)
    steps = Steps(monkeypatch)
    options |= {**NGRAM, **EAGER, "speculative_algorithm": decoder}
    with triton_kernels(), serving(model, steps, **options) as llm:
        found, stats = said(llm, sampling, PROMPTS), llm.engine.stats()
    assert found == wanted
    steps.assert_one_wait()
    assert steps.num_in_flight().count(2) > 3
    assert stats.accepted_draft_tokens > 0.5 * stats.generation_tokens, stats


@pytest.mark.sweep
def test_who_drafts_ahead_gives_no_probabilities(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts that are drawn the host looks up where they stand."""

    def propose(self: NgramDecoder, view: DraftView) -> Drafts:
        return Drafts([[5] for _ in view.slots], probabilities=torch.ones(len(view.slots), TINY["vocab_size"]))

    monkeypatch.setattr(NgramDecoder, "propose", propose)
    options = OPTIONS | NGRAM | EAGER
    with triton_kernels(), serving(tiny_folder, **options) as llm:  # asked by the request that loading rehearses
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        (trouble,) = llm.engine.stats().troubles
    assert "'ngram'" in trouble
    assert "probabilities of drafts that are made ahead or late" in trouble


Paths = set[tuple[int, ...]]


def paths_of(tokens: list[int], parents: list[int]) -> Paths:
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def test_what_comes_after_a_tree_in_flight_follows_the_path_that_is_held_to_be_right() -> None:
    """By paths written out: of the continuation's own path the tree accepts what is among its paths, and one more."""
    random = np.random.default_rng(1)
    lengths: set[int] = set()

    def tree(count: int) -> tuple[list[int], list[int]]:
        nodes: list[tuple[int, int]] = []
        while len(nodes) < count:  # children of one parent differ
            node = int(random.integers(-1, len(nodes))), int(random.integers(0, 3))
            if node not in nodes:
                nodes.append(node)
        return [token for _, token in nodes], [parent for parent, _ in nodes]

    for _ in range(500):
        tokens, parents = tree(int(random.integers(0, 12)))
        verified, above = tree(int(random.integers(0, 8)))
        is_chain = bool(random.integers(0, 4) == 0)
        if is_chain:
            above = list(range(-1, len(verified) - 1))
        own: tuple[int, ...] = ()
        at = -1
        while at in parents:
            at = parents.index(at)
            own = (*own, tokens[at])
        among = paths_of(verified, above)
        accepted = next((n for n in range(len(own)) if own[: n + 1] not in among), len(own))
        lengths.add(accepted)
        until = own[: accepted + 1]
        wanted = {path[len(until) :] for path in paths_of(tokens, parents) if path[: len(until)] == until} - {()}
        drafts = Drafts([tokens], [parents])
        draft_ahead.leave_after(drafts, [ComingDrafts(verified, None if is_chain else above)])
        assert isinstance(drafts.token_ids, list)
        assert isinstance(drafts.parents, list)
        assert paths_of(drafts.token_ids[0], drafts.parents[0]) == (set() if accepted == len(own) else wanted)
        levels = max(map(len, among), default=0)
        assert ComingDrafts(verified, None if is_chain else above).num_levels == levels
    assert lengths >= {0, 1, 2, 3}
