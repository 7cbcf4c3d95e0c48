"""A config that contradicts its tensors, and experts that are stored in no layout that is read: one sentence each."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import ARCHITECTURES, write
from tests.helpers.checkpoints import change_config, make_checkpoint

import fwk
from fwk.errors import FwkError

Tensors = dict[str, torch.Tensor]


def refusal(folder: Path) -> str:
    with pytest.raises(FwkError) as caught:
        fwk.LLM(str(folder), dtype="float32", max_total_tokens=512)
    said = str(caught.value)
    assert "\n" not in said
    return said


@pytest.mark.gate(9)
@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("llama", {"architectures": ["NobodysForCausalLM"]}, "no model plugin serves 'NobodysForCausalLM'"),
        ("llama", {"hidden_size": 256}, r"embed_tokens.weight' has the shape \(320, 128\), .* needs \(320, 256\)"),
        ("llama", {"num_key_value_heads": 1}, r"k_proj.weight' has the shape \(64, 128\), .* \(32, 128\)"),
        ("llama", {"head_dim": 64}, r"q_proj.weight' has the shape"),
        ("llama", {"intermediate_size": 128}, r"gate_proj.weight' has the shape"),
        ("llama", {"num_hidden_layers": 1}, r"9 tensors belong to no layer of llama \(model\.layers\.1\.input"),
        ("llama", {"num_hidden_layers": 9}, r"model\.layers\.2\.input_layernorm\.weight' is missing"),
        ("llama", {"vocab_size": 300}, "the tokenizer has 320 tokens, the model only 300"),
        ("gemma3", {"num_hidden_layers": 9}, "'layer_types' must name the kind of each of the 9 layers"),
        ("qwen3_moe", {"moe_intermediate_size": 64}, r"experts\.0\.gate_proj\.weight' has the shape"),
        ("deepseek_v2", {"n_routed_experts": 4}, r"mlp\.gate\.weight' has the shape \(8, 128\), .* \(4, 128\)"),
        ("deepseek_v2", {"kv_lora_rank": 64}, "kv_a_proj_with_mqa.weight' has the shape"),
        ("lfm2", {"conv_L_cache": 5}, r"conv\.conv\.weight' has the shape"),
        ("qwen3_next", {"linear_num_value_heads": 2}, r"in_proj_qkvz\.weight' has the shape"),
        ("mamba2", {"state_size": 32}, r"in_proj\.weight' has the shape"),
        ("gpt2", {"n_layer": 1}, r"tensors belong to no layer of gpt2 \(transformer\.h\.1"),
        ("gpt_oss", {"num_local_experts": 2}, r"router\.weight' has the shape \(4, 64\), .* \(2, 64\)"),
    ],
)
def test_a_config_that_contradicts_its_tensors(
    kind: str, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    if kind in ("mamba2", "gpt2", "gpt_oss"):
        write(tmp_path, *ARCHITECTURES[kind])
    else:
        make_checkpoint(tmp_path, kind)
    change_config(tmp_path, **changes)
    assert re.search(sentence, refusal(tmp_path))


def in_one(tensors: Tensors) -> None:
    """As transformers 5 keeps experts in memory."""
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{prefix}.{i}.{part}_proj.weight") for i in range(8)])
            for part in ("gate", "up", "down")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}


def renamed(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name.replace("gate_proj", "w1").replace("up_proj", "w3").replace("down_proj", "w2")] = tensors.pop(name)


def integers(tensors: Tensors) -> None:
    tensors |= {name: x.to(torch.int8) for name, x in tensors.items() if ".experts." in name}


def one_less(tensors: Tensors) -> None:
    for name in [name for name in tensors if ".experts.7." in name]:
        del tensors[name]


def one_more(tensors: Tensors) -> None:
    tensors |= {name.replace(".7.", ".8."): x.clone() for name, x in tensors.items() if ".experts.7." in name}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            in_one,
            r"layers\.0\.mlp\.experts: the experts are stored as down_proj, gate_up_proj, and this model reads "
            r"N\.gate_proj, N\.up_proj, N\.down_proj",
        ),
        (renamed, r"the experts are stored as N\.w1\.weight, N\.w2\.weight, N\.w3\.weight, and"),
        (integers, r"experts\.0\.gate_proj\.weight' is quantised \(I8\), but this layer reads plain numbers only"),
        (one_less, r"experts\.7\.gate_proj\.weight' is missing"),
        (one_more, r"6 tensors belong to no layer of qwen3 \(model\.layers\.0\.mlp\.experts\.8\.down_proj"),
    ],
)
def test_experts_of_an_unknown_layout(change: Callable[[Tensors], None], sentence: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, tmp_path / "model.safetensors")
    assert re.search(sentence, refusal(tmp_path))
