"""Stands in for the packages of FlashAttention 3: their functions with the arguments they have, in float64.

The signatures are those published by flash-attn-3 (hopper/flash_attn_interface.py), sgl-kernel and vllm-flash-attn;
tests/plugins/attention compares them with the packages, where these are installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CALLS: list[str] = []


def _attend(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lens: Tensor, table: Tensor, scale: float, window: Any, cap: float
) -> Tensor:
    """Causal, aligned to the end of each sequence; window: keys to the left and right, -1: all. Reads whole pages."""
    for x in (starts, lens, table):
        assert x.dtype == torch.int32
    assert q.dim() == 3
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert k.shape == v.shape
    assert q.shape[2] == k.shape[3]
    assert tuple(window) == (-1, -1) or window[1] == 0
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[2]
    for i, length in enumerate(lens.tolist()):
        rows = slice(int(starts[i]), int(starts[i + 1]))
        n = rows.stop - rows.start
        pages = table[i, : -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1).double().repeat_interleave(group, 1) for x in (k, v))
        at, of = torch.arange(length - n, length)[:, None], torch.arange(keys.shape[0])
        seen = of <= at
        if window[0] >= 0:
            seen &= of >= at - window[0]
        scores = torch.einsum("nhd,mhd->hnm", q[rows].double(), keys) * scale
        if cap:
            scores = cap * torch.tanh(scores / cap)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        out[rows] = torch.einsum("hnm,mhd->nhd", weights, values).to(q.dtype)
    return out


def flash_attn_3(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
    scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """``flash_attn_with_kvcache`` of flash-attn-3."""
    CALLS.append("flash-attn-3")
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert k is v is qv is cache_leftpad is None
    return _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap)


def sgl_kernel(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None,
    max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None,
    causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0,
    pack_gqa=None, sm_margin=0, return_softmax_lse=False,
):  # fmt: skip
    """``flash_attn_with_kvcache`` of sgl-kernel."""
    CALLS.append("sgl-kernel")
    assert causal
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    return _attend(q, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, softmax_scale, window_size, softcap)


def vllm_flash_attn(
    q, k, v, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k=None, seqused_k=None, q_v=None, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=None, softcap=0.0, alibi_slopes=None, deterministic=False,
    return_attn_probs=False, block_table=None, return_softmax_lse=False, out=None, scheduler_metadata=None,
    q_descale=None, k_descale=None, v_descale=None, num_splits=0, fa_version=2, s_aux=None, cp_world_size=1, cp_rank=0,
    cp_tot_seqused_k=None,
):  # fmt: skip
    """``flash_attn_varlen_func`` of vllm-flash-attn."""
    CALLS.append("vllm-flash-attn")
    assert causal
    assert fa_version == 3
    assert cu_seqlens_k is None, "cu_seqlens_k and seqused_k cannot be provided at the same time"
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(seqused_k.max())
    return _attend(q, k, v, cu_seqlens_q, seqused_k, block_table, softmax_scale, window_size, softcap)
