"""Files of each architecture, written by the gguf package's names, against transformers' own classes in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import EXPERTS, GPT_OSS, GROUPS, LATENT, OWN, write
from tests.helpers.checkpoints import gives_tokens_of
from tests.helpers.gguf_families import MORE, converter
from tests.helpers.quantised import gguf_like

import fwk
from fwk.errors import ModelLoadError
from fwk_loaders.gguf.architectures import ARCHITECTURES
from fwk_loaders.gguf.tokenizer import PRE_TOKENIZERS

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

HEAD = {"head_dim": 16}
FOUR_TIMES = {"intermediate_size": 256}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}
COHERE = {"logit_scale": "logit_scale"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "olmo2": ("olmo2", {}, {}),
    "olmo3": ("olmo2", {**FOUR, "sliding_window": 20, "layer_types": PATTERN}, {}),
    "olmoe": ("olmoe", {"num_experts": 8, "num_experts_per_tok": 3}, {}),
    "gemma": ("gemma", {"head_dim": 24}, {}),
    "gemma2": ("gemma2", {"head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 24}, CAPS),
    "granite": ("granite", SCALES, GRANITE),
    "smollm3": ("smollm3", {**FOUR, "no_rope_layers": [1, 1, 1, 0], "tie_word_embeddings": False}, {}),
    "mixtral": ("llama", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "starcoder2": ("starcoder2", {}, {}),
    "cohere": ("command-r", {}, COHERE),
    "cohere2": ("cohere2", {**FOUR, **HEAD, "sliding_window": 20, "layer_types": PATTERN}, COHERE),
    "phi3": ("phi3", {}, {}),
    "glm4": ("glm4", HEAD, {}),
    "qwen2_moe": ("qwen2moe", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 48}, {}),
    "gpt_oss": ("gpt-oss", {**GPT_OSS, "intermediate_size": 96}, {}),
    "deepseek_v2": ("deepseek2", {**EXPERTS, **LATENT, **ROUTED, "q_lora_rank": None}, {}),
    "deepseek_v3": ("deepseek2", {**EXPERTS, **GROUPS, **LATENT}, {}),
    "glm4_moe": ("glm4moe", {**EXPERTS, **GROUPS, **HEAD, "use_qk_norm": True, "attention_bias": True}, {}),
    "gpt2": ("gpt2", {**OWN, "n_inner": None}, {}),
    "gpt_neox": ("gptneox", OWN, {}),
    "bloom": ("bloom", OWN, {}),
    "falcon": ("falcon", {"alibi": False, "multi_query": True, "num_key_value_heads": 1, **FOUR_TIMES}, {}),
}
"""By transformers' name for the model: GGUF's, its settings, and float metadata."""


@pytest.mark.gate(8)
@pytest.mark.parametrize("kind", CASES)
def test_tokens_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    architecture, changes, numbers = CASES[kind]
    reference = write(tmp_path / "source", kind, changes)
    interleaves = architecture in ("granite", "smollm3", "llama")
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    more = MORE[architecture](config) if architecture in MORE else {}
    path = gguf_like(
        tmp_path / "source",
        tmp_path / "m.gguf",
        architecture,
        numbers,
        interleaves=interleaves,
        more=more,
        change=converter(config),
    )
    gives_tokens_of(path, reference)


FALCONS: dict[str, dict[str, Any]] = {
    "groups": {"num_ln_in_parallel_attn": None},
    "groups, one norm": {"num_ln_in_parallel_attn": 1},
}


@pytest.mark.parametrize("changes", FALCONS.values(), ids=FALCONS.keys())
def test_falcons_with_groups_of_heads(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {"new_decoder_architecture": True, "num_kv_heads": 2, **FOUR_TIMES, **changes}
    reference = write(tmp_path / "source", "falcon", changes)
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    given = {"interleaves": False, "change": converter(config)}
    gives_tokens_of(gguf_like(tmp_path / "source", tmp_path / "m.gguf", "falcon", {}, **given), reference)


def test_parts_one_after_another(tmp_path: Path) -> None:
    reference = write(tmp_path / "source", "gpt_neox", {**OWN, "use_parallel_residual": False})
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    given = {"interleaves": False, "change": converter(config), "more": MORE["gptneox"](config)}
    gives_tokens_of(gguf_like(tmp_path / "source", tmp_path / "m.gguf", "gptneox", {}, **given), reference)


def test_a_layer_that_predicts_is_left_out(tmp_path: Path) -> None:
    """GLM-4.5's files count it among the others."""
    reference = write(tmp_path / "source", "glm4_moe", CASES["glm4_moe"][1])
    config = json.loads((tmp_path / "source" / "config.json").read_text())
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    for name in ("enorm", "hnorm", "shared_head.norm", "input_layernorm"):
        tensors[f"model.layers.2.{name}.weight"] = torch.ones(config["hidden_size"])
    save_file(tensors, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    more = {**MORE["glm4moe"](config), "glm4moe.nextn_predict_layers": 1}
    given = {"interleaves": False, "change": converter(config), "more": more}
    gives_tokens_of(gguf_like(tmp_path / "source", tmp_path / "m.gguf", "glm4moe", {}, **given), reference)


@pytest.mark.parametrize("architecture", ["internlm2", "baichuan"])
def test_families_that_are_llama_by_other_names(architecture: str, tmp_path: Path) -> None:
    """Their checkpoints join matrices; the converter takes those apart."""
    reference = write(tmp_path / "source", "llama", {})
    gives_tokens_of(gguf_like(tmp_path / "source", tmp_path / "m.gguf", architecture, {}, interleaves=True), reference)


def test_minicpm_is_granite_with_the_usual_scale_of_scores(tmp_path: Path) -> None:
    reference = write(tmp_path / "source", "granite", {**SCALES, "attention_multiplier": 0.25})  # of heads of 16
    numbers = {key: name for key, name in GRANITE.items() if key != "attention.scale"}
    gives_tokens_of(
        gguf_like(tmp_path / "source", tmp_path / "m.gguf", "minicpm", numbers, interleaves=True), reference
    )


def test_a_deepseek_file_of_older_converters_holds_the_matrix_in_one(tmp_path: Path) -> None:
    reference = write(tmp_path / "source", "deepseek_v2", CASES["deepseek_v2"][1])
    more = MORE["deepseek2"](json.loads((tmp_path / "source" / "config.json").read_text()))
    for name in ("key", "value"):
        more[f"deepseek2.attention.{name}_length"] = more.pop(f"deepseek2.attention.{name}_length_mla")
    path = gguf_like(tmp_path / "source", tmp_path / "m.gguf", "deepseek2", {}, interleaves=False, more=more)
    gives_tokens_of(path, reference)


def test_what_cannot_be_told_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "deep", "llama", {"num_hidden_layers": 40, "hidden_size": 16, "intermediate_size": 16})
    path = gguf_like(tmp_path / "deep", tmp_path / "13b.gguf", "baichuan", {}, interleaves=True)
    with pytest.raises(ModelLoadError, match="Baichuan 13B cannot be read from GGUF"):
        fwk.LLM(str(path))
    write(tmp_path / "source", "llama", {})
    more = {"granite.expert_count": 4}
    path = gguf_like(tmp_path / "source", tmp_path / "moe.gguf", "granite", {}, interleaves=True, more=more)
    with pytest.raises(ModelLoadError, match="experts of the architecture 'granite' cannot be read"):
        fwk.LLM(str(path))
    path = gguf_like(tmp_path / "source", tmp_path / "old.gguf", "minicpm", {}, interleaves=True)
    with pytest.raises(ModelLoadError, match=r"minicpm\.embedding_scale is missing"):
        fwk.LLM(str(path))


def test_twenty_architectures_and_pre_tokenisers() -> None:
    assert len(ARCHITECTURES) >= 20
    assert len(PRE_TOKENIZERS) >= 20
    told = (Path(__file__).parents[3] / "docs/models.md").read_text()
    missing = [name for name in (*ARCHITECTURES, *PRE_TOKENIZERS) if f"`{name}`" not in told]
    assert not missing
