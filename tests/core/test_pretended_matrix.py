"""What is served on a pretended device, in all combinations: the CPU's tokens, and nothing a real one would trip over.

A few combinations, in which every two settings meet, are the gate's, and those in which every three meet the
sweep's. `make matrix` runs them all: an hour and a half of one core.
"""

from __future__ import annotations

import itertools
import os
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from tests.helpers.adapters import make_adapter, make_base
from tests.helpers.draft_heads import save_eagle3
from tests.helpers.interpreted import interpreted
from tests.helpers.pretend_cuda import JOURNAL, Steps, flashinfer_stand_in, pretended, serving, stand_in, triton_kernels
from tests.helpers.selection import covering

import fwk
from fwk import GrammarRequest, SamplingParams
from fwk.errors import FwkError
from fwk.interfaces.completion import Completion
from fwk.plugins import discover
from fwk_loaders.dummy.loader import DummyCheckpoint

pytestmark = interpreted

ATTENTION = ("torch", "flashinfer-stand-in", "triton")
NUMBERS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp8": {"quantization": "fp8"},
    "fp8 K/V": {"kv_cache_dtype": "fp8"},
    "int4": {"quantization": "int4"},
}
SERVED = ("requests", "LoRA", "n-gram trees", "EAGLE-3 trees", "experts", "latents", "cache tiers")
"""``requests`` are plain, sampled, with a grammar and with log-probabilities, side by side."""


class Case(NamedTuple):
    attention: str
    graphs: bool
    overlap: bool
    numbers: str
    served: str

    def __str__(self) -> str:
        halves = ("graphs" if self.graphs else "eager", "overlap" if self.overlap else "in turn")
        return ", ".join((self.served, self.attention, *halves, self.numbers))


EVERY = [Case(*each) for each in itertools.product(ATTENTION, (True, False), (True, False), NUMBERS, SERVED)]


def chosen(num_settings: int) -> list[Case]:
    """A few of them: each ``num_settings`` settings meet in one."""
    return [EVERY[i] for i in covering([case._asdict() for case in EVERY], num_settings)]


PROMPTS = [[1, 7, 3, 9] * 5, list(range(40, 57)), [5, 5, 6], [8]]
OTHERS = [list(range(100 + n, 150 + n)) for n in (0, 60)]
FEW = {50: 9.0, 51: 9.0, 60: 9.0}
"""A text of three words, which n-grams often foretell."""


def asks(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **more})


REQUESTS = [
    asks(),
    asks(temperature=0.8, top_p=0.9, top_k=30, seed=3, repetition_penalty=1.1),
    asks(grammar=GrammarRequest("regex", "[a-e]{20}"), temperature=0.7, seed=4),
    asks(logprobs=2),
]
ASKED: dict[str, list[SamplingParams]] = {
    "requests": REQUESTS,
    "n-gram trees": [asks(max_tokens=9, logit_bias=FEW, temperature=t, seed=5) for t in (0.0, 0.8, 0.0, 0.8)],
    "EAGLE-3 trees": [asks(max_tokens=9)] * 4,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "LoRA": {"enable_lora": True},
    "experts": {"moe_runner_backend": "triton"},
    "n-gram trees": {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 3},
    "EAGLE-3 trees": {
        "speculative_algorithm": "eagle3",
        "speculative_num_steps": 4,
        "speculative_eagle_topk": 2,
        "speculative_num_draft_tokens": 7,
    },
    "latents": {"model_impl": "deepseek_v3"},
    "cache tiers": {"prefix_cache": "hierarchical", "max_total_tokens": 112},
}
COMMON: dict[str, Any] = {
    "max_total_tokens": 512,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "dtype": "float32",
    "check_blocks": True,
    "operator_backend": "torch",
    "sampling_backend": "torch",
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "first_k_dense_replace": 2,
}


