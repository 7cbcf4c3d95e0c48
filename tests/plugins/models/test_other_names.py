"""Models that transformers does not know, against those of the same numbers that it knows by other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tests.helpers.architectures import SMALL, close, write
from tests.helpers.checkpoints import reference_logits, token_ids
from tests.helpers.models import RunnableModel, on_ranks
from torch import Tensor

from fwk.errors import ModelLoadError

Tensors = dict[str, Tensor]
HEADS, KV_HEADS, SIZE = 4, 2, 16


def rename(folder: Path, change: Callable[[Tensors], Tensors], config: dict[str, Any]) -> None:
    """Store the same numbers under other names, with another config."""
    save_file({name: x.contiguous() for name, x in change(load_file(folder / "model.safetensors")).items()},
              folder / "model.safetensors")  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def joined(tensors: Tensors, prefix: str, ending: str = "weight") -> list[Tensor]:
    return [tensors.pop(f"{prefix}.{part}_proj.{ending}") for part in "qkv"]


def grouped(parts: list[Tensor]) -> Tensor:
    """InternLM 2's order: of each K/V head its queries, its key, its value."""
    q, k, v = (x.view(KV_HEADS, -1, SIZE, x.shape[-1]) for x in parts)
    return torch.cat([q, k, v], 1).reshape(-1, parts[0].shape[-1])


def renamed(tensors: Tensors, names: dict[str, str]) -> Tensors:
    found: Tensors = {}
    for name, x in tensors.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        found[name] = x
    return found


