"""Every architecture but Llama's against transformers, on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint, reference_greedy, reference_logits, token_ids
from tests.helpers.lazy import lazy
from tests.helpers.models import RunnableModel, on_ranks

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, ModelLoadError, PluginError
from fwk_kit.testing.batches import block_tables

transformers = lazy("transformers")

LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.7,
    "mscale_all_dim": 0.9,
}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
ROPES = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}
KINDS = ["qwen3", "qwen3_moe", "gemma3", "deepseek_v2"]
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3 tied, biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3 windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe not normalised": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 2}),
    "qwen3_moe some layers dense": ("qwen3_moe", {"num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "qwen3_moe every second": ("qwen3_moe", {"num_hidden_layers": 3, "decoder_sparse_step": 2}),
    "qwen3_moe all experts": ("qwen3_moe", {"num_experts_per_tok": 8}),
    "gemma3": ("gemma3", {}),
    "gemma3 scaled ropes": ("gemma3", {"rope_parameters": ROPES}),
    "gemma3 capped": ("gemma3", {"final_logit_softcapping": 3.0}),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 query latent, biases": (
        "deepseek_v2",
        {"q_lora_rank": 24, "attention_bias": True, "rms_norm_eps": 1e-2, "first_k_dense_replace": 0},
    ),
    "deepseek_v2 yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "deepseek_v2 groups, tied": ("deepseek_v2", {**GROUPED, "tie_word_embeddings": True}),
    "gemma3 own head": ("gemma3", {"tie_word_embeddings": False, "attention_bias": True}),
}


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    kind, changes = request.param
    return make_checkpoint(folder, kind, **changes), folder


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-4 * float(wanted.abs().max()), rtol=1e-4)


def test_prompt_in_one_go_in_chunks_and_token_by_token(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    reference, folder = pair
    prompt = token_ids(70)
    wanted = reference_logits(reference, prompt)
    model = RunnableModel(folder)
    close(model.logits(prompt), wanted)
    close(model.logits(prompt, [32, 20, 18]), wanted)
    close(model.logits(prompt, [60, 4, 1, 1, 3, 1]), wanted)
    assert model.weights.asked == set(model.weights.names())


def test_batch_of_different_lengths(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    """A chunk, a decode and drafts in one step give each sequence what it gets alone."""
    reference, folder = pair
    model = RunnableModel(folder)
    prompts = [token_ids(60, 1), token_ids(33, 2), token_ids(45, 3)]
    tables = block_tables([len(p) for p in prompts])
    pasts = [20, 32, 40]
    model.step([0, 0, 0], [p[:n] for p, n in zip(prompts, pasts, strict=True)], tables)
    out = model.step(pasts, [p[n:] for p, n in zip(prompts, pasts, strict=True)], tables)
    for rows, prompt, past in zip(out, prompts, pasts, strict=True):
        close(rows, reference_logits(reference, prompt)[past:])


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_through_the_whole_engine(kind: str, tmp_path: Path) -> None:
    reference = make_checkpoint(tmp_path, kind)
    prompts = [token_ids(n, n) for n in (70, 3, 33)]
    wanted = [reference_greedy(reference, prompt, 16) for prompt in prompts]
    settings = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    for options in ({}, {"chunked_prefill_size": 13, "page_size": 4}):
        with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=2048, check_blocks=True, **options) as llm:
            assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_together_are_the_model(kind: str, size: int, tmp_path: Path) -> None:
    """With four ranks, two hold the same K/V head."""
    reference = make_checkpoint(tmp_path, kind)
    prompt = token_ids(40)
    wanted = reference_logits(reference, prompt)
    for logits in on_ranks(size, lambda tp: RunnableModel(tmp_path, tp=tp).logits(prompt, [30, 1, 9])):
        close(logits, wanted)


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
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(ModelLoadError, match=message):
        RunnableModel(tmp_path)


def test_a_runner_for_a_model_without_experts_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="--moe-runner-backend torch: this model has no layers of experts"):
        fwk.LLM(str(tmp_path), moe_runner_backend="torch")
    make_checkpoint(tmp_path, "qwen3_moe")
    with pytest.raises(PluginError, match=r"unknown MoE runner 'trton'.*installed: cpu, torch"):
        fwk.LLM(str(tmp_path), moe_runner_backend="trton")


def test_bfloat16_follows_transformers(tmp_path: Path) -> None:
    """No further from the truth than transformers' own bfloat16."""
    reference = make_checkpoint(tmp_path, "gemma3").to(torch.bfloat16)
    prompt = token_ids(40)
    wanted = reference_logits(reference, prompt).float()
    exact = reference_logits(reference.float(), prompt)
    actual = RunnableModel(tmp_path, dtype=torch.bfloat16).logits(prompt, [30, 1, 9]).float()
    assert (actual - exact).abs().mean() <= 1.2 * (wanted - exact).abs().mean()
