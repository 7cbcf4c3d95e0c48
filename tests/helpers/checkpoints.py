"""Tiny random checkpoints, written by transformers' own classes: the reference for models and for whole engines.

All have a vocabulary of 320, positions up to 512, and weights large enough to make attention and routing selective.
Inputs of linear layers are multiples of 128 (but for latents): groups of 64 divide them on one rank and on two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken
from torch import Tensor

import fwk
from fwk import SamplingParams
from fwk_loaders.dummy.tokenizer import build_tokenizer
from tests.helpers.lazy import lazy

transformers = lazy("transformers")

VOCAB = 320
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 128, "norm_topk_prob": True}
LATENT = {
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 128,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
WINDOWS = {
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
HYBRID = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
DELTA = {
    "shared_expert_intermediate_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
CONVOLUTIONS = {
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "block_multiple_of": 128,
    "tie_word_embeddings": False,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 24}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {"head_dim": 32}),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"head_dim": 32, **EXPERTS}),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM", CONVOLUTIONS),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {"head_dim": 32, **EXPERTS, **HYBRID, **DELTA}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", WINDOWS),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", LATENT),
}


def make_checkpoint(folder: Path, kind: str, **changes: Any) -> transformers.PreTrainedModel:
    """Write a checkpoint of one of ``KINDS`` with a tokeniser of bytes, and return the reference model.

    The same kind and changes give the same numbers, in float32.
    """
    config_type, model_type, settings = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, config_type)(**{**SMALL, **settings, **changes}, attn_implementation="eager")
    model = getattr(transformers, model_type)(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    build_tokenizer(VOCAB, str(folder)).save(str(folder / "tokenizer.json"))
    return model


def write_tokenizer(folder: Path, marks: Sequence[str], longest: Sequence[str] = ()) -> None:
    """A tokeniser of bytes, whose last ids are those of ``longest``, text that is one token, and of special marks."""
    tokenizer = build_tokenizer(VOCAB - len(marks) - len(longest), str(folder))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in longest])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in marks])
    tokenizer.save(str(folder / "tokenizer.json"))


def greedy_of(model: Any, given: dict[str, Tensor], count: int, first: int) -> tuple[list[int], Tensor]:
    """The tokens that transformers chooses, and their log-probabilities: for each, everything is computed anew.

    given: the model's inputs, [1, n] for each token. first: of the marks, which would be taken for media.
    """
    tokens, scores = list[int](), list[float]()
    for _ in range(count):
        with torch.no_grad():
            last = model(**given, use_cache=False).logits[0, -1].log_softmax(-1)
        token = int(last[:first].argmax())
        tokens.append(token)
        scores.append(float(last[token]))
        for name, value in {"input_ids": token, "attention_mask": 1, "mm_token_type_ids": 0}.items():
            if name in given:
                given[name] = torch.cat([given[name], torch.tensor([[value]], dtype=given[name].dtype)], 1)
    return tokens, torch.tensor(scores)


def randomise(model: transformers.PreTrainedModel) -> None:
    """Weights with a standard deviation of a quarter; norms around what leaves numbers as they are."""
    centre = 0.0 if "Gemma3" in type(model).__name__ else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(centre if "norm" in name else 0.0, 0.25)


def change_config(folder: Path, **changes: Any) -> None:
    """Let a checkpoint's config.json say something else."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def checkpoint_maker(root: Path) -> Callable[..., Path]:
    """Folders of checkpoints below ``root``, each made once."""

    def make(kind: str, **changes: Any) -> Path:
        folder = root / "-".join([kind, *(f"{name}={value}" for name, value in sorted(changes.items()))])
        if not folder.exists():
            make_checkpoint(folder, kind, **changes)
        return folder

    return make


def token_ids(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Random tokens."""
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    """[len(tokens), vocab_size]."""
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def reference_greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """The ``count`` tokens that transformers' own loop generates."""
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def gives_tokens_of(path: Path, reference: transformers.PreTrainedModel) -> None:
    """The engine continues a long and a short prompt as the reference does."""
    prompts = [token_ids(n, n) for n in (40, 7)]
    wanted = [reference_greedy(reference, prompt, 8) for prompt in prompts]
    settings = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    with fwk.LLM(str(path), dtype="float32", max_total_tokens=512) as llm:
        assert [done.token_ids for done in llm.generate(prompts, settings)] == wanted