def as_internlm2(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.attention.wqkv.weight"] = grouped(joined(tensors, f"{prefix}.self_attn"))
    names = {
        "self_attn.o_proj": "attention.wo", "input_layernorm": "attention_norm", "lm_head": "output",
        "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "feed_forward.w1", "mlp.up_proj": "feed_forward.w3",
        "mlp.down_proj": "feed_forward.w2", "embed_tokens": "tok_embeddings",
    }  # fmt: skip
    return found | renamed(tensors, names)


def as_chatglm(tensors: Tensors) -> Tensors:
    found: Tensors = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        for ending in ("weight", "bias"):
            name = f"transformer.encoder.layers.{layer}.self_attention.query_key_value.{ending}"
            found[name] = torch.cat(joined(tensors, prefix, ending))
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings", "model.layers": "transformer.encoder.layers",
        "model.norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer",
        "self_attn.o_proj": "self_attention.dense", "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }  # fmt: skip
    return found | renamed(tensors, names)


def as_baichuan(tensors: Tensors) -> Tensors:
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn"
        tensors[f"{prefix}.W_pack.weight"] = torch.cat(joined(tensors, prefix))
    return tensors


LLAMA = {name: value for name, value in SMALL.items() if not name.endswith("_token_id")}
CHATGLM = {
    "num_layers": 2, "ffn_hidden_size": 96, "kv_channels": SIZE, "layernorm_epsilon": 1.5625e-07, "rope_ratio": 1,
    "padded_vocab_size": 320, "seq_length": 256, "multi_query_attention": True, "multi_query_group_num": KV_HEADS,
    "hidden_size": 64, "num_attention_heads": HEADS, "add_qkv_bias": True, "rmsnorm": True, "post_layer_norm": True,
    "tie_word_embeddings": False,
}  # fmt: skip
OTHERS: dict[str, tuple[str, dict[str, Any], Callable[[Tensors], Tensors], dict[str, Any]]] = {
    "internlm2": ("llama", {}, as_internlm2, {**LLAMA, "architectures": ["InternLM2ForCausalLM"], "bias": False}),
    "internlm3": (
        "llama", {"attention_bias": True}, lambda tensors: tensors,
        {**LLAMA, "architectures": ["InternLM3ForCausalLM"], "bias": True, "qkv_bias": True},
    ),
    "chatglm3": (
        "glm", {"head_dim": SIZE, "attention_bias": True, "rope_parameters": {"rope_type": "default",
         "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}, as_chatglm,
        {**CHATGLM, "architectures": ["ChatGLMModel"]},
    ),
    "baichuan": (
        "llama", {"num_key_value_heads": HEADS}, as_baichuan,
        {**LLAMA, "num_key_value_heads": HEADS, "architectures": ["BaichuanForCausalLM"]},
    ),
}  # fmt: skip


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", OTHERS)
def test_the_same_numbers_under_other_names(name: str, tmp_path: Path) -> None:
    kind, changes, change, config = OTHERS[name]
    reference = write(tmp_path, kind, changes)
    rename(tmp_path, change, config)
    prompt = token_ids(60)
    wanted = reference_logits(reference, prompt)
    model = RunnableModel(tmp_path)
    assert model.spec != "transformers"
    close(model.logits(prompt), wanted)
    close(model.logits(prompt, [33, 20, *([1] * 7)]), wanted)
    assert model.weights.asked >= set(model.weights.names()) - model.weights.skipped
    for logits in on_ranks(2, lambda tp: RunnableModel(tmp_path, tp=tp).logits(prompt)):
        close(logits, wanted)


def test_baichuan_2_has_a_head_of_rows_of_length_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fwk_models.baichuan.model.SECOND_VOCABULARY", 320)
    kind, changes, change, config = OTHERS["baichuan"]
    reference = write(tmp_path, kind, changes)
    rename(tmp_path, change, config)
    head = reference.lm_head.weight
    with torch.no_grad():
        head.copy_(F.normalize(head))
    prompt = token_ids(30)
    close(RunnableModel(tmp_path).logits(prompt), reference_logits(reference, prompt))


def test_the_larger_baichuan_has_slopes_instead_of_positions(tmp_path: Path) -> None:
    """A layer's scores by hand: slopes of arXiv:2108.12409 for four heads are a quarter to the powers 1 to 4."""
    kind, changes, change, config = OTHERS["baichuan"]
    reference = write(tmp_path, kind, {**changes, "num_hidden_layers": 2})
    slopes = torch.tensor([0.25, 0.25**2, 0.25**3, 0.25**4])

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        places = torch.arange(q.shape[2])
        scores = q @ k.transpose(-1, -2) * scaling + slopes[:, None, None] * (places - places[:, None]).float()
        scores = scores.masked_fill(places > places[:, None], -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    from transformers import AttentionInterface

    AttentionInterface.register("slopes", attend)
    reference.set_attn_implementation("slopes")
    reference.model.rotary_emb.inv_freq.zero_()
    prompt = token_ids(30)
    wanted = reference_logits(reference, prompt)
    rename(tmp_path, change, {**config, "has_slopes": True})
    from fwk_models.baichuan import BaichuanSpec

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BaichuanSpec, "normalised", lambda self, raw: {**raw, "has_slopes": True})
        close(RunnableModel(tmp_path).logits(prompt), wanted)


@pytest.mark.parametrize("change", [{"rmsnorm": False}, {"post_layer_norm": False}, {"prefix_projection": True}])
def test_a_chatglm_of_another_shape_is_refused(change: dict[str, Any], tmp_path: Path) -> None:
    kind, changes, rename_to, config = OTHERS["chatglm3"]
    write(tmp_path, kind, changes)
    rename(tmp_path, rename_to, config | change)
    with pytest.raises(ModelLoadError, match="chatglm without rmsnorm"):
        RunnableModel(tmp_path)


def test_llama_4_that_sees_is_served_as_text_of_one_chunk(tmp_path: Path) -> None:
    from fwk_models.llama4 import models

    [spec] = models()
    text = {"max_position_embeddings": 10_485_760, "attention_chunk_size": 8192, "num_hidden_layers": 4}
    found = spec.normalised({"architectures": ["Llama4ForConditionalGeneration"], "text_config": text})
    assert (found["max_position_embeddings"], found["no_rope_layers"], found["moe_layers"]) == (
        8192,
        [1, 1, 1, 0],
        [0, 1, 2, 3],
    )
    with pytest.raises(ModelLoadError, match="gives each token one expert"):
        spec.normalised({"architectures": ["Llama4ForCausalLM"], "num_experts_per_tok": 2})
