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

INT_WORKSPACE = ("_int_workspace_buffer", "_pin_memory_int_workspace_buffer")
"""Of a wrapper: 8 MiB on the device and as many of pinned memory, for what it is planned with."""


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


class PinnedMemory:
    """What ``plan`` fills for the device to copy, and fills again only once that has ended."""

    def __init__(self, event: Event | None) -> None:
        self._event, self._is_copied = event, False

    def wait(self) -> None:
        """Return when it may be filled."""
        if self._event is not None and self._is_copied:
            self._event.synchronize()

    def filled(self) -> None:
        """A copy was queued."""
        self._is_copied = True
        if self._event is not None:
            self._event.record()


class PlannedWrapper:
    """A wrapper, and the pinned memory that it is planned in."""

    def __init__(self, wrapper: Any, memory: PinnedMemory) -> None:
        self._wrapper, self._memory = wrapper, memory

    def plan(self, **arguments: Any) -> None:
        """Prepare ``run`` for a step."""
        self._memory.wait()
        self._wrapper.plan(**arguments)
        self._memory.filled()

    def run(self, *tensors: Any, **settings: Any) -> Any:
        """Launch the planned kernels."""
        return self._wrapper.run(*tensors, **settings)


@dataclass(frozen=True, slots=True)
class IntWorkspace:
    """That all captured wrappers of a kind of layer share, as a step plans one of them."""

    buffers: tuple[Tensor, ...]  # named as in ``INT_WORKSPACE``
    memory: PinnedMemory


class Wrappers:
    """Made when they are first needed, by kind of layer and mode."""

    def __init__(
        self,
        device: torch.device,
        kv_dtype: torch.dtype,
        make_event: Callable[[], Event] | None,
        prompt_kernel: str = "auto",
    ) -> None:
        # FlashInfer counts on zeros: its kernels leave counters at zero, and start from them.
        self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._make_event = make_event
        self._prompt_kernel = _prompt_kernel(device, kv_dtype) if prompt_kernel == "auto" else prompt_kernel
        self._made: dict[tuple[LayerKind, Mode], list[PlannedWrapper]] = {}
        self._captured: dict[LayerKind, IntWorkspace] = {}

    def next(self, kind: LayerKind, mode: Mode) -> PlannedWrapper:
        """The one to plan now; it stays planned until it was another's turn."""
        turns = self._made.get((kind, mode))
        if turns is None:  # all of them, for the largest step is measured once
            turns = [PlannedWrapper(self._make(kind, mode), self._pinned_memory()) for _ in range(IN_ROTATION)]
            self._made[kind, mode] = turns
        turns.append(turns.pop(0))
        return turns[-1]

    def page_buffers(self, num_seqs: int, num_pages: int) -> PageBuffers:
        """Those of ``captured`` for up to so many sequences, and pages of all of them together."""
        sizes = (num_seqs + 1, num_seqs + 1, num_pages, num_seqs, num_seqs)
        return PageBuffers(*(torch.zeros(n, dtype=torch.int32, device=self._workspace.device) for n in sizes))

    def captured(self, kind: LayerKind, mode: Mode, pages: PageBuffers) -> PlannedWrapper:
        """One for steps of as many sequences as the buffers are for, whose launches a CUDA graph may hold.

        It has no other to take turns with: a graph reads what this one was planned with. What it was made with to be
        planned in is given back, but for the first of a kind: the wrappers of all sizes would have 0.3 GB of it.
        """
        wrapper = self._make(kind, mode, pages)
        if mode is Mode.LATENT:  # which makes its own with each plan
            return PlannedWrapper(wrapper, self._pinned_memory())
        workspace = self._captured.get(kind)
        if workspace is None:
            buffers = tuple(getattr(wrapper, name) for name in INT_WORKSPACE)
            workspace = self._captured[kind] = IntWorkspace(buffers, self._pinned_memory())
        for name, buffer in zip(INT_WORKSPACE, workspace.buffers, strict=True):
            setattr(wrapper, name, buffer)
        return PlannedWrapper(wrapper, workspace.memory)

    def _pinned_memory(self) -> PinnedMemory:
        return PinnedMemory(None if self._make_event is None else self._make_event())

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
