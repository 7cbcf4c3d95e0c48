"""The CPU: every worker shares it, and nothing is copied to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

import fwk_native as native
from fwk.interfaces.declaration import Host
from fwk.interfaces.device import CacheMemory, Device, DeviceDefaults, MemoryInfo
from fwk_devices._common.numa import keep_to_node
from fwk_native import cpu_flags, huge_pages

MEMORY_FRACTION = 0.1
START_TOKENS = 16
"""Rows from which a CPU is bound by multiplications: computed together, prompts of so many tokens are all late."""
DECODE_GAP = 2.5
ALIGNMENT = 64
"""Bytes: where a layer's cache may begin."""


class HugePages(CacheMemory):
    """Zeros of the operating system: huge pages never written take no memory.

    Layers lie one after another in them: were each to begin with a page, equal blocks of all layers would compete for
    the same places of the processor's cache.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        self._memory = huge_pages.zeros(sum(rooms))
        super().__init__([piece[:size] for piece, size in zip(self._memory.split(rooms), sizes, strict=True)])

    @contextmanager
    def scratch(self, first: Sequence[Tensor]) -> Iterator[None]:
        """Afterwards a thread takes the pages of ``first``, for which the first request would have to wait."""
        with huge_pages.discard_writes(self._memory):
            yield
        huge_pages.prefault_async(first)


class Cpu(Device):
    """All of the machine's cores."""

    kind = "cpu"
    collective = "gloo"
    is_host = True

    def missing(self) -> str | None:
        return None

    def host(self) -> Host:
        return Host("cpu", None, cpu_flags())

    def count(self) -> int | None:
        return None

    def take(self, index: int) -> torch.device:
        cores = keep_to_node(self.context.options, index)
        if cores is not None:
            torch.set_num_threads(min(torch.get_num_threads(), cores))
        return torch.device("cpu")

    def memory(self, device: torch.device, num_sharers: int) -> MemoryInfo:
        free = psutil.virtual_memory().available // num_sharers
        return MemoryInfo(free, free)

    def defaults(self, stored_dtype: str, max_running_requests: int) -> DeviceDefaults:
        """A CPU is at its limit of multiplications with a hundred rows: more make a step longer, nothing cheaper."""
        dtype, why = _dtype(stored_dtype)
        return DeviceDefaults(dtype, MEMORY_FRACTION, max(512, 2 * max_running_requests), START_TOKENS, why, DECODE_GAP)

    def cache_memory(self, sizes: Sequence[int], device: torch.device) -> CacheMemory:
        return HugePages(sizes)


def _dtype(stored: str) -> tuple[str, str | None]:
    """The precision this CPU computes fast, and why it is not the checkpoint's own.

    torch multiplies bfloat16 slowly where the CPU has no instructions for it; native kernels need no more than AVX2.
    """
    if stored == "float32":
        return stored, None
    stored = stored if stored in ("bfloat16", "float16") else "bfloat16"
    if not cpu_flags() & {"avx512_bf16", "amx_bf16", "bf16"}:
        refusal = native.refusal() if "avx2" in cpu_flags() else "needs AVX2"
        if refusal is not None:
            instead = f"dtype float32 instead of the checkpoint's {stored}"
            return "float32", f"{instead}: this CPU has no bfloat16 instructions, and what does without {refusal}"
    if stored == "bfloat16":
        return stored, None
    return "bfloat16", "dtype bfloat16 instead of the checkpoint's float16: CPUs compute it faster"
