"""Trees of drafts behind which the next step is launched: the device alone knows which path of them was accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import KINDS, write
from tests.helpers.draft_heads import knows_words, save_eagle3, save_medusa, save_mtp
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import EXACT, Steps, serving, triton_kernels
from tests.helpers.pretend_cuda.steps import Said, assert_same, said
from tests.helpers.tiny import save_llama

import fwk
from fwk import SamplingParams
from fwk.engine.scheduler import Scheduler
from fwk.engine.sequence import Status
from fwk.types import EngineStats
from fwk_speculative.drafting.draft_tree import DraftTree, accepted_in_trees
from fwk_speculative.drafting.drafting import DecoderDrafting

pytestmark = interpreted

PROMPTS = [[1, 7, 3, 9] * 5, [5, 5, 6]]  # the first comes in chunks
WORDS = [21, 77, 130, 200, 251]  # all that the target says, and its heads know
OPTIONS: dict[str, Any] = {
    "max_total_tokens": 512,
    "max_running_requests": 2,
    "chunked_prefill_size": 16,
    "page_size": 4,
    **EXACT,
}
NUM_DRAFTS = 9
TREES: dict[str, Any] = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": NUM_DRAFTS,
    "speculative_adaptive": False,
}
NGRAMS: dict[str, Any] = {
    "speculative_algorithm": "ngram",
    "speculative_ngram_max_bfs_breadth": 3,
    "speculative_num_draft_tokens": NUM_DRAFTS,
    "speculative_adaptive": False,
}
EAGER = {"disable_cuda_graph": True}
PRESSED = {**EAGER, "max_total_tokens": 72, "schedule_conservativeness": 0.0}


def asks(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 26, "temperature": 0.0, "ignore_eos": True, **more})


SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "seed": 3, "allowed_token_ids": WORDS}
Case = tuple[str, Any, dict[str, Any]]
ASKED: dict[str, Case] = {
    "EAGLE-3": ("eagle3", [asks(max_tokens=4), asks(max_tokens=42, logprobs=2)], EAGER),
    "MTP": ("mtp", [asks(max_tokens=34, logprobs=2), asks()], EAGER),
    "MTP, pre-empted": ("mtp", asks(), PRESSED),
    "Medusa": ("medusa", asks(), EAGER),
    "Medusa of adaptive depth": ("medusa", asks(), {**EAGER, "speculative_adaptive": True}),
    "Medusa alongside a sampled one": ("medusa", [asks(), asks(temperature=0.9, top_k=3, seed=3)], EAGER),
    "Medusa, sampled": ("medusa", [asks(**SAMPLED, logprobs=2), asks(**SAMPLED, max_tokens=40)], EAGER),
    "EAGLE-3, sampled": ("eagle3", [asks(**SAMPLED), asks(max_tokens=40, **SAMPLED)], EAGER),
    "MTP, sampled": ("mtp", asks(temperature=0.8, min_p=0.1, seed=5), EAGER),
    "n-grams, sampled": ("ngram", [asks(max_tokens=48, **SAMPLED), asks(**SAMPLED)], EAGER),
    "n-grams, sampled and pre-empted": ("ngram", asks(max_tokens=34, **SAMPLED), PRESSED),
    "Medusa, sampled and pre-empted": ("medusa", asks(**SAMPLED), PRESSED),
    "Medusa of adaptive depth, sampled": ("medusa", asks(**SAMPLED), {**EAGER, "speculative_adaptive": True}),
    "Medusa with biases": ("medusa", asks(logit_bias=dict.fromkeys(WORDS, 1.0)), EAGER),
    "Medusa, sampled, alongside a penalty": (
        "medusa",
        [asks(max_tokens=48, **SAMPLED), asks(frequency_penalty=0.4, **SAMPLED)],
        EAGER,
    ),
    "Medusa alongside a penalty": ("medusa", [asks(), asks(frequency_penalty=0.4)], EAGER),
    "Medusa, pre-empted": ("medusa", asks(), PRESSED),
    "n-grams": ("ngram", [asks(max_tokens=48, logprobs=2), asks(max_tokens=34)], EAGER),
    "n-grams, pre-empted": ("ngram", asks(max_tokens=34), PRESSED),
    "Medusa that ends early": ("medusa", [asks(max_tokens=9), asks()], EAGER),
    "Medusa, quantised K/V": ("medusa", asks(), {**EAGER, "kv_cache_dtype": "int8"}),
}
QUICK = ("Medusa alongside a sampled one", "MTP")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "target", seed=1, tie_word_embeddings=False)
    only_words(folder / "target", "lm_head.weight")
    knows_words(save_eagle3(folder / "eagle3"), WORDS)
    only_words(save_medusa(folder / "medusa", 4), *(f"{i}.1.weight" for i in range(4)))
    only_words(save_mtp(folder / "mtp"), "lm_head.weight")
    return folder


def only_words(model: Path, *names: str) -> None:
    """Leave nothing in these projections to say but words: a text of a few is often foretold, if seldom first."""
    tensors = load_file(model / "model.safetensors")
    for name in names:
        others = torch.ones(len(tensors[name]), dtype=torch.bool)
        others[WORDS] = False
        tensors[name][others] = 0
    save_file(tensors, model / "model.safetensors", {"format": "pt"})


Drafted = dict[tuple[int, ...], list[int]]
"""What was drafted after each text, where there was room for all."""


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> Drafted:
    found: Drafted = {}
    real = Scheduler.update

    def update(self: Scheduler, step: Any, result: Any) -> Any:
        for (sequence, epoch), scheduled in zip(step.sequences, step.batch.sequences, strict=True):
            is_under_way = sequence.status is Status.RUNNING and sequence.num_preemptions == epoch
            if is_under_way and len(scheduled.draft_token_ids) == NUM_DRAFTS:
                found[tuple(sequence.token_ids)] = list(scheduled.draft_token_ids)
        return real(self, step, result)

    moved = DecoderDrafting.keep

    def keep(self: DecoderDrafting, slot: int, path: list[int]) -> None:
        assert not self.ahead.slots[slot], "the device has moved them"
        moved(self, slot, path)

    monkeypatch.setattr(Scheduler, "update", update)
    monkeypatch.setattr(DecoderDrafting, "keep", keep)
    return found


def target_of(models: Path, kind: str) -> str:
    """A predictor is a layer of its target; the others draft for one of their own."""
    return str(models / ("mtp" if kind == "mtp" else "target"))


def on_cpu(models: Path, kind: str, sampling: Any, prompts: list[list[int]] = PROMPTS, **more: Any) -> Said:
    with fwk.LLM(target_of(models, kind), device="cpu", **OPTIONS | more) as llm:
        return said(llm, sampling, prompts)


def options_of(models: Path, kind: str) -> dict[str, Any]:
    if kind == "ngram":
        return OPTIONS | NGRAMS
    head = {} if kind == "mtp" else {"speculative_draft_model_path": str(models / kind)}
    return {**OPTIONS, **TREES, "speculative_algorithm": kind, **head}


def elsewhere(models: Path, case: Case, steps: Steps, *prompts: list[list[int]]) -> tuple[list[Said], EngineStats]:
    """What is said to these prompts, one after another."""
    kind, sampling, more = case
    options = {**options_of(models, kind), "attention_backend": "triton", **more}
    with triton_kernels(), serving(Path(target_of(models, kind)), steps, **options) as llm:
        return [said(llm, sampling, some) for some in prompts], llm.engine.stats()


def check(models: Path, case: Case, drafted: Drafted, steps: Steps) -> EngineStats:
    """Tokens of the CPU without drafts, drafts of the CPU without overlap, and nothing a device would trip over."""
    kind, sampling, more = case
    numbers = {name: more[name] for name in ("kv_cache_dtype",) if name in more}
    wanted = on_cpu(models, kind, sampling, **numbers)
    drafted.clear()
    (found,), stats = elsewhere(models, case, steps, PROMPTS)
    assert_same(found, wanted)
    each = sampling if isinstance(sampling, list) else [sampling] * len(PROMPTS)
    steps.assert_one_wait(reads_drafts=any(one.frequency_penalty for one in each))
    assert steps.num_in_flight().count(2) > 3
    ahead = [(p + tokens, one) for p, (tokens, _), one in zip(PROMPTS, wanted, each, strict=True)
             if not one.frequency_penalty]  # fmt: skip
    asked = {text: one for text in drafted for whole, one in ahead if tuple(whole[: len(text)]) == text}
    mine = {text: drafted[text] for text in asked}
    if "speculative_adaptive" not in more:
        assert len(mine) > 1
        hold_against_cpu(models, kind, mine, drafted, [asks_again(one) for one in asked.values()], **numbers)
    return stats


def asks_again(asked: SamplingParams) -> SamplingParams:
    """What picks the same token after the same text, and a few more."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "logit_bias", "allowed_token_ids")
    return asks(max_tokens=NUM_DRAFTS + 6, **{name: getattr(asked, name) for name in names})


