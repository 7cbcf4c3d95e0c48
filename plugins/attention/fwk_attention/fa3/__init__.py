"""Paged attention by FlashAttention 3, from whichever package brings it. Not yet run on a GPU."""

from __future__ import annotations

import importlib.util

from fwk import AttentionBackendSpec, Facts, Needs, hookimpl

HOPPER = 9
PACKAGES = {"flash_attn_interface": "flash-attn-3", "sgl_kernel": "sgl-kernel", "vllm_flash_attn": "vllm-flash-attn"}
"""Modules that bring it, in the order they are taken, and their packages."""


class FA3Spec(AttentionBackendSpec):
    """Needs one of several packages, and a Hopper device, which its kernels are for."""

    def refusal(self, facts: Facts) -> str | None:
        refusal = super().refusal(facts)
        if refusal is not None:
            return refusal
        capability = facts.host.compute_capability or (0, 0)
        if capability[0] != HOPPER:
            return f"needs a device of compute capability 9, this one has {capability[0]}.{capability[1]}"
        if not any(importlib.util.find_spec(module) for module in PACKAGES):
            return f"needs one of the packages {', '.join(PACKAGES.values())}: pip install sgl-kernel"
        return None

    def auto_skip_reason(self, facts: Facts) -> str | None:
        return f"has not been run on a GPU yet: name it with --attention-backend {self.name}"


@hookimpl
def attention_backends() -> list[AttentionBackendSpec]:
    return [
        FA3Spec(
            name="fa3",
            load="fwk_attention.fa3.backend:FA3Backend",
            needs=Needs(device="cuda", compute_capability=(9, 0)),
            dtypes=("float16", "bfloat16"),
            head_sizes=(64, 96, 128, 192, 256),
            features=frozenset({"kv_groups", "sliding_window", "soft_cap"}),
            rank=-30,
            summary="FlashAttention 3 for Hopper, from flash-attn-3, sgl-kernel or vllm-flash-attn; an adapter not yet "
            "run on a GPU.",
        )
    ]
