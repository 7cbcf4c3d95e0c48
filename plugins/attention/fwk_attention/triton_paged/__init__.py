"""Paged attention by kernels of our own in Triton: on CUDA devices, and anywhere in Triton's interpreter, slowly."""

from __future__ import annotations

from fwk import AttentionBackendSpec, Needs, Options, hookimpl, option
from fwk.interfaces.declaration import Facts, InterpretedKernels
from fwk_attention._common.deterministic import why_not_deterministic


class TritonOptions(Options):
    """Options of ``attention.triton``."""

    triton_attention_split_tile_size: int = option(
        256,
        "Keys that one program reads of a sequence with few new tokens: a longer past is split among several. The cut "
        "depends on the sequence alone. With --enable-deterministic-inference, of one with many, too.",
        stability="beta",
        ge=16,
        multiple_of=16,
    )
    triton_attention_cascade: bool = option(
        False,
        "Read keys that sequences of a step share (a cached prefix) once for all of them: whole ranges of "
        "--triton-attention-split-tile-size, in layers without a sliding window. Not with "
        "--enable-deterministic-inference. No GPU has timed it yet.",
        stability="beta",
    )


class TritonSpec(InterpretedKernels, AttentionBackendSpec):
    """Needs a device that Triton compiles for, or its interpreter."""

    on_device = Needs(device="cuda", compute_capability=(8, 0))
    interpreter = "TRITON_INTERPRET"

    def refusal(self, facts: Facts) -> str | None:
        return why_not_deterministic(facts) or super().refusal(facts)


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        TritonSpec(
            name="triton",
            load="fwk_attention.triton_paged.backend:TritonBackend",
            needs=Needs(packages=("triton>=3.4",)),
            kv_dtypes=("auto", "int8", "fp8_e4m3"),
            features=frozenset(
                {"graph_capture", "kv_groups", "late_lengths", "sliding_window", "soft_cap", "tree_mask", "latent"}
            ),
            kv_layouts={"auto": "rows", "int8": "rows", "fp8_e4m3": "rows"},
            offers=frozenset({"deterministic"}),
            options=TritonOptions,
            rank=-10,  # below torch: the interpreter is for looking, and no GPU has timed the kernels yet
            summary="Own Triton kernels for CUDA; so far run in Triton's interpreter only (TRITON_INTERPRET=1).",
        )
    ]
