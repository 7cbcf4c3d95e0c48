"""``--enable-fp32-lm-head``: logits of a bfloat16 model without the last rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fwk
from fwk import SamplingParams
from tests.helpers.lazy import lazy
from tests.helpers.tiny import save_llama

transformers = lazy("transformers")

PROMPTS = [list(range(5, 5 + n)) for n in (3, 17, 40)]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama"), tie_word_embeddings=request.param)


def scores(folder: Path, prompts: list[list[int]], **options: object) -> list[list[float]]:
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=5)
    with fwk.LLM(str(folder), dtype="bfloat16", max_total_tokens=4096, **options) as llm:  # type: ignore[arg-type]
        done = llm.generate(prompts, sampling)
        assert all(len(each.token_ids) == 1 for each in done)
        return [[logprob for _, logprob in (each.logprobs or [])[0].top] for each in done]


def test_logits_are_not_rounded_to_bfloat16(folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    wide = scores(folder, PROMPTS, enable_fp32_lm_head=True)
    plain = scores(folder, PROMPTS)
    for prompt, here, rounded in zip(PROMPTS, wide, plain, strict=True):
        with torch.no_grad():
            hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        logits = torch.nn.functional.linear(hidden.float(), model.lm_head.weight.float())
        expected = logits.log_softmax(-1).topk(5).values
        assert torch.allclose(torch.tensor(here), expected, atol=0.05)  # the layers before it are bfloat16's
        # Differences between logits are multiples of their last place only where they were rounded.
        gaps = [(here[0] - score) * 2**9 for score in here[1:]]
        assert any(abs(gap - round(gap)) > 0.01 for gap in gaps)
        gaps = [(rounded[0] - score) * 2**9 for score in rounded[1:]]
        assert all(abs(gap - round(gap)) < 0.01 for gap in gaps)


RANKS = pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.sweep)


@pytest.mark.gate(2)
@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"speculative_algorithm": "ngram"}, RANKS])
def test_it_composes(folder: Path, options: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    with fwk.LLM(str(folder), dtype="bfloat16", max_total_tokens=4096, enable_fp32_lm_head=True) as llm:
        alone = [llm.generate([prompt], sampling)[0].token_ids for prompt in PROMPTS]
        assert [done.token_ids for done in llm.generate(PROMPTS, sampling)] == alone
    with fwk.LLM(str(folder), dtype="bfloat16", max_total_tokens=4096, enable_fp32_lm_head=True, **options) as llm:
        done = [each.token_ids for each in llm.generate(PROMPTS, sampling)]
    assert [len(ids) for ids in done] == [12] * 3
    if "speculative_algorithm" in options:
        assert done == alone
