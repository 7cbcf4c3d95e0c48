"""Every architecture of a table against transformers in float32, on tiny random checkpoints of its own classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import ARCHITECTURES, SMALL, close, write
from tests.helpers.checkpoints import reference_greedy, reference_logits, token_ids
from tests.helpers.models import RunnableModel, on_ranks
from transformers import PreTrainedModel

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError
from fwk_kit.testing.batches import block_tables

SPLIT = ["phi3", "olmo2", "gpt2", "gpt_neox", "falcon slopes", "falcon multi-query", "cohere norms", "granitemoe"]
SPLIT += ["mixtral", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss"]


@pytest.fixture(scope="module", params=ARCHITECTURES.values(), ids=ARCHITECTURES.keys())
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return write(folder, *request.param), folder


def test_logits_however_a_text_is_cut(pair: tuple[PreTrainedModel, Path]) -> None:
    """A prompt in one go, in chunks, token by token, and in steps with others behind a cached prefix."""
    reference, folder = pair
    model = RunnableModel(folder)
    assert model.spec != "transformers"
    prompt = token_ids(80)
    wanted = reference_logits(reference, prompt)
    close(model.logits(prompt), wanted)
    close(model.logits(prompt, [33, 20, 11, *([1] * 16)]), wanted)
    assert model.weights.asked >= set(model.weights.names()) - model.weights.skipped
    prompts = [token_ids(60, 1), token_ids(33, 2), token_ids(45, 3)]
    tables = block_tables([len(p) for p in prompts])
    pasts = [20, 32, 40]
    model.step([0, 0, 0], [p[:n] for p, n in zip(prompts, pasts, strict=True)], tables)
    out = model.step(pasts, [p[n:] for p, n in zip(prompts, pasts, strict=True)], tables)
    for rows, text, past in zip(out, prompts, pasts, strict=True):
        close(rows, reference_logits(reference, text)[past:])


@pytest.mark.parametrize("name", SPLIT)
def test_two_ranks_together_are_the_model(name: str, tmp_path: Path) -> None:
    reference = write(tmp_path, *ARCHITECTURES[name])
    prompt = token_ids(40)
    wanted = reference_logits(reference, prompt)
    for logits in on_ranks(2, lambda tp: RunnableModel(tmp_path, tp=tp).logits(prompt, [30, 1, 9])):
        close(logits, wanted)


@pytest.mark.parametrize("name", ["glm4_moe", "deepseek_v3"])
def test_layers_behind_the_last_one_are_left_out(name: str, tmp_path: Path) -> None:
    write(tmp_path, *ARCHITECTURES[name])
    tensors = load_file(tmp_path / "model.safetensors")
    further = f"model.layers.{SMALL['num_hidden_layers']}.enorm.weight"
    save_file({**tensors, further: torch.ones(SMALL["hidden_size"])}, tmp_path / "model.safetensors")
    assert further in RunnableModel(tmp_path).weights.skipped


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "routing by 'noaux_tc' and 'softmax'"),
        ("glm4_moe", {"n_group": 8, "topk_group": 4}, "8 experts in 8 groups: a group needs two"),
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' is 8.0"),
    ],
)
def test_unknown_ways_of_models_with_experts_are_named(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, *ARCHITECTURES[name])
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=message):
        RunnableModel(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_tokens_through_the_whole_engine(name: str, tmp_path: Path) -> None:
    """With the plugins that auto takes: chunked prefill, a shared prefix, and pre-emption in a small cache."""
    reference = write(tmp_path, *ARCHITECTURES[name])
    prompts = [token_ids(n, n) for n in (70, 3, 33)]
    prompts.append([*prompts[0][:48], *token_ids(9, 4)])
    wanted = [reference_greedy(reference, prompt, 16) for prompt in prompts]
    settings = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    for options in ({}, {"chunked_prefill_size": 13, "page_size": 4, "max_total_tokens": 160}):
        sized = {"max_total_tokens": 2048, **options}
        with fwk.LLM(str(tmp_path), dtype="float32", check_blocks=True, **sized) as llm:
            assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted
