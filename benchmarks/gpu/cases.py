"""What is checked, in the order of what it decides; each group of checks is a process of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

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
    "small": LLAMA,
    "experts": EXPERTS,
    "0.6B": LLAMA
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
    | {"max_position_embeddings": 16384},
    "8B": LLAMA
    | {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 16384},
}
"""With random weights; the last two have the shapes of Qwen3-0.6B and Llama-3.1-8B, and room for prompts of 8,192."""


@dataclass(frozen=True)
class Work:
    """Prompts of random tokens, and how many tokens follow."""

    num_seqs: int
    num_prompt: int
    num_tokens: int


WORKS = {"short": Work(4, 128, 32), "chunks": Work(2, 6000, 8)}


@dataclass(frozen=True)
class Check:
    """One line of the outcome.

    group: of the process. options: of ``fwk.LLM``; consecutive checks with the same ones share it. seconds: after which
    it is ended. is_captured: decode steps must be replayed from graphs, or must not. function: of ``checks``. settings:
    what the function is told. tolerance: of log-probabilities, between the device and the CPU in float32. is_vital:
    where it fails, nothing else is run. is_load: where it fails, the rest of its group is not run. load_seconds: that
    it may take longer where its process begins with it, and so loads the model.
    """

    name: str
    group: str
    function: str
    seconds: float
    model: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    is_captured: bool | None = None
    tolerance: float = 0.0
    is_vital: bool = False
    is_load: bool = False
    load_seconds: float = 0.0


GRAPHS = (1, 4, 8)
"""Sizes that are captured while proving; ``SPEED_GRAPHS`` while measuring."""
SPEED_GRAPHS = (1, 64, 256)
CHUNKS: dict[str, Any] = {"chunked_prefill_size": 256}
FP8: dict[str, Any] = {"quantization": "fp8"}
KERNELS: dict[str, Any] = {"operator_backend": "triton", "sampling_backend": "triton"}
EAGER: dict[str, Any] = {"disable_cuda_graph": True}
TOLERANCE = 0.15
"""Of log-probabilities in bfloat16 and less."""


def parity(group: str, name: str, seconds: float, model: str = "small", work: str = "short", **options: Any) -> Check:
    """Log-probabilities of the reference's tokens."""
    captured = None if group == "torch" or "runner torch" in name else not options.get("disable_cuda_graph", False)
    seed = options.pop("random_seed", 0)
    given = {"attention_backend": group if group in ("torch", "flashinfer", "triton") else "triton"}
    given |= {"dtype": "bfloat16", **({"cuda_graph_bs": GRAPHS} if captured else {}), **options}
    settings = {"work": work, "seed": seed}
    tolerance = 2e-3 if given["dtype"] == "float32" else TOLERANCE
    return Check(f"{group}: {name}", group, "parity", seconds, model, given, settings, captured, tolerance)


def proofs() -> Iterator[Check]:
    """Stage ``prove``."""
    yield Check("env: versions", "env", "versions", 30, is_vital=True)
    yield Check("env: plugins", "env", "plugins", 45, is_vital=True)
    yield Check("env: FlashInfer's modules", "env", "modules", 20)
    yield Check("env: copies", "env", "copies", 15, is_vital=True)
    for is_fast in (False, True):
        yield Check(f"smoke: fp8 products, fast {is_fast}", "smoke", "row_products", 8, settings={"is_fast": is_fast})
    yield Check("smoke: fp8 products in blocks", "smoke", "block_products", 8)
    yield Check("smoke: a graph", "smoke", "graph", 5)
    yield Check("smoke: a capture that fails", "smoke", "failed_capture", 5)
    yield Check("smoke: order of copies", "smoke", "copy_order", 5)
    yield parity("torch", "float32", 8, dtype="float32")
    yield parity("torch", "bf16", 5)
    yield parity("torch", "fp8 weights", 6, **FP8)
    for seed in range(3):
        chunks = parity("torch", f"13-chunk prompts, seed {seed}", 8, work="chunks", random_seed=seed, **CHUNKS)
        yield chunks
    yield equal("torch", 12)
    yield suite("flashinfer", 40, ("half", "fp8", "window"), 4)
    yield parity("flashinfer", "bf16, eager", 8, **EAGER, disable_overlap_schedule=True)
    yield parity("flashinfer", "bf16, graphs", 8, disable_overlap_schedule=True)
    yield parity("flashinfer", "bf16, graphs, overlap", 8)
    yield parity("flashinfer", "fp8 weights: the headline", 8, **FP8)
    yield parity("flashinfer", "fp8 K/V", 8, kv_cache_dtype="fp8_e4m3")
    for kernel in ("fa3", "fa2"):
        yield parity("flashinfer", f"prompts by {kernel}", 8, work="chunks", flashinfer_prompt_kernel=kernel)
    yield equal("flashinfer", 12)
    yield Check(
        "serve: the headline as typed",
        "serve",
        "serve",
        60,
        "small",
        {"attention_backend": "flashinfer", **FP8},
        tolerance=TOLERANCE,
    )
    yield suite("triton", 60, ("half", "fp8", "window", "int8"), 8)
    yield parity("triton", "bf16, eager", 15, **EAGER)
    yield parity("triton", "bf16, graphs", 15)
    yield parity("triton", "fp8 K/V", 12, kv_cache_dtype="fp8_e4m3")
    yield parity("triton", "operators and sampler", 15, **KERNELS)
    yield parity("triton", "fp8 products", 12, **FP8, fp8_gemm_backend="triton")
    yield equal("triton", 12)
    yield parity("rest", "experts, runner torch", 12, "experts", moe_runner_backend="torch")
    yield parity("rest", "experts, runner triton", 20, "experts", moe_runner_backend="triton")
    for packed in ("int4", "int8"):
        yield parity("rest", packed, 12, quantization=packed, **{f"{packed}_gemm_backend": "triton"})
    drafts = {"speculative_algorithm": "ngram", "speculative_ngram_max_bfs_breadth": 1}
    yield parity("rest", "drafts in chains", 15, **drafts)