class Models:
    """Checkpoints whose logits lie further apart than half precision rounds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cache  # noqa: B019 - as long as the module's tests
    def path(self, served: str) -> Path:
        if served in ("experts", "latents"):
            return self._saved(served)
        folder = self._folder / "llama"
        return folder if served != "requests" and folder.exists() else self._llama(folder)

    @cache  # noqa: B019
    def head(self) -> Path:
        return save_eagle3(self._folder / "head")

    @cache  # noqa: B019
    def adapter(self) -> Path:
        return make_adapter(self.path("requests"), self._folder / "adapter")

    def _llama(self, folder: Path) -> Path:
        make_base(folder, intermediate_size=128)
        (folder / "tokenizer.json").unlink()
        DummyCheckpoint(folder).tokenizer().save(str(folder / "tokenizer.json"))
        return folder

    def _saved(self, served: str) -> Path:
        from transformers import AutoConfig, AutoModelForCausalLM

        kind, more = ("qwen3_moe", EXPERTS) if served == "experts" else ("deepseek_v3", LATENTS)
        sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**sizes, **heads, **more}))
        for weight in model.parameters():
            if weight.ndim >= 2:
                torch.nn.init.normal_(weight, std=0.12)
        folder = self._folder / served
        model.save_pretrained(folder)
        DummyCheckpoint(folder).tokenizer().save(str(folder / "tokenizer.json"))
        return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    made = Models(tmp_path_factory.mktemp("models"))
    made.path("requests")
    return made


def prepare(llm: fwk.LLM, case: Case, models: Models) -> None:
    """Load an adapter and place it on the device, which copies its matrices, as loading a model does."""
    if case.served == "LoRA":
        llm.load_adapter("a", str(models.adapter()))
        llm.generate([[3]], asks(max_tokens=1), adapter="a")


def options_of(served: str, models: Models) -> dict[str, Any]:
    found = OPTIONS.get(served, {})
    return {**found, "speculative_draft_model_path": str(models.head())} if served == "EAGLE-3 trees" else found


def generated(llm: fwk.LLM, case: Case) -> list[Completion]:
    params = ASKED.get(case.served, [asks()] * len(PROMPTS))
    if case.numbers == "bf16":
        params = [rounded(some) for some in params]
    more: dict[str, Any] = {"adapter": ["a", "", "a", ""]} if case.served == "LoRA" else {}
    found = llm.generate(PROMPTS, params, **more)
    if case.served == "cache tiers":  # others take the blocks, so that they come back from a tier
        llm.generate(OTHERS, asks(max_tokens=1))
        found += llm.generate(PROMPTS[:2], params[:2])
        assert llm.engine.stats().restored_prompt_tokens > 0
    return found


def rounded(some: SamplingParams) -> SamplingParams:
    """For kernels that round alike only so far: what chooses at random, or among few words, has one word to choose."""
    if some.grammar is not None:
        return msgspec.structs.replace(some, grammar=GrammarRequest("regex", "abcdeabcdeabcde"))
    if some.temperature or some.logit_bias:
        return msgspec.structs.replace(some, logit_bias={50: 60.0})
    return msgspec.structs.replace(some, logprobs=2)


def certain(done: Completion, is_rounded: bool) -> list[int]:
    """The tokens before the first that another might have been as well, by its lead over the second best."""
    if not is_rounded or done.logprobs is None:
        return done.token_ids
    leads = [abs(found.top[0][1] - found.top[1][1]) for found in done.logprobs]
    return done.token_ids[: next((i for i, lead in enumerate(leads) if lead < 0.3), len(leads))]


@cache
def on_cpu(models: Models, numbers: str, served: str, attention: str) -> list[list[int]]:
    case = Case(attention, False, False, numbers, served)
    settings: dict[str, Any] = {**COMMON, **options_of(served, models), **NUMBERS[numbers]}
    if served == "experts":
        settings["moe_runner_backend"] = "torch"
    plugins = discover()
    plugins.register(stand_in, "attention.flashinfer-stand-in", "tests", "0")
    path = str(models.path(served))
    with (
        kernels_of(case),
        fwk.LLM(path, plugins=plugins, device="cpu", attention_backend=attention, **settings) as llm,
    ):
        prepare(llm, case, models)
        return [certain(done, numbers == "bf16") for done in generated(llm, case)]


def kernels_of(case: Case) -> ExitStack:
    stack = ExitStack()
    if case.attention == "flashinfer-stand-in":
        stack.enter_context(flashinfer_stand_in())
    if case.attention == "triton" or case.served == "experts":
        stack.enter_context(triton_kernels())
    return stack


FLASHINFER_REFUSES = {
    ("latents", "fp8 K/V"): "keeps latents as auto, not fp8",
}


def refusal_of(case: Case) -> str | None:
    """What fits a sentence that refuses the combination; None: it is served."""
    if case.attention == "flashinfer-stand-in":
        return FLASHINFER_REFUSES.get((case.served, case.numbers))
    return None


def check(models: Models, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    settings: dict[str, Any] = {**COMMON, **options_of(case.served, models), **NUMBERS[case.numbers]}
    settings |= {"cuda_graph_bs": (4,)} if case.graphs else {}
    settings |= {"disable_cuda_graph": not case.graphs, "disable_overlap_schedule": not case.overlap}
    if case.attention == "triton" and case.served == "requests":  # the interpreter takes seconds for a step's picks
        settings["sampling_backend"] = "triton"
    if case.attention == "triton" and case.served == "LoRA":
        settings["lora_backend"] = "triton"
    has_pieces = case.graphs and case.overlap
    if has_pieces:
        settings |= {"enable_piecewise_cuda_graph": True, "piecewise_cuda_graph_tokens": (4, 16)}
    path = str(models.path(case.served))
    refusal = refusal_of(case)
    if refusal is not None:
        settings |= {"device": "pretended", "attention_backend": case.attention}
        with pretended() as plugins, pytest.raises(FwkError, match=refusal):
            fwk.LLM(path, plugins=plugins, **settings)
        return
    # FlashInfer keeps fp8 K/V with one scale for all, the others with one for each row.
    has_own_numbers = case.attention == "flashinfer-stand-in" and case.numbers == "fp8 K/V"
    wanted = on_cpu(models, case.numbers, case.served, case.attention if has_own_numbers else "torch")
    steps = Steps(monkeypatch)
    settings |= {"attention_backend": case.attention}
    with kernels_of(case), serving(Path(path), **settings) as llm:
        prepare(llm, case, models)
        how = llm.engine.info.chosen["step"]
        JOURNAL.clear()
        steps.halves.clear()
        found = [done.token_ids for done in generated(llm, case)]
    for tokens, reference in zip(found, wanted, strict=True):
        assert tokens[: len(reference)] == reference
    is_captured = case.graphs and case.attention != "torch"
    assert how.startswith("captured" if is_captured else "eager ("), how
    # Adapters and drafts are computed operator by operator.
    if case.served not in ("LoRA", "n-gram trees", "EAGLE-3 trees"):
        assert (JOURNAL.launches["graph"] > 0) == (is_captured or has_pieces)
    steps.assert_one_wait()


@pytest.mark.gate(1)
@pytest.mark.parametrize("case", chosen(2), ids=str)
def test_every_two_settings(models: Models, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    check(models, monkeypatch, case)


@pytest.mark.sweep
@pytest.mark.parametrize("case", EVERY if os.environ.get("WHOLE_MATRIX") else chosen(3), ids=str)
def test_every_three_settings(models: Models, monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    check(models, monkeypatch, case)
