"""Stands in for FlashInfer where there is none: its paged wrappers as their documentation describes them, in float64.

Written from that documentation, not from the adapter, so that the two can disagree. ``PLANS`` records every plan.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLANS: list[dict[str, Any]] = []


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", **settings: Any) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 * 2**20
        self.layout, self.settings = kv_layout, settings
        self.planned: dict[str, Any] = {}

    def _keep(self, **planned: Any) -> None:
        for name in ("qo_indptr", "indptr", "indices", "last_page_len"):
            assert planned[name].dtype == torch.int32, name
        assert planned["indptr"].device.type == planned["qo_indptr"].device.type == "cpu"
        assert len(planned["indices"]) == planned["indptr"][-1]
        assert len(planned["last_page_len"]) == len(planned["indptr"]) - 1 == len(planned["qo_indptr"]) - 1
        assert (planned["last_page_len"] >= 1).all()
        assert (planned["last_page_len"] <= planned["page_size"]).all()
        self.planned = planned
        PLANS.append({"wrapper": type(self).__name__, **self.settings, **planned})

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """HND: [max_num_pages, 2, num_kv_heads, page_size, head_dim]"""
        p = self.planned
        assert self.layout == "HND"
        shape = (2, p["num_kv_heads"], p["page_size"], p["head_dim"])
        assert paged_kv_cache.shape[1:] == shape
        assert q.shape == (p["qo_indptr"][-1], p["num_qo_heads"], p["head_dim"])
        assert q.dtype == p["q_data_type"]
        assert paged_kv_cache.dtype == p["kv_data_type"]
        out = torch.zeros(q.shape, dtype=torch.float64)
        taken = 0
        for i in range(len(p["qo_indptr"]) - 1):
            pages = p["indices"][p["indptr"][i] : p["indptr"][i + 1]].long()
            kv_len = (len(pages) - 1) * p["page_size"] + int(p["last_page_len"][i])
            # Whole pages: what lies behind the sequence's end gets no weight, but nothing says that it is not read.
            k, v = paged_kv_cache[pages].double().permute(1, 0, 3, 2, 4).flatten(1, 2)
            rows = slice(int(p["qo_indptr"][i]), int(p["qo_indptr"][i + 1]))
            queries = q[rows].double()
            n = len(queries)
            place, key = torch.arange(kv_len - n, kv_len)[:, None], torch.arange(kv_len)[None]
            seen = torch.ones(n, kv_len, dtype=torch.bool)
            if p["custom_mask"] is not None:
                seen = p["custom_mask"][taken : taken + n * kv_len].view(n, kv_len)
                taken += n * kv_len
            elif p["causal"]:
                seen = key <= place
            if p["window_left"] >= 0:
                seen = seen & (key >= place - p["window_left"])
            seen = torch.nn.functional.pad(seen, (0, k.shape[0] - kv_len))
            group = p["num_qo_heads"] // p["num_kv_heads"]
            for head in range(p["num_qo_heads"]):
                scores = queries[:, head] @ k[:, head // group].T * p["sm_scale"]
                if p["logits_soft_cap"]:
                    scores = p["logits_soft_cap"] * torch.tanh(scores / p["logits_soft_cap"])
                weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), -1)  # zeros behind the end
                out[rows, head] = weights @ v[:, head // group]
        if p["custom_mask"] is not None:
            assert taken == len(p["custom_mask"])
        return out.to(q.dtype)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:
        self._keep(
            qo_indptr=qo_indptr,
            indptr=paged_kv_indptr,
            indices=paged_kv_indices,
            last_page_len=paged_kv_last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            custom_mask=custom_mask,
            causal=causal,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self,
        indptr: Tensor,
        indices: Tensor,
        last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        sm_scale: float | None = None,
    ) -> None:
        """One query per sequence."""
        self._keep(
            qo_indptr=torch.arange(len(indptr), dtype=torch.int32),
            indptr=indptr,
            indices=indices,
            last_page_len=last_page_len,
            num_qo_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            custom_mask=None,
            causal=True,
            sm_scale=sm_scale,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )
