"""Files of architectures that llama.cpp's converter cuts, joins or computes anew, against transformers in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.helpers.architectures import DELTA, HYBRID, JAMBA, LLAMA4, MAMBA, NEMOTRON, NEXT, write
from tests.helpers.checkpoints import gives_tokens_of
from tests.helpers.gguf_converted import written
from tests.helpers.lazy import lazy

import fwk
from fwk.errors import ModelLoadError
from fwk_loaders.gguf.loader import GGUFCheckpoint

gguf = lazy("gguf")

FACTORS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.0, "attention_multiplier": 0.2}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
FOUR_LLAMA4 = {
    **LLAMA4,
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "floor_scale": 8192,
    "moe_layers": [1, 3],
    "interleave_moe_layer_step": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "glm": ("chatglm", "glm", {"head_dim": 16, "attention_bias": True}),
    "granitemoe": ("granitemoe", "granitemoe", {**ROUTED, **FACTORS}),
    "llama4": ("llama4", "llama4_text", FOUR_LLAMA4),
    "mamba": ("mamba", "mamba", {"state_size": 12}),
    "mamba with a head": ("mamba", "mamba", {"time_step_rank": 6, "tie_word_embeddings": False, "conv_kernel": 3}),
    "falcon mamba": ("mamba", "falcon_mamba", {"time_step_rank": 6}),
    "mamba2": ("mamba2", "mamba2", MAMBA),
    "mamba2 groups": ("mamba2", "mamba2", {**MAMBA, "n_groups": 2, "tie_word_embeddings": True}),
    "jamba": ("jamba", "jamba", JAMBA),
    "jamba dense": ("jamba", "jamba", {**JAMBA, "num_experts": 1, "attn_layer_offset": 0}),
    "lfm2": ("lfm2", "lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 32}),
    "lfm2 as given": ("lfm2", "lfm2", {"layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False}),
    "qwen3_next": ("qwen3next", "qwen3_next", NEXT),
    "qwen3_5": ("qwen35", "qwen3_5_text", DELTA),
    "qwen3_5 moe": ("qwen35moe", "qwen3_5_moe_text", NEXT),
    "granite hybrid": ("granitehybrid", "granitemoehybrid", HYBRID),
    "granite hybrid with experts": ("granitehybrid", "granitemoehybrid", {**HYBRID, **ROUTED}),
    "nemotron_h": ("nemotron_h", "nemotron_h", NEMOTRON),
}


@pytest.mark.gate(6)
@pytest.mark.parametrize("kind", CASES)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    architecture, name, changes = CASES[kind]
    reference = write(tmp_path / "source", name, changes)
    gives_tokens_of(written(tmp_path / "source", tmp_path / "m.gguf", architecture), reference)


def test_chatglms_own_files_hold_queries_keys_and_values_in_one_matrix(tmp_path: Path) -> None:
    reference = write(tmp_path / "source", "glm", {"head_dim": 16, "attention_bias": True})
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"model.layers.{layer}.self_attn.{part}_proj.{kind}") for part in "qkv"]
            tensors[f"encoder.layers.{layer}.self_attention.query_key_value.{kind}"] = np.concatenate(parts)
    save_file(tensors, file)
    gives_tokens_of(written(tmp_path / "source", tmp_path / "m.gguf", "chatglm"), reference)


def test_granite_with_shared_experts_and_attention_alone(tmp_path: Path) -> None:
    """The converter calls Granite 4 without a state space ``granitemoe``."""
    changes = {**HYBRID, **ROUTED, "layer_types": ["full_attention"] * 2, "position_embedding_type": "rope"}
    reference = write(tmp_path / "source", "granitemoehybrid", changes)
    gives_tokens_of(written(tmp_path / "source", tmp_path / "m.gguf", "granitemoe"), reference)


def test_llama4_stretches_long_waves_without_a_range_between(tmp_path: Path) -> None:
    reference = write(tmp_path / "source", "llama4_text", {**FOUR_LLAMA4, "rope_parameters": LLAMA3})
    waves = 2 * np.pi * 10_000.0 ** (np.arange(0, 16, 2) / 16)
    extras = {"rope_freqs.weight": np.where(waves > 8192, 8.0, 1.0).astype(np.float32)}
    path = written(tmp_path / "source", tmp_path / "m.gguf", "llama4", extras=extras)
    scaling = GGUFCheckpoint(path).config()["rope_scaling"]
    assert scaling == {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    gives_tokens_of(path, reference)


def test_a_layer_that_predicts_is_left_out(tmp_path: Path) -> None:
    """Qwen3-Next's files count it among the others."""
    reference = write(tmp_path / "source", "qwen3_next", NEXT)
    extras = {f"blk.2.{name}.weight": np.ones(64, np.float32) for name in ("attn_norm", "nextn.enorm")}
    more = {"block_count": 3, "nextn_predict_layers": 1}
    gives_tokens_of(written(tmp_path / "source", tmp_path / "m.gguf", "qwen3next", more=more, extras=extras), reference)


