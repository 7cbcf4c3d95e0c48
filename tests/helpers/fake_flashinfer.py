"""Stands in for FlashInfer where there is none: its paged wrappers as their documentation describes them, in float64.

Written from that documentation, not from the adapter, so that the two can disagree. ``PLANS`` records every plan,
``MADE`` every wrapper. tests/plugins/attention compares the signatures with the package's, where it is installed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

PLANS: list[dict[str, Any]] = []
MADE: list[Any] = []
NUMBERS = itertools.count()

INT_WORKSPACE_BYTES = 8 * 2**20
"""Of the paged wrappers, each on the device and in pinned memory; those for MLA make theirs with each plan."""


def _numbers(x: Any) -> Any:
    """The CPU's tensor behind one of the pretended device."""
    return getattr(x, "held", x)


class _Wrapper:
    def __init__(self, float_workspace_buffer: Tensor, backend: str = "auto") -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.numel() >= 128 * 2**20
        assert not _numbers(float_workspace_buffer)[:: 2**12].any(), "must be initialized to 0 for its first use"
        assert backend in ("fa2", "fa3"), "what auto takes differs from version to version"
        self.backend, self.planned = backend, dict[str, Any]()
        MADE.append(self)

    fixed: Mapping[str, Tensor] = {}
    """For CUDA graphs: what the kernels read in place of what ``plan`` was given, which is copied there."""

    def _fix(self, use_cuda_graph: bool, **buffers: Tensor | None) -> None:
        given = {name: x for name, x in buffers.items() if x is not None}
        assert len(given) == (len(buffers) if use_cuda_graph else 0)
        self.fixed = given

    def _keep(self, **planned: Any) -> None:
        for name in ("qo_indptr", "indptr", "indices"):
            assert planned[name].dtype == torch.int32, name
        assert planned["indptr"].device.type == planned["qo_indptr"].device.type == "cpu"
        assert len(planned["indices"]) == planned["indptr"][-1]
        assert len(planned["indptr"]) == len(planned["qo_indptr"])
        PLANS.append({"wrapper": type(self).__name__, "made": self, **planned})
        for name, buffer in self.fixed.items():
            given, numbers = planned[name], _numbers(buffer)
            assert name == "indices" or len(given) == len(numbers), "the batch size of a CUDA graph is fixed"
            numbers[: len(given)].copy_(_numbers(given))
            planned[name] = numbers
        self.planned = {name: _numbers(x) for name, x in planned.items()}

    def _seen(self, i: int, n: int, kv_len: int) -> Tensor:
        """[n, kv_len] bool: what the new tokens of sequence i see."""
        place, key = torch.arange(kv_len - n, kv_len)[:, None], torch.arange(kv_len)[None]
        return key <= place if self.planned["causal"] else torch.ones(n, kv_len, dtype=torch.bool)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, soft_cap: float | None) -> tuple[Tensor, Tensor]:
        """q: [n, heads, size]; k, v: [len, kv_heads, size], whole pages: what lies behind the sequence's end gets no
        weight, but nothing says that it is not read. Returns the outcome and the sums' logarithms to base 2."""
        seen = torch.nn.functional.pad(seen, (0, k.shape[0] - seen.shape[1]))
        heads = torch.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        scores = torch.einsum("qhd,khd->hqk", q.double(), k[:, heads]) * self.planned["sm_scale"]
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~seen, float("-inf"))
        out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, -1), v[:, heads])  # zeros behind the end
        return out, (torch.logsumexp(scores, -1) / math.log(2.0)).T.float()


