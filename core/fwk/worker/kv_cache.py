"""The tensors of the KV cache, and how many blocks there is room for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackend, AttentionLayer
from fwk.interfaces.parallel import ParallelGroup
from fwk.native import huge_pages

CPU_FRACTION = 0.1
GPU_FRACTION = 0.88

ALIGNMENT = 64
"""Bytes: where a layer's cache may begin on a CPU."""


def form_groups(backend: AttentionBackend, layers: list[AttentionLayer]) -> list[list[AttentionLayer]]:
    """Give layers that see a window only groups of their own: as many layers in each as see everything, the last less.

    Layer i of each group keeps its K/V in the same tensor, in blocks of its own. There is one group where layers differ
    in what they store, or where groups would save next to nothing. The window is that of the layer that sees furthest.
    """
    full = [layer for layer in layers if layer.sliding_window is None]
    windowed = [layer for layer in layers if layer.sliding_window is not None]
    forms = {(form.block_shape, form.dtype) for form in (backend.block_format(layer.kv_spec) for layer in layers)}
    if not full or len(windowed) < len(full) or len(forms) != 1:
        return [layers]
    size = len(full)
    groups = [full, *(windowed[start : start + size] for start in range(0, len(windowed), size))]
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
    fraction: float | None,
    block_size: int,
    bytes_per_block: int,
    device: torch.device,
    most: int,
    num_sharers: int = 1,
    num_tables: int = 1,
) -> int:
    """Blocks to allocate: what was asked for, or what fits into a fraction of the free memory.

    A sequence has ``num_tables`` of each of its blocks; what was asked for fits even if all of it is kept.

    Blocks of a model that keeps no K/V take no memory: there are as many as all its sequences could use (``most``).
    ``num_sharers`` workers share the memory of a CPU, and each takes its part.
    """
    if bytes_per_block == 0:
        return most if max_total_tokens is None else -(-max_total_tokens // block_size)
    if device.type == "cpu":
        free = psutil.virtual_memory().available // num_sharers
        budget = int(free * (fraction or CPU_FRACTION))
    else:
        free, total = torch.cuda.mem_get_info(device)
        budget = int(total * (fraction or GPU_FRACTION)) - (total - free)
    if max_total_tokens is not None:
        count = -(-max_total_tokens // block_size) * num_tables
        if count * bytes_per_block > free:
            raise ConfigError(
                f"--max-total-tokens {max_total_tokens} needs {count * bytes_per_block / 2**20:.0f} MiB of KV cache, "
                f"but {free / 2**20:.0f} MiB of memory are free"
            )
        return count
    count = budget // bytes_per_block
    if count < num_tables:
        raise ConfigError("no memory is left for the KV cache: raise --mem-fraction-static or take a smaller model")
    return count


def agree(num_blocks: int, group: ParallelGroup, device: torch.device) -> int:
    """The smallest of the ranks' numbers: they all follow one plan, and so one block table."""
    return int(group.all_gather(torch.tensor([num_blocks], device=device), 0).min())


def allocate(
    backend: AttentionBackend, groups: list[list[AttentionLayer]], num_blocks: int, device: torch.device
) -> Tensor | None:
    """Give every layer its cache, [num_blocks, *block_shape] of zeros; on a CPU, the memory of all.

    Layer i of each group has that of layer i of the first.

    On a CPU the zeros are the operating system's: huge pages never written take no memory. They must be zeros and not
    just any bytes, for a NaN in a masked place would survive the mask. Layers lie one after another in them: were each
    to begin with a page, equal blocks of all layers would compete for the same places of the processor's cache.
    """
    layers = groups[0]
    memory = _allocate(backend, layers, num_blocks, device)
    for group in groups[1:]:
        for layer, owner in zip(group, layers, strict=False):
            layer.kv_cache = owner.kv_cache
    return memory


def _allocate(
    backend: AttentionBackend, layers: list[AttentionLayer], num_blocks: int, device: torch.device
) -> Tensor | None:
    forms = [backend.block_format(layer.kv_spec) for layer in layers]
    shapes = [(num_blocks, *form.block_shape) for form in forms]
    if device.type != "cpu":
        for layer, form, shape in zip(layers, forms, shapes, strict=True):
            layer.kv_cache = torch.zeros(shape, dtype=form.dtype, device=device)
        return None
    sizes = [math.prod(shape) * form.dtype.itemsize for form, shape in zip(forms, shapes, strict=True)]
    rooms = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    memory = huge_pages.zeros(sum(rooms))
    pieces = memory.split(rooms)
    for layer, form, shape, piece, size in zip(layers, forms, shapes, pieces, sizes, strict=True):
        layer.kv_cache = piece[:size].view(form.dtype).view(shape)
    return memory


@contextmanager
def unused(memory: Tensor | None, layers: list[AttentionLayer]) -> Iterator[None]:
    """On a CPU, what is stored meanwhile is forgotten and takes next to no memory. ``memory``: what ``allocate`` gave.

    Afterwards a thread takes the pages of the first blocks, for which the first request would have to wait.
    """
    if memory is None:
        yield
        return
    with huge_pages.discard_writes(memory):
        yield
    huge_pages.prefault_async([layer.kv_cache[:1] for layer in layers if layer.kv_cache is not None])
