"""Which K/V heads the workers of one server read from which workers of another, where their numbers of ranks differ.

Of a layer, rank r has heads r * n to r * n + n, where each rank has n. Where there are fewer heads than ranks, each
rank has one, and ranks next to each other have the same. Latent K/V have no heads: every rank has all of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fwk.interfaces.attention import KVKind
from fwk_kv_transfer.remote_prefill import Heads

if TYPE_CHECKING:
    from torch import Tensor

    from fwk.interfaces.attention import AttentionLayer


def heads_of(layers: Sequence[AttentionLayer], num_ranks: int) -> Heads:
    """How ranks share the heads of a worker's layers with K/V."""
    uncut = [layer.kind is KVKind.LATENT or layer.head_dim is None for layer in layers]
    return Heads(num_ranks, tuple(0 if whole else x.num_kv_heads for whole, x in zip(uncut, layers, strict=True)))


@dataclass(frozen=True, slots=True)
class Piece:
    """What a reader reads of one layer from one rank: ``count`` heads, from those of either rank; 0: whole blocks."""

    layer: int
    first_there: int
    first_here: int
    count: int


def misfit(theirs: Heads, ours: Heads) -> str | None:
    """Why ranks that share heads in the one way cannot read from ranks that share them in the other."""
    if len(theirs.of_a_rank) != len(ours.of_a_rank):
        return f"layers with K/V differ: {len(theirs.of_a_rank)} and {len(ours.of_a_rank)}"
    for there, here in set(zip(theirs.of_a_rank, ours.of_a_rank, strict=True)):
        if _is_cut(theirs, ours, there, here) and _num_heads(theirs, ours, there, here) is None:
            return (
                f"K/V heads differ: {there} on each of {theirs.num_ranks} ranks where prompts are computed, {here} on "
                f"each of {ours.num_ranks} where they are read"
            )
    return None


def pieces(theirs: Heads, ours: Heads, rank: int) -> dict[int, list[Piece]]:
    """What rank ``rank`` of ours reads, by the rank that it is read from; ``misfit`` is None."""
    found: dict[int, list[Piece]] = {}
    for layer, (there, here) in enumerate(zip(theirs.of_a_rank, ours.of_a_rank, strict=True)):
        if not _is_cut(theirs, ours, there, here):
            found.setdefault(rank * theirs.num_ranks // ours.num_ranks, []).append(Piece(layer, 0, 0, 0))
            continue
        num_heads = _num_heads(theirs, ours, there, here)
        assert num_heads is not None
        start = _first_head(ours, here, num_heads, rank)
        sources = [_rank_of(theirs, there, num_heads, head, rank) for head in range(start, start + here)]
        offset = 0
        for source, group in itertools.groupby(sources):
            count = len(list(group))
            first = start + offset - _first_head(theirs, there, num_heads, source)
            found.setdefault(source, []).append(Piece(layer, first, offset, count))
            offset += count
    return found


def _is_cut(theirs: Heads, ours: Heads, there: int, here: int) -> bool:
    """Whether ranks have different heads of a layer: if each of two numbers of ranks has the same several, all do."""
    is_same = there == here and (here > 1 or theirs.num_ranks == ours.num_ranks)
    return not is_same and bool(there or here)


def _num_heads(theirs: Heads, ours: Heads, there: int, here: int) -> int | None:
    """Of the layer in all; None where the two do not fit.

    Where each rank has one on either side, heads are as many as any number that divides both numbers of ranks: ranks
    that have the same head are taken for ranks with heads of their own.
    """
    if there == here == 1:
        return math.gcd(theirs.num_ranks, ours.num_ranks)
    both = ((theirs, there), (ours, here))
    totals = {each * heads.num_ranks for heads, each in both if each > 1}
    if 0 in (there, here) or len(totals) != 1:
        return None
    [num_heads] = totals
    is_copied = all(heads.num_ranks % num_heads == 0 for heads, each in both if each == 1)
    return num_heads if is_copied else None


def _first_head(heads: Heads, of_a_rank: int, num_heads: int, rank: int) -> int:
    return rank * of_a_rank if of_a_rank > 1 else rank * num_heads // heads.num_ranks


def _rank_of(heads: Heads, of_a_rank: int, num_heads: int, head: int, reader: int) -> int:
    """Who has a head; readers take those in turn that have the same."""
    if of_a_rank > 1:
        return head // of_a_rank
    num_copies = heads.num_ranks // num_heads
    return head * num_copies + reader % num_copies


def cut(
    caches: Sequence[Tensor], head_dims: Sequence[int | None], wanted: Sequence[tuple[int, int, int]]
) -> list[Tensor]:
    """Views of caches [num_blocks, *block_shape], by (layer, first head, count), that each have whole rows of bytes.

    A view is [num_blocks, count, ...], one for each place of the dimensions before that of heads: K and V are two where
    they come before it.
    """
    return [view for layer, first, count in wanted for view in _views(caches[layer], head_dims[layer], first, count)]


def _views(cache: Tensor, head_dim: int | None, first: int, count: int) -> Iterator[Tensor]:
    if not count:
        yield cache
        return
    assert head_dim is not None
    narrowed = cache.narrow(head_dim + 1, first, count)
    for place in itertools.product(*(range(size) for size in cache.shape[1 : head_dim + 1])):
        yield narrowed[:, *place] if place else narrowed