class _Paged(_Wrapper):
    def __init__(self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, backend)
        assert kv_layout == "HND"
        device = float_workspace_buffer.device
        self._int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._pin_memory_int_workspace_buffer = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8)
        self._number = 0

    def _keep(self, **planned: Any) -> None:
        last = planned["last_page_len"]
        assert last.dtype == torch.int32
        assert len(last) == len(planned["indptr"]) - 1
        assert (last >= 1).all()
        assert (last <= planned["page_size"]).all()
        super()._keep(**planned)
        self._number = next(NUMBERS)
        self._workspace_number().fill_(self._number)

    def _workspace_number(self) -> Tensor:
        """Of the plan that the workspace holds."""
        return _numbers(self._int_workspace_buffer)[:8].view(torch.int64)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor,
        *,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """HND: [max_num_pages, 2, num_kv_heads, page_size, head_dim]"""
        p = self.planned
        assert int(self._workspace_number()) == self._number, "the workspace was planned in for another wrapper"
        assert sinks is None, "fa2 and fa3 do not read it"
        shape = (2, p["num_kv_heads"], p["page_size"], p["head_dim"])
        assert paged_kv_cache.shape[1:] == shape
        assert q.shape == (p["qo_indptr"][-1], p["num_qo_heads"], p["head_dim"])
        assert q.dtype == p["q_data_type"]
        assert paged_kv_cache.dtype == p["kv_data_type"]
        assert self.backend == "fa2" or (p["custom_mask"] is None and q.dtype == paged_kv_cache.dtype)
        out = torch.empty_like(q) if out is None else out
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        lse, taken = torch.empty(q.shape[:2]), 0
        for i in range(len(p["qo_indptr"]) - 1):
            pages = p["indices"][p["indptr"][i] : p["indptr"][i + 1]].long()
            kv_len = (len(pages) - 1) * p["page_size"] + int(p["last_page_len"][i])
            k, v = paged_kv_cache[pages].double().permute(1, 0, 3, 2, 4).flatten(1, 2)
            k, v = k * (1.0 if k_scale is None else k_scale), v * (1.0 if v_scale is None else v_scale)
            rows = slice(int(p["qo_indptr"][i]), int(p["qo_indptr"][i + 1]))
            n = rows.stop - rows.start
            seen = self._seen(i, n, kv_len)
            if p["custom_mask"] is not None:
                seen = p["custom_mask"][taken : taken + n * kv_len].view(n, kv_len)
                taken += n * kv_len
            if p["window_left"] >= 0:
                place, key = torch.arange(kv_len - n, kv_len)[:, None], torch.arange(kv_len)[None]
                seen = seen & (key >= place - p["window_left"])
            out[rows], lse[rows] = self._attend(q[rows], k, v, seen, p["logits_soft_cap"])
        if p["custom_mask"] is not None:
            assert taken == len(p["custom_mask"])
        return (out, lse) if return_lse else out


class BatchPrefillWithPagedKVCacheWrapper(_Paged):
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
        """Any number of queries for each sequence."""
        # A mask once given is never taken away again: the real wrapper would continue masking.
        assert custom_mask is not None or self.planned.get("custom_mask") is None
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


class BatchDecodeWithPagedKVCacheWrapper(_Paged):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Tensor | None = None,
        paged_kv_indices_buffer: Tensor | None = None,
        paged_kv_last_page_len_buffer: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend)
        self._fix(
            use_cuda_graph,
            indptr=paged_kv_indptr_buffer,
            indices=paged_kv_indices_buffer,
            last_page_len=paged_kv_last_page_len_buffer,
        )
        self.use_tensor_cores = use_tensor_cores

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


class BatchMLAPagedAttentionWrapper(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        use_cuda_graph: bool = False,
        qo_indptr: Tensor | None = None,
        kv_indptr: Tensor | None = None,
        kv_indices: Tensor | None = None,
        kv_len_arr: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, backend)
        buffers = {"qo_indptr": qo_indptr, "indptr": kv_indptr, "indices": kv_indices, "kv_len_arr": kv_len_arr}
        self._fix(use_cuda_graph, **buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        kv_indices: Tensor,
        kv_len_arr: Tensor,
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        assert (head_dim_ckv, head_dim_kpe) == (512, 64), "there are kernels for DeepSeek's sizes only"
        assert kv_len_arr.dtype == torch.int32
        self._keep(
            qo_indptr=qo_indptr,
            indptr=kv_indptr,
            indices=kv_indices,
            kv_len_arr=kv_len_arr,
            num_heads=num_heads,
            page_size=page_size,
            causal=causal,
            sm_scale=sm_scale,
            q_data_type=q_data_type,
            kv_data_type=kv_data_type,
        )

    def run(
        self, q_nope: Tensor, q_pe: Tensor, ckv_cache: Tensor, kpe_cache: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """q_nope, q_pe: [n, heads, 512 or 64]; ckv_cache, kpe_cache: [pages, page_size, 512 or 64]."""
        p = self.planned
        assert q_nope.shape == (p["qo_indptr"][-1], p["num_heads"], 512)
        assert q_pe.shape == (*q_nope.shape[:2], 64)
        assert (ckv_cache.shape[1:], kpe_cache.shape[1:]) == ((p["page_size"], 512), (p["page_size"], 64))
        assert q_nope.dtype == q_pe.dtype == p["q_data_type"]
        assert ckv_cache.dtype == kpe_cache.dtype == p["kv_data_type"]
        assert {x.stride(-1) for x in (q_nope, q_pe, ckv_cache, kpe_cache)} == {1}
        out = torch.empty_like(q_nope) if out is None else out
        for i, kv_len in enumerate(p["kv_len_arr"].tolist()):
            pages = p["indices"][p["indptr"][i] : p["indptr"][i + 1]].long()
            v = ckv_cache[pages].double().flatten(0, 1).unsqueeze(1)
            k = torch.cat((v, kpe_cache[pages].double().flatten(0, 1).unsqueeze(1)), -1)
            rows = slice(int(p["qo_indptr"][i]), int(p["qo_indptr"][i + 1]))
            seen = self._seen(i, rows.stop - rows.start, kv_len)
            out[rows] = self._attend(torch.cat((q_nope, q_pe), -1)[rows], k, v, seen, None)[0]
        return out
