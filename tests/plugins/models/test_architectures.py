"""Whole engines, groups of ranks and wrong settings of the families that ``checkpoints`` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.helpers.architectures import close
from tests.helpers.checkpoints import change_config, make_checkpoint, reference_greedy, reference_logits, token_ids
from tests.helpers.lazy import lazy
from tests.helpers.models import RunnableModel, on_ranks

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, ModelLoadError, PluginError

transformers = lazy("transformers")

KINDS = ["qwen3", "qwen3_moe", "gemma3", "deepseek_v2"]


@pytest.mark.gate(1)
@pytest.mark.parametrize("kind", ["llama", *KINDS])
def test_greedy_tokens_through_the_whole_engine(kind: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, kind)
    prompts = [token_ids(n, n) for n in (70, 3, 33)]
    wanted = [reference_greedy(reference, prompt, 16) for prompt in prompts]
    settings = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    for options in ({}, {"chunked_prefill_size": 13, "page_size": 4}):
        with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=2048, check_blocks=True, **options) as llm:
            assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted


@pytest.mark.gate(2)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_are_the_model(kind: str, size: int, tmp_path: Path) -> None:
    """With four ranks, two hold the same K/V head."""
    reference = make_checkpoint(tmp_path, kind)
    prompt = token_ids(40)
    wanted = reference_logits(reference, prompt)
    for logits in on_ranks(size, lambda tp: RunnableModel(tmp_path, tp=tp).logits(prompt, [30, 1, 9])):
        close(logits, wanted)


@pytest.mark.gate(4)
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 9}, "each token cannot have 9 of 8 experts"),
        (
            "qwen3_moe",
            {"moe_intermediate_size": "32"},
            "'moe_intermediate_size' must be a whole number.*'32'",
        ),
        ("qwen3_moe", {"num_local_experts": 9}, r"gate\.weight is \(8, 128\), not \(9, 128\)"),
        ("qwen3_moe", {"hidden_act": "relu6"}, "activation 'relu6' is not known"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "'kv_lora_rank' must be a whole number of at least 1, not 0"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "routing by 'noaux_tc' and 'softmax' is not known"),
        ("deepseek_v2", {"norm_topk_prob": True}, "'norm_topk_prob' and 'moe_layer_freq' are not known"),
        ("deepseek_v2", {"topk_method": "group_limited_greedy"}, "'n_group' must be a whole number"),
        ("gemma3", {"hidden_activation": "relu6"}, "activation 'relu6' is not known"),
        ("gemma3", {"use_bidirectional_attention": True}, "is True: gemma3 is served with False"),
        ("gemma3", {"layer_types": ["full_attention"]}, "'layer_types' must name the kind of each of the 4 layers"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 4}, "type 'chunked_attention'; only full and sliding"),
    ],
)
def test_wrong_settings_are_named(kind: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, kind)
    change_config(tmp_path, **changes)
    with pytest.raises(ModelLoadError, match=message):
        RunnableModel(tmp_path)


def test_a_runner_for_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="--moe-runner-backend torch: this model has no layers of experts"):
        fwk.LLM(str(tmp_path), moe_runner_backend="torch")
    make_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(PluginError, match=r"unknown MoE runner 'trton'.*installed: cpu, torch"):
        fwk.LLM(str(tmp_path), moe_runner_backend="trton")
