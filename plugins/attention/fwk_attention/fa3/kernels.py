"""One call for the functions of the packages that bring FlashAttention 3."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of a step with the same window share.

    starts: [num_seqs + 1] int32; lens: [num_seqs] int32, tokens in the cache; table: [num_seqs, max_blocks] int32.
    window: keys before a query that it sees, and after it; -1: all.
    """

    starts: Tensor
    lens: Tensor
    table: Tensor
    max_new: int
    max_len: int
    window: tuple[int, int]


Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Step, float, float], Tensor]
"""q [num_tokens, num_heads, head_size], K and V [num_blocks, block_size, num_kv_heads, head_size], scale and cap (0:
none) to [num_tokens, num_heads, head_size]."""


def with_kvcache(function: Callable[..., Any]) -> Attend:
    """``flash_attn_with_kvcache`` of flash-attn-3 and sgl-kernel."""

    def attend(q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float, soft_cap: float) -> Tensor:
        return function(
            q,
            k,
            v,
            cache_seqlens=step.lens,
            page_table=step.table,
            cu_seqlens_q=step.starts,
            max_seqlen_q=step.max_new,
            softmax_scale=scale,
            causal=True,
            window_size=step.window,
            softcap=soft_cap,
        )

    return attend


def varlen(function: Callable[..., Any]) -> Attend:
    """``flash_attn_varlen_func`` of vllm-flash-attn."""

    def attend(q: Tensor, k: Tensor, v: Tensor, step: Step, scale: float, soft_cap: float) -> Tensor:
        return function(
            q,
            k,
            v,
            max_seqlen_q=step.max_new,
            cu_seqlens_q=step.starts,
            max_seqlen_k=step.max_len,
            seqused_k=step.lens,
            softmax_scale=scale,
            causal=True,
            window_size=list(step.window),
            softcap=soft_cap,
            block_table=step.table,
            fa_version=3,
        )

    return attend


PROVIDERS: dict[str, tuple[str, str, Callable[[Callable[..., Any]], Attend]]] = {
    "flash_attn_interface": ("flash_attn_interface", "flash_attn_with_kvcache", with_kvcache),
    "sgl_kernel": ("sgl_kernel.flash_attn", "flash_attn_with_kvcache", with_kvcache),
    "vllm_flash_attn": ("vllm_flash_attn.flash_attn_interface", "flash_attn_varlen_func", varlen),
}
"""By the module that is looked for: where its function is, and how it is called."""


def find() -> Attend:
    """That of the first package that can be imported. Raises ``ImportError`` with what each of them says."""
    said: list[str] = []
    for module, name, call in PROVIDERS.values():
        try:
            return call(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError, OSError) as error:
            said.append(f"{module}: {error}")
    raise ImportError("; ".join(said))