def hold_against_cpu(models: Path, kind: str, mine: Drafted, drafted: Drafted, sampling: Any, **numbers: Any) -> None:
    """Drafts are those that a CPU makes after each text as a prompt of its own.

    Of n-grams those where what was in flight is what was foretold.
    """
    drafted.clear()
    own = {"max_total_tokens": 4096, "max_running_requests": 8, "page_size": 128, "prefix_cache": "none"}
    texts = [list(text[:-1]) for text in mine]
    on_cpu(models, kind, sampling, texts, **options_of(models, kind) | own | numbers)
    if kind == "ngram":
        assert sum(drafts == drafted.get(text) for text, drafts in mine.items()) > len(mine) // 4
        return
    for text, drafts in mine.items():
        assert drafts == drafted[text], len(text)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.sweep) for n in ASKED])
def test_steps_run_ahead_of_trees(models: Path, monkeypatch: pytest.MonkeyPatch, drafted: Drafted, name: str) -> None:
    stats = check(models, ASKED[name], drafted, Steps(monkeypatch))
    assert (stats.preemptions > 0) == ("pre-empted" in name)
    assert 0 < stats.accepted_draft_tokens < stats.draft_tokens


@pytest.mark.sweep
@pytest.mark.parametrize(
    "kind", ["medusa", *(pytest.param(kind, marks=pytest.mark.sweep) for kind in ("eagle3", "mtp"))]
)
def test_accepted_paths_are_what_a_prefix_was(
    models: Path, monkeypatch: pytest.MonkeyPatch, drafted: Drafted, kind: str
) -> None:
    wanted = on_cpu(models, kind, asks())
    longer = [[*prompt, *tokens[:23], 7] for prompt, (tokens, _) in zip(PROMPTS, wanted, strict=True)]
    drafted.clear()
    again = on_cpu(models, kind, asks(), longer)
    found, stats = elsewhere(models, (kind, asks(), EAGER), Steps(monkeypatch), PROMPTS, longer)
    assert found == [[(tokens, []) for tokens, _ in some] for some in (wanted, again)]
    assert stats.cached_prompt_tokens > sum(map(len, PROMPTS)) + 8
    mine = {text: drafts for text, drafts in drafted.items() if any([*text[: len(some)]] == some for some in longer)}
    assert len(mine) > 1
    hold_against_cpu(models, kind, mine, drafted, asks_again(asks()))


