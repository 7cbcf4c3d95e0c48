"""FlashInfer's wrappers: which one computes what, and when each may be planned again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

import flashinfer  # pyright: ignore[reportMissingImports] - selected only where it is installed
from fwk_attention.flashinfer.plan import LayerKind, Mode

WORKSPACE_BYTES = 128 * 2**20
"""What FlashInfer's documentation advises; wrappers run one after another and share it."""

SMALL_GROUPS = (1, 2)
"""Query heads per KV head up to which decoding without matrix units is as good."""

IN_ROTATION = 2
"""Wrappers that take turns. ``plan`` fills pinned memory and starts a copy of it to the device, behind the steps that
are queued there: one wrapper would have to wait for the step before. Two do not, as two steps are the most in flight.
"""

HOPPER = 9


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self) -> None:
        """Mark this point of the current stream."""

    def synchronize(self) -> None:
        """Wait until the device has come by the mark."""


@dataclass(frozen=True, slots=True)
class PageBuffers:
    """Of wrappers for CUDA graphs, on the device, int32."""

    starts: Tensor  # [num_seqs + 1]: 0, 1, 2, ...: one query each
    indptr: Tensor  # [num_seqs + 1]
    indices: Tensor  # [most pages]
    last_page_len: Tensor  # [num_seqs]
    seq_lens: Tensor  # [num_seqs]

    def of(self, num_seqs: int) -> PageBuffers:
        """Their parts for fewer sequences."""
        return PageBuffers(
            self.starts[: num_seqs + 1],
            self.indptr[: num_seqs + 1],
            self.indices,
            self.last_page_len[:num_seqs],
            self.seq_lens[:num_seqs],
        )


class PlannedWrapper:
    """A wrapper whose pinned memory is refilled only after the device has copied it."""

    def __init__(self, wrapper: Any, event: Event | None) -> None:
        self._wrapper, self._event, self._is_planned = wrapper, event, False

    def plan(self, **arguments: Any) -> None:
        """Prepare ``run`` for a step."""
        if self._event is not None and self._is_planned:
            self._event.synchronize()
        self._wrapper.plan(**arguments)
        self._is_planned = True
        if self._event is not None:
            self._event.record()

    def run(self, *tensors: Any, **settings: Any) -> Any:
        """Launch the planned kernels."""
        return self._wrapper.run(*tensors, **settings)


class Wrappers:
    """Made when they are first needed, by kind of layer and mode."""

    def __init__(self, device: torch.device, kv_dtype: torch.dtype, make_event: Callable[[], Event] | None) -> None:
        # FlashInfer counts on zeros: its kernels leave counters at zero, and start from them.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._make_event = make_event
        self._prompt_kernel = _prompt_kernel(device, kv_dtype)
        self._made: dict[tuple[LayerKind, Mode], list[PlannedWrapper]] = {}

    def next(self, kind: LayerKind, mode: Mode) -> PlannedWrapper:
        """The one to plan now; it stays planned until it was another's turn."""
        turns = self._made.setdefault((kind, mode), [])
        if len(turns) < IN_ROTATION:
            event = None if self._make_event is None else self._make_event()
            turns.append(PlannedWrapper(self._make(kind, mode), event))
        else:
            turns.append(turns.pop(0))
        return turns[-1]

    def page_buffers(self, num_seqs: int, num_pages: int) -> PageBuffers:
        """Those of ``captured`` for up to so many sequences, and pages of all of them together."""
        sizes = (num_seqs + 1, num_seqs + 1, num_pages, num_seqs, num_seqs)
        return PageBuffers(*(torch.zeros(n, dtype=torch.int32, device=self._workspace.device) for n in sizes))

    def captured(self, kind: LayerKind, mode: Mode, pages: PageBuffers) -> PlannedWrapper:
        """One for steps of as many sequences as the buffers are for, whose launches a CUDA graph may hold.

        It has no other to take turns with: a graph reads what this one was planned with.
        """
        event = None if self._make_event is None else self._make_event()
        return PlannedWrapper(self._make(kind, mode, pages), event)

    def _make(self, kind: LayerKind, mode: Mode, pages: PageBuffers | None = None) -> Any:
        fixed: dict[str, Any] = {}
        if mode is Mode.LATENT:
            if pages is not None:
                fixed = {"use_cuda_graph": True, "qo_indptr": pages.starts, "kv_indptr": pages.indptr}
                fixed |= {"kv_indices": pages.indices, "kv_len_arr": pages.seq_lens}
            return flashinfer.BatchMLAPagedAttentionWrapper(self._workspace, **fixed, backend="fa2")
        if mode is Mode.DECODE:
            has_large_group = kind.num_heads // kind.num_kv_heads not in SMALL_GROUPS
            if pages is not None:
                fixed = {"use_cuda_graph": True, "paged_kv_indptr_buffer": pages.indptr}
                fixed |= {"paged_kv_indices_buffer": pages.indices}
                fixed |= {"paged_kv_last_page_len_buffer": pages.last_page_len}
            return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace, "HND", use_tensor_cores=has_large_group, **fixed, backend="fa2"
            )
        # Trees: its kernels for Hopper have no masks of the caller's.
        backend = self._prompt_kernel if mode is Mode.CAUSAL else "fa2"
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "HND", backend=backend)


def _prompt_kernel(device: torch.device, kv_dtype: torch.dtype) -> str:
    """fa3 on Hopper, where K/V are of the queries' type; named, so that no version's ``auto`` takes another."""
    if device.type != "cuda" or kv_dtype == torch.float8_e4m3fn:
        return "fa2"
    return "fa3" if torch.cuda.get_device_capability(device)[0] == HOPPER else "fa2"