def equal(group: str, seconds: float) -> Check:
    """The same bits with and without overlap, of prompts of many chunks."""
    options: dict[str, Any] = {"attention_backend": group, "dtype": "bfloat16", **CHUNKS, **EAGER}
    return Check(f"{group}: overlap changes nothing", group, "equal", seconds, "small", options)


def suite(group: str, seconds: float, words: tuple[str, ...], at_once: int) -> Check:
    """Of ``tests/gpu`` the shapes whose names have one of the words."""
    settings = {"words": words, "backend": group, "at_once": at_once}
    return Check(f"{group}: attention suite", group, "suite", seconds, settings=settings)


SERVED = (
    ("8B", "fp8", "flashinfer"),
    ("8B", "none", "flashinfer"),
    ("8B", "fp8", "triton"),
    ("0.6B", "none", "flashinfer"),
    ("0.6B", "none", "triton"),
)
FLOORS: dict[tuple[str, str], dict[str, float]] = {
    ("8B", "none"): {"ms a token at 1": 3.5, "tok/s at 64": 13_500, "tok/s at 256": 26_000, "prefill tok/s": 56_000},
    ("8B", "fp8"): {"ms a token at 1": 1.9, "tok/s at 64": 20_500, "tok/s at 256": 34_500, "prefill tok/s": 113_000},
    ("0.6B", "none"): {"ms a token at 1": 0.30, "tok/s at 64": 46_700, "tok/s at 256": 53_800},
}
"""Of an H200, from 4.3 TB/s and 790 TFLOP/s as measured there: nothing can be faster."""


def speeds() -> Iterator[Check]:
    """Stage ``measure``: each figure twice."""
    for model, quantization, attention in SERVED:
        options: dict[str, Any] = {
            "attention_backend": attention,
            "dtype": "bfloat16",
            "quantization": quantization,
            "cuda_graph_bs": SPEED_GRAPHS,
            "max_running_requests": SPEED_GRAPHS[-1],
            "max_total_tokens": 80_000,
            **(KERNELS if attention == "triton" else {}),
        }
        label = f"{model} {quantization} {attention}"
        seconds = 90 if attention == "triton" else 45  # kernels are compiled while it loads
        load = Check(f"{label}: load", label, "load", seconds, model, options, is_captured=True)
        yield replace(load, is_load=True)
        load = replace(load, load_seconds=seconds)
        for batch in SPEED_GRAPHS:
            found = {"num_seqs": batch, "num_prompt": 128, "num_tokens": 128, "figure": f"at {batch}"}
            yield replace(load, name=f"{label}: batch {batch}", function="decode", seconds=20, settings=found)
        for length in (2048, 8192):
            found = {"num_seqs": 4, "num_prompt": length}
            yield replace(load, name=f"{label}: prefill {length}", function="prefill", seconds=10, settings=found)
        yield replace(load, name=f"{label}: profile", function="profile", seconds=15, settings={"num_seqs": 64})
    options = {"attention_backend": "flashinfer", **FP8, "max_total_tokens": 80_000}
    yield Check("serve: 8B fp8, 64 and 256 at once", "serve", "serve", 60, "8B", options, {"at_once": (64, 256)})


STAGES = {"prove": (proofs, 240.0), "measure": (speeds, 300.0)}
"""Checks, and the seconds that all of them may take."""


def references() -> list[tuple[str, str, int, str]]:
    """Model, work, seed and quantization of each reference that the proofs read."""
    found = dict.fromkeys(reference_of(check) for check in proofs() if check.function == "parity")
    return list(found)


def file_of(folder: Path, model: str, work: str, seed: int, coarse: str) -> Path:
    """Of a reference."""
    return folder / f"{'-'.join(word for word in (model, work, str(seed), coarse) if word)}.npz"


def missing_references(checks: Iterable[Check], folder: Path) -> list[Path]:
    """Those that the checks read, and that are not there."""
    wanted = dict.fromkeys(file_of(folder, *reference_of(check)) for check in checks if check.function == "parity")
    return [path for path in wanted if not path.exists()]


def reference_of(check: Check) -> tuple[str, str, int, str]:
    """int4 is too coarse to be compared with the numbers that it stands for."""
    coarse = "int4" if check.options.get("quantization") == "int4" else ""
    return check.model, check.settings["work"], check.settings["seed"], coarse