@pytest.mark.sweep
def test_paths_of_windows_and_of_all_keys_stay_apart(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drafted: Drafted
) -> None:
    changes = {"sliding_window": 20, "layer_types": KINDS, "num_hidden_layers": 2, "tie_word_embeddings": False}
    write(tmp_path / "target", "olmo3", changes)
    only_words(tmp_path / "target", "lm_head.weight")
    (tmp_path / "medusa").symlink_to(models / "medusa")
    check(tmp_path, ("medusa", asks(), EAGER), drafted, Steps(monkeypatch))


@pytest.mark.sweep
def test_a_stop_token_ends_a_path(models: Path, monkeypatch: pytest.MonkeyPatch, drafted: Drafted) -> None:
    tokens = on_cpu(models, "medusa", asks())[0][0]
    stop = max(set(tokens), key=tokens.index)
    assert tokens.index(stop) > 3
    check(models, ("medusa", [asks(stop_token_ids=[stop]), asks()], EAGER), drafted, Steps(monkeypatch))


def test_a_path_is_what_a_walk_finds() -> None:
    random = np.random.default_rng(5)
    count, width, length = 400, 9, 0
    parents = np.array([[random.integers(-1, i) for i in range(width)] for _ in range(count)])
    tokens, picked = random.integers(0, 3, (count, width)), random.integers(0, 3, (count, 1 + width))
    counts = random.integers(1, width + 1, count)
    for i, n in enumerate(counts):
        parents[i, n:] = 40  # of another tree
    order, accepted = accepted_in_trees(*map(torch.from_numpy, (tokens, parents, counts, picked)))
    for i, n in enumerate(counts.tolist()):
        tree, node, path = DraftTree(tokens[i, :n].tolist(), parents[i].tolist()), -1, list[int]()
        while (child := tree.child(node, int(picked[i, 1 + node]))) is not None:
            node = child
            path.append(1 + node)
        assert order[i, : 1 + accepted[i]].tolist() == [0, *path]
        assert sorted(order[i].tolist()) == list(range(1 + width))
        length = max(length, len(path))
    assert length > 2
