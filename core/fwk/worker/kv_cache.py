"""The tensors of the KV cache, and how many blocks there is room for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.device import CacheMemory, Device, MemoryInfo
from fwk.interfaces.parallel import ParallelGroup

ALL_WINDOWED_GROUPS = 4
"""Into how many groups layers are divided that all have a window. More would save more, and cost a table each."""


def form_groups(
    backend: AttentionBackend, layers: list[AttentionLayer], drafting: Sequence[AttentionLayer] = ()
) -> list[list[AttentionLayer]]:
    """Give layers that see a window only groups of their own: as many layers in each as see everything, the last less.

    Layer i of each group keeps its K/V in the same tensor, in blocks of its own. There is one group where layers differ
    in what they store, or where groups would save next to nothing. The window is that of the layer that sees furthest.
    Where all layers have a window, the first quarter of them counts as seeing everything: the first group keeps whole
    sequences, by which the prefix cache knows them.

    drafting: the layers of what drafts, which come after those of the first group.
    """
    full = [layer for layer in layers if layer.sliding_window is None]
    windowed = [layer for layer in layers if layer.sliding_window is not None]
    if not full and len(windowed) > 1:
        count = max(1, len(windowed) // ALL_WINDOWED_GROUPS)
        full, windowed = windowed[:count], windowed[count:]
    forms = {(form.block_shape, form.dtype) for form in (backend.block_format(layer.kv_spec) for layer in layers)}
    if not full or len(windowed) < len(full) or len(forms) != 1:
        return [[*layers, *drafting]]
    size = len(full)
    groups = [[*full, *drafting], *(windowed[start : start + size] for start in range(0, len(windowed), size))]
    for number, group in enumerate(groups):
        for layer in group:
            layer.kv_group = number
    return groups


def block_bytes(backend: AttentionBackend, layers: list[AttentionLayer]) -> int:
    """Bytes of one block over all layers."""
    total = 0
    for layer in layers:
        form = backend.block_format(layer.kv_spec)
        total += math.prod(form.block_shape) * form.dtype.itemsize
    return total


def count_blocks(
    *,
    max_total_tokens: int | None,
    fraction: float,
    block_size: int,
    bytes_per_block: int,
    memory: MemoryInfo,
    most: int,
    num_tables: int = 1,
) -> int:
    """Blocks to allocate: what was asked for, or what fits into a fraction of the free memory.

    A sequence has ``num_tables`` of each of its blocks; what was asked for fits even if all of it is kept.

    Blocks of a model that keeps no K/V take no memory: there are as many as all its sequences could use (``most``).
    """
    if bytes_per_block == 0:
        return most if max_total_tokens is None else -(-max_total_tokens // block_size)
    if max_total_tokens is not None:
        count = -(-max_total_tokens // block_size) * num_tables
        if count * bytes_per_block > memory.free:
            raise ConfigError(
                f"--max-total-tokens {max_total_tokens} needs {count * bytes_per_block / 2**20:.0f} MiB of KV cache, "
                f"but {memory.free / 2**20:.0f} MiB of memory are free"
            )
        return count
    count = memory.budget(fraction) // bytes_per_block
    if count < num_tables:
        raise ConfigError(_no_room(fraction, bytes_per_block * num_tables, memory))
    return count


def _no_room(fraction: float, least: int, memory: MemoryInfo) -> str:
    """Why there is room for no block, with all the numbers."""
    free, total, used = (size / 2**20 for size in (memory.free, memory.total, memory.total - memory.free))
    remedy = "take a smaller model, or one in fewer bits"
    needed = (memory.total - memory.free + least) / memory.total
    if needed < 1:
        remedy = f"raise it to {math.floor(needed * 1000 + 1) / 1000:.3f} or more, or {remedy}"
    return (
        f"--mem-fraction-static {fraction:g} of {total:.0f} MiB is {fraction * total:.0f} MiB, but {used:.0f} MiB are "
        f"in use and {free:.0f} MiB free, and the smallest KV cache takes {least / 2**20:.2f} MiB: {remedy}"
    )


def agree(num_blocks: int, group: ParallelGroup, device: torch.device) -> int:
    """The smallest of the ranks' numbers: they all follow one plan, and so one block table."""
    return int(group.all_gather(torch.tensor([num_blocks], device=device), 0).min())


def allocate(
    backend: AttentionBackend,
    groups: list[list[AttentionLayer]],
    num_blocks: int,
    device: Device,
    where: torch.device,
) -> CacheMemory | None:
    """Give every layer its cache, [num_blocks, *block_shape] of zeros; returns the memory of all, None without layers.

    Layer i of each group has that of layer i of the first.
    """
    layers = groups[0]
    if not layers:
        return None
    forms = [backend.block_format(layer.kv_spec) for layer in layers]
    shapes = [(num_blocks, *form.block_shape) for form in forms]
    sizes = [math.prod(shape) * form.dtype.itemsize for form, shape in zip(forms, shapes, strict=True)]
    memory = device.cache_memory(sizes, where)
    for layer, form, shape, piece in zip(layers, forms, shapes, memory.pieces, strict=True):
        layer.kv_cache = piece.view(form.dtype).view(shape)
    for group in groups[1:]:
        for layer, owner in zip(group, layers, strict=False):
            layer.kv_cache = owner.kv_cache
    return memory


def scratch_kv_cache(memory: CacheMemory | None, layers: list[AttentionLayer]) -> AbstractContextManager[None]:
    """Around steps that mean nothing: what they store is forgotten, where that costs nothing."""
    return (
        nullcontext() if memory is None else memory.scratch([x.kv_cache[:1] for x in layers if x.kv_cache is not None])
    )
