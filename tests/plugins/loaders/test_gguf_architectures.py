"""Files of each architecture, written by the gguf package's names, against transformers' own classes in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.architectures import write
from tests.helpers.checkpoints import reference_greedy, token_ids
from tests.helpers.quantised import gguf_like

import fwk
from fwk import SamplingParams

GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
    "attention.scale": "attention_multiplier",
}
CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_multiplier": 0.2}
FOUR: dict[str, Any] = {"num_hidden_layers": 4}
PATTERN = ["sliding_attention"] * 3 + ["full_attention"]

CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo2", {**FOUR, "sliding_window": 20, "layer_types": PATTERN}, {}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}, {}),
    "gemma": ("gemma", {"head_dim": 24}, {}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 24}, CAPS),
    "granite": ("granite", SCALES, GRANITE),
    "smollm3": ("smollm3", {**FOUR, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": False}, {}),
}


@pytest.mark.parametrize("kind", CASES)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    architecture, changes, numbers = CASES[kind]
    reference = write(tmp_path / "source", kind, changes)
    interleaves = architecture in ("granite", "smollm3")
    path = gguf_like(tmp_path / "source", tmp_path / "m.gguf", architecture, numbers, interleaves=interleaves)
    prompts = [token_ids(n, n) for n in (40, 7)]
    wanted = [reference_greedy(reference, prompt, 8) for prompt in prompts]
    settings = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with fwk.LLM(str(path), dtype="float32", max_total_tokens=512) as llm:
        assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted
