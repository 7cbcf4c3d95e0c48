"""What is run, in order: each case in a process of its own, with a time of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Literal

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "dtype": "float32",
}
"""Small enough for a CPU to be the reference of."""

EXPERTS: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""A mixture of experts in every layer."""

MODELS: dict[str, dict[str, Any]] = {
    "0.6B": LLAMA
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True},
    "8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}
"""The shapes of Qwen3-0.6B and Llama-3.1-8B, with random weights."""

DRAFT: dict[str, Any] = LLAMA | {"num_hidden_layers": 1}
"""Drafts for ``LLAMA``, whose layers are others but the first: some of its drafts are kept."""

ATTENTION = ("torch", "triton", "flashinfer")


@dataclass(frozen=True)
class Case:
    """One process. model: its config.json. options: of ``fwk.LLM``. seconds: after which it is ended."""

    name: str
    stage: Literal["A", "B", "C"]
    kind: Literal["parity", "speed"]
    model: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    num_seqs: int = 4
    num_prompt: int = 128
    num_tokens: int = 32
    draft: dict[str, Any] = field(default_factory=dict[str, Any])  # config.json of a model that drafts; empty: none
    tolerance: float = 0.0  # of log-probabilities, between the device and the CPU
    seconds: int = 120


def parity(attention: str, dtype: str, stage: Literal["A", "C"] = "A", **options: Any) -> Case:
    """A case whose tokens are compared with the CPU's in float32."""
    named = " ".join(f"{name}={value}" for name, value in options.items())
    loose = dtype != "float32" or "quantization" in options or "kv_cache_dtype" in options
    return Case(
        f"{attention} {dtype} {named}".strip(),
        stage,
        "parity",
        LLAMA,
        {"attention_backend": attention, "dtype": dtype, **options},
        tolerance=0.15 if loose else 2e-3,
    )


def proofs() -> Iterator[Case]:
    """Stage A: the same answers, in every way there is to compute them."""
    for attention, graphs, overlap in product(ATTENTION, (True, False), (True, False)):
        yield parity(attention, "bfloat16", disable_cuda_graph=not graphs, disable_overlap_schedule=not overlap)
    for attention in ("torch", "triton"):
        yield parity(attention, "float32")
    for attention in ATTENTION:
        yield parity(attention, "bfloat16", kv_cache_dtype="fp8_e4m3")
        yield parity(attention, "bfloat16", quantization="fp8")
        yield parity(attention, "bfloat16", operator_backend="triton", sampling_backend="triton")
        for number in range(3):  # prompts of many chunks: inputs that are overwritten on their way show here
            chunks = parity(attention, "bfloat16", chunked_prefill_size=256, random_seed=number)
            yield Case(**{**vars(chunks), "num_prompt": 6000, "num_seqs": 2, "num_tokens": 8})
    for attention, runner in product(("torch", "triton"), ("torch", "triton")):
        mixed = parity(attention, "bfloat16", moe_runner_backend=runner)
        yield Case(**{**vars(mixed), "name": f"experts {mixed.name}", "model": EXPERTS})
    for runner in ("torch", "triton"):
        mixed = parity("triton", "bfloat16", moe_runner_backend=runner, quantization="fp8")
        yield Case(**{**vars(mixed), "name": f"experts {mixed.name}", "model": EXPERTS})
    for packed in ("int4", "int8", "fp8"):
        yield parity("triton", "bfloat16", quantization=packed, **{f"{packed}_gemm_backend": "triton"})
    yield parity("triton", "bfloat16", operator_backend="triton", enable_deterministic_inference=True)
    for attention, overlap in product(("torch", "triton"), (True, False)):
        drafts = {"speculative_algorithm": "standalone", "speculative_num_draft_tokens": 3}
        drafted = parity(attention, "bfloat16", **drafts, disable_overlap_schedule=not overlap)
        yield Case(**{**vars(drafted), "draft": DRAFT})


def speeds(stage: Literal["B", "C"] = "B") -> Iterator[Case]:
    """Stages B and C: tokens a second, each figure twice."""
    for name, quantization, attention in product(MODELS, ("none", "fp8"), ("flashinfer", "triton")):
        options = {"attention_backend": attention, "dtype": "bfloat16", "quantization": quantization}
        options |= {"operator_backend": "triton"}
        for num_seqs, again in product((1, 64, 256), (1, 2)):
            label = f"{name} {quantization} {attention} batch {num_seqs} ({again})"
            yield Case(label, stage, "speed", MODELS[name], options, num_seqs, 128, 128, seconds=150)


def again() -> Iterator[Case]:
    """Stage C, after a mend: part of A and all of B."""
    for attention in ATTENTION:
        yield parity(attention, "bfloat16", "C")
    yield from speeds("C")


def cases(stage: str) -> list[Case]:
    """Those of a stage: A, B or C."""
    return list({"A": proofs, "B": speeds, "C": again}[stage]())