PACKED = {
    "qwen3next": ("qwen3_next", NEXT, "model.layers.0.linear_attn.in_proj_qkvz", (256, 64)),
    "qwen35": ("qwen3_5_text", DELTA, "model.layers.0.linear_attn.in_proj_qkv", (160, 64)),
    "granitehybrid": ("granitemoehybrid", {**HYBRID, **ROUTED}, "model.layers.0.shared_mlp.input_linear", (96, 64)),
}


@pytest.mark.parametrize("architecture", PACKED)
def test_blocks_stay_packed_where_whole_rows_were_moved(architecture: str, tmp_path: Path) -> None:
    name, changes, prefix, shape = PACKED[architecture]
    write(tmp_path / "source", name, changes)
    path = written(tmp_path / "source", tmp_path / "m.gguf", architecture, quantises="Q8_0")
    weights = GGUFCheckpoint(path).weights()
    assert weights.layouts(prefix) == ("gguf:Q8_0", "plain")
    raw = weights.raw(f"{prefix}.weight").numpy()
    blocks = gguf.quants.dequantize(raw.reshape(raw.shape[0], -1), gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(blocks, weights.tensor(f"{prefix}.weight", shape).numpy())
    plain = load_file(tmp_path / "source" / "model.safetensors")[f"{prefix}.weight"]
    np.testing.assert_allclose(blocks, plain, atol=float(np.abs(plain).max()) / 100)


def test_columns_that_were_moved_are_read_as_numbers(tmp_path: Path) -> None:
    write(tmp_path / "source", "qwen3_5_text", {**DELTA, "linear_value_head_dim": 16})
    path = written(tmp_path / "source", tmp_path / "m.gguf", "qwen35", quantises="Q8_0")
    weights, prefix = GGUFCheckpoint(path).weights(), "model.layers.0.linear_attn.out_proj"
    assert weights.layouts(prefix) == ("plain",)
    plain = load_file(tmp_path / "source" / "model.safetensors")[f"{prefix}.weight"]
    found = weights.tensor(f"{prefix}.weight", plain.shape).numpy()
    np.testing.assert_allclose(found, plain, atol=float(np.abs(plain).max()) / 100)


CONTRADICTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "qwen3next": ("qwen3_next", NEXT, {"ssm.group_count": 1, "ssm.state_size": 8}, r"in_proj_qkvz\S* has 256 rows"),
    "mamba2": ("mamba2", MAMBA, {"ssm.time_step_rank": 7}, r"mamba2\.ssm\.inner_size must be a multiple of the 7"),
    "jamba": ("jamba", JAMBA, {"ssm.inner_size": 100}, r"jamba\.ssm\.inner_size must be a multiple of"),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, {"attention.head_count_kv": [2]}, "2 whole numbers"),
    "mamba": ("mamba", {"state_size": 12}, {"ssm.state_size": 13}, r"blk\.0\.ssm_x\.weight"),
}


@pytest.mark.parametrize("architecture", CONTRADICTIONS)
def test_metadata_that_contradict_the_tensors_are_named(architecture: str, tmp_path: Path) -> None:
    name, changes, more, message = CONTRADICTIONS[architecture]
    write(tmp_path / "source", name, changes)
    path = written(tmp_path / "source", tmp_path / "m.gguf", architecture, more=more)
    with pytest.raises(ModelLoadError, match=message):
        fwk.LLM(str(path), max_total_tokens=256)


def test_what_the_converter_does_not_write_is_refused_with_what_is_read(tmp_path: Path) -> None:
    write(tmp_path / "source", "nemotron_h", NEMOTRON)
    path = written(tmp_path / "source", tmp_path / "m.gguf", "nemotron_h")
    path.write_bytes(path.read_bytes().replace(b"nemotron_h", b"nemotron_x"))
    with pytest.raises(ModelLoadError, match="architecture 'nemotron_x' cannot be read from GGUF; supported: llama, "):
        fwk.LLM(str(path))
