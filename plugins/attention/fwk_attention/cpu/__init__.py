"""Paged attention on a CPU by a kernel of our own, which reads K and V where they lie."""

from dataclasses import dataclass
from pathlib import Path

import fwk_native as native
from fwk import AttentionBackendSpec, Needs, hookimpl
from fwk.interfaces.declaration import Facts
from fwk_attention._common.deterministic import why_not_deterministic

AMX_STEP = 32
"""Keys that AMX adds up at a time: with pages of whole steps a window's keys are divided alike in every chunk."""


@dataclass(frozen=True, kw_only=True)
class CpuBackendSpec(AttentionBackendSpec):
    """Needs a compiler besides what the declaration says."""

    def refusal(self, facts: Facts) -> str | None:
        refusal = native.refusal()
        has_steps = refusal is None and facts.dtype == "bfloat16" and native.has_tiles(native.isa())
        holds = () if has_steps and facts.block_size % AMX_STEP else ("sliding_window",)
        return why_not_deterministic(facts, holds) or super().refusal(facts) or refusal


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        CpuBackendSpec(
            name="cpu",
            load="fwk_attention.cpu.backend:CpuBackend",
            needs=Needs(device="cpu"),
            dtypes=("float32", "bfloat16"),
            kv_dtypes=("auto", "int8", "fp8_e4m3"),
            features=frozenset({"kv_groups", "sliding_window", "soft_cap", "tree_mask"}),
            kv_layouts={"auto": "rows"},  # slower than its own: tiles are made of rows whenever they are read
            offers=frozenset({"deterministic", "invariant"}),
            rank=10,
            kernels=(Path(__file__).with_name("attention_bfloat16.cpp"),),
            summary="C++ kernels for CPUs (AVX2, AVX-512, AMX), built on first use.",
        )
    ]
