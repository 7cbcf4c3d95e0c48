"""Paged attention by kernels of our own in Triton: on CUDA devices, and anywhere in Triton's interpreter, slowly."""

from __future__ import annotations

import os

from fwk import AttentionBackendSpec, Facts, Needs, Options, hookimpl, option

ON_CUDA = Needs(compute_capability=(8, 0))


class TritonOptions(Options):
    """Options of ``attention.triton``."""

    triton_attention_split_tile_size: int = option(
        256,
        "Keys that one program reads of a sequence with few new tokens: a longer past is split among several. The cut "
        "depends on the sequence alone.",
        stability="beta",
        ge=16,
        multiple_of=16,
    )


class TritonSpec(AttentionBackendSpec):
    """Needs a device that Triton compiles for, or the interpreter, which the user must have asked for."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.host.device == "cuda":
            return ON_CUDA.refusal(facts.host) or super().refusal(facts)
        if os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in Triton's slow interpreter"
        return super().refusal(facts)


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        TritonSpec(
            name="triton",
            load="fwk_attention.triton_paged.backend:TritonBackend",
            needs=Needs(packages=("triton>=3.4",)),
            kv_dtypes=("auto", "int8", "fp8_e4m3"),
            features=frozenset({"graph_capture", "kv_groups", "sliding_window", "soft_cap", "tree_mask", "latent"}),
            kv_layouts={"auto": "rows", "int8": "rows", "fp8_e4m3": "rows"},
            options=TritonOptions,
            rank=-10,  # below torch: the interpreter is for looking, and no GPU has timed the kernels yet
            summary="Own Triton kernels for CUDA; so far run in Triton's interpreter only (TRITON_INTERPRET=1).",
        )
    ]
