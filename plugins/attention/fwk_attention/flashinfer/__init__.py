"""Paged attention by FlashInfer's kernels. Written against its documentation; not yet run on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from fwk import AttentionBackendSpec, Facts, Needs, Options, hookimpl, option

LATENT_SIZE = 576
"""Of its MLA kernels: a latent of 512 numbers and a rotated part of 64."""

NOT_LATENT = ("sinks", "sliding_window", "soft_cap", "tree_mask")


class FlashInferOptions(Options):
    """Options of ``attention.flashinfer``."""

    flashinfer_prompt_kernel: Literal["auto", "fa2", "fa3"] = option(
        "auto",
        "FlashInfer's kernels for prompts; auto: fa3 on Hopper where K/V are of the model's own precision, else fa2. "
        "Those for next tokens and trees of drafts are fa2.",
        stability="beta",
    )


class FlashInferSpec(AttentionBackendSpec):
    """Head sizes of its kernels, and what those for latent layers (MLA) cannot do."""

    def refusal(self, facts: Facts) -> str | None:
        if "latent" not in facts.features:
            return super().refusal(facts)
        refusal = super().refusal(replace(facts, head_size=0))
        if refusal is not None:
            return refusal
        if facts.head_size not in (0, LATENT_SIZE):
            return f"has MLA kernels for latents of 512 + 64 numbers, this model's have {facts.head_size}"
        if facts.kv_dtype != "auto":
            return f"keeps latents as auto, not {facts.kv_dtype}: leave --kv-cache-dtype out"
        unable = [name for name in NOT_LATENT if name in facts.features]
        return f"lacks {', '.join(unable)} in latent layers, which this run needs" if unable else None


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        FlashInferSpec(
            name="flashinfer",
            load="fwk_attention.flashinfer.backend:FlashInferBackend",
            needs=Needs(device="cuda", packages=("flashinfer-python>=0.6",), compute_capability=(8, 0)),
            dtypes=("float16", "bfloat16"),
            kv_dtypes=("auto", "fp8_e4m3"),
            head_sizes=(64, 128, 256),
            features=frozenset(
                {"graph_capture", "kv_groups", "latent", "sinks", "sliding_window", "soft_cap", "tree_mask"}
            ),
            kv_layouts={"auto": "rows"},
            options=FlashInferOptions,
            rank=-20,  # auto takes it once a GPU has shown that it is right
            summary="FlashInfer's paged kernels for CUDA, fp8 K/V with one scale; an adapter not yet run on a GPU.",
        )
    ]
