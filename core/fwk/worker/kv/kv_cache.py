"""The tensors of the KV cache, and how many blocks there is room for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.device import CacheMemory, Device, MemoryInfo
from fwk.interfaces.parallel import ParallelGroup
from fwk.worker.kv.memory_profile import MemoryUse

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


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """How much of a device's memory may be in use, other processes' share included. words: what says so, and how much.

    least: of a number of bytes, the option with a value that allows it; None where no value does.
    """

    most: int
    words: str
    least: Callable[[int], str | None]


def fraction_limit(fraction: float, total: int) -> MemoryLimit:
    """``--mem-fraction-static`` of ``total`` bytes."""

    def least(needed: int) -> str | None:
        value = math.floor(needed / total * 1000 + 1) / 1000
        return f"raise it to {value:.3f} or more" if value < 1 else None

    share = f"--mem-fraction-static {fraction:g} of {_mib(total)} MiB is {_mib(total * fraction)} MiB"
    return MemoryLimit(int(total * fraction), share, least)


def bytes_limit(reserve: int, others: int, total: int) -> MemoryLimit:
    """``--device-reserve-memory-bytes``: so many for this engine, or all that others leave but so many.

    others: bytes in use before anything was loaded.
    """

    def least(needed: int) -> str | None:
        value = needed - others if reserve > 0 else needed - total
        return f"make it {value} or more" if needed < total else None

    most = others + reserve if reserve > 0 else total + reserve
    return MemoryLimit(most, f"--device-reserve-memory-bytes {reserve} allows {_mib(most)} of {_mib(total)} MiB", least)


def count_blocks(  # noqa: PLR0913 - numbers by name
    *,
    max_total_tokens: int | None,
    limit: MemoryLimit,
    block_size: int,
    bytes_per_block: int,
    memory: MemoryInfo,
    most: int,
    num_tables: int = 1,
    num_null: int = 0,
    use: MemoryUse | None = None,
) -> int:
    """Blocks to allocate: what was asked for, or what the limit and the largest step leave of the memory.

    A sequence has ``num_tables`` of each of its blocks; what was asked for fits even if all of it is kept. There is
    room left for ``num_null`` blocks that no sequence holds, and for ``use``, as far as that has been measured.

    Blocks of a model that keeps no K/V take no memory: there are as many as all its sequences could use (``most``).
    """
    use = use or MemoryUse()
    if bytes_per_block == 0:
        return most if max_total_tokens is None else -(-max_total_tokens // block_size)
    null = num_null * bytes_per_block
    if max_total_tokens is not None:
        count = -(-max_total_tokens // block_size) * num_tables
        if count * bytes_per_block + null + use.reserved > memory.free:
            raise ConfigError(
                f"--max-total-tokens {max_total_tokens} needs {_mib(count * bytes_per_block)} MiB of KV cache, "
                f"but {_mib(memory.free)} MiB of memory are free{use.sentence()}"
            )
        return count
    used = memory.total - memory.free
    count = (limit.most - used - null - use.reserved) // bytes_per_block
    if count < num_tables:
        least = bytes_per_block * num_tables + null
        remedy = "take a smaller model, or one in fewer bits"
        if use.reserved:
            remedy = f"lower --max-prefill-tokens, --max-running-requests or --cuda-graph-max-bs, or {remedy}"
        enough = limit.least(used + use.reserved + least)
        remedy = remedy if enough is None else f"{enough}, or {remedy}"
        in_use = f"{_mib(used)} MiB are in use"
        if use.others:
            in_use += f" ({_mib(use.others)} by others, {_mib(used - use.others)} by weights and buffers)"
        left = limit.most - used - use.reserved
        raise ConfigError(
            f"{limit.words}, but {in_use} and {_mib(memory.free)} MiB free{use.sentence()}: "
            f"{'nothing is' if left < 0 else f'{left / 2**20:.2f} MiB are'} left, and the smallest KV cache takes "
            f"{least / 2**20:.2f} MiB: {remedy}"
        )
    return count


def _mib(size: float) -> str:
    return f"{size / 2**20:.0f}"


def bytes_of(memory: CacheMemory | None) -> int:
    """Of all layers."""
    return 0 if memory is None else sum(piece.numel() for piece in memory.pieces)


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
        layer.kv_cache, layer.head_dim = piece.view(form.dtype).view(shape), form.head_dim
    for group in groups[1:]:
        for layer, owner in zip(group, layers, strict=False):
            layer.kv_cache, layer.head_dim = owner.kv_cache, owner.head_dim
    return memory


def scratch_kv_cache(memory: CacheMemory | None, layers: list[AttentionLayer]) -> AbstractContextManager[None]:
    """Around steps that mean nothing: what they store is forgotten, where that costs nothing."""
    return (
        nullcontext() if memory is None else memory.scratch([x.kv_cache[:1] for x in layers if x.kv_cache is not None])
    )
