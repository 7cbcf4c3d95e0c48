"""Paged attention on a CPU by a kernel of our own, which reads K and V where they lie."""

from dataclasses import dataclass

from fwk import AttentionBackendSpec, Needs, hookimpl, native
from fwk.interfaces.declaration import Facts
from fwk_attention._common.deterministic import why_not_deterministic


@dataclass(frozen=True, kw_only=True)
class CpuBackendSpec(AttentionBackendSpec):
    """Needs a compiler besides what the declaration says."""

    def refusal(self, facts: Facts) -> str | None:
        return why_not_deterministic(facts) or super().refusal(facts) or native.refusal()


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
            offers=frozenset({"deterministic"}),
            rank=10,
            summary="C++ kernels for CPUs (AVX2, AVX-512, AMX), built on first use.",
        )
    ]
