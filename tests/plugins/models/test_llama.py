"""The Llama family against transformers, on tiny random checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.lazy import lazy
from tests.helpers.models import RunnableModel

from fwk.errors import ModelLoadError
from fwk_kit.testing.batches import block_tables

transformers = lazy("transformers")

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
TYPES: dict[str, tuple[str, str]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "own head size": ("llama", {"head_dim": 16}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "one kv head": ("llama", {"num_key_value_heads": 1}),
    "every head its own": ("llama", {"num_key_value_heads": 6}),
    "rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "rope yarn": ("llama", {"rope_parameters": YARN}),
    "rope yarn, tuned": ("llama", {"rope_parameters": {**YARN, "beta_fast": 16.0, "truncate": False, "mscale": 0.7}}),
    "rope yarn, scaled": ("llama", {"rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral window": ("mistral", {"sliding_window": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2 windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
}


def save(folder: Path, kind: str, changes: dict[str, Any]) -> transformers.PreTrainedModel:
    """Write a random checkpoint with weights large enough to make attention selective."""
    torch.manual_seed(0)
    config_type, model_type = TYPES[kind]
    config = getattr(transformers, config_type)(**{**SMALL, **changes})
    model = getattr(transformers, model_type)(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=VARIANTS.keys())
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[transformers.PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return save(folder, *request.param), folder


def expected(model: transformers.PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([token_ids])).logits[0]


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, SMALL["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, atol=1e-4, rtol=1e-4)


def test_prompt_in_one_go_in_chunks_and_token_by_token(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    reference, folder = pair
    prompt = ids(70)
    wanted = expected(reference, prompt)
    model = RunnableModel(folder)
    close(model.logits(prompt), wanted)
    close(model.logits(prompt, [32, 20, 18]), wanted)
    close(model.logits(prompt, [60, 4, 1, 1, 3, 1]), wanted)
    assert model.weights.asked == set(model.weights.names())


def test_batch_of_different_lengths(pair: tuple[transformers.PreTrainedModel, Path]) -> None:
    """A chunk, a decode and drafts in one step give each sequence what it gets alone."""
    reference, folder = pair
    model = RunnableModel(folder)
    prompts = [ids(60, 1), ids(33, 2), ids(45, 3)]
    tables = block_tables([len(p) for p in prompts])
    pasts = [20, 32, 40]
    model.step([0, 0, 0], [p[:n] for p, n in zip(prompts, pasts, strict=True)], tables)
    out = model.step(pasts, [p[n:] for p, n in zip(prompts, pasts, strict=True)], tables)
    for rows, prompt, past in zip(out, prompts, pasts, strict=True):
        close(rows, expected(reference, prompt)[past:])


def test_bfloat16_follows_transformers(tmp_path: Path) -> None:
    reference = save(tmp_path, "llama", {}).to(torch.bfloat16)
    prompt = ids(40)
    wanted = expected(reference, prompt).float()
    exact = expected(reference.float(), prompt)
    actual = RunnableModel(tmp_path, dtype=torch.bfloat16).logits(prompt, [30, 1, 9]).float()
    # No further from the truth than transformers' own bfloat16.
    assert (actual - exact).abs().mean() <= 1.2 * (wanted - exact).abs().mean()


def test_greedy_decoding_agrees_with_generate(tmp_path: Path) -> None:
    reference = save(tmp_path, "llama", {"tie_word_embeddings": True})
    prompt = ids(20)
    wanted = reference.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, 20), max_new_tokens=24, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )[0].tolist()  # fmt: skip
    model, tokens = RunnableModel(tmp_path), list(prompt)
    (table,) = block_tables([len(prompt) + 24])
    past = 0
    for _ in range(24):
        (rows,) = model.step([past], [tokens[past:]], [table])
        past = len(tokens)
        tokens.append(int(rows[-1].argmax()))
    assert tokens == wanted


def test_unknown_rope_and_activation_are_named(tmp_path: Path) -> None:
    save(tmp_path, "llama", {})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}))
    with pytest.raises(ModelLoadError, match="'spiral'"):
        RunnableModel(tmp_path)
    path.write_text(json.dumps({**config, "hidden_act": "relu6"}))
    with pytest.raises(ModelLoadError, match="'relu6'"):
        RunnableModel(tmp_path)


def test_a_head_beside_tied_embeddings_is_ignored_as_transformers_does(tmp_path: Path) -> None:
    reference = save(tmp_path, "llama", {"tie_word_embeddings": True})
    model = RunnableModel(tmp_path)
    assert not model.weights.has("lm_head.weight")
    close(model.logits(ids(12)), expected(reference, ids(12)))
