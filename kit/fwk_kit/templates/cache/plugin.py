"""A prefix cache as one dictionary: from a path of blocks to the block at its end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from fwk.interfaces.prefix_cache import CacheContext, PrefixCache, PrefixMatch

Node = tuple[str, tuple[int, ...]]  # a namespace, and the tokens from the root on


@dataclass(slots=True)
class _Block:
    block_id: int
    locks: int = 0
    last_used: int = 0


class MineCache(PrefixCache):
    """Forgets the least recently used first. Operations cost the length of a path, ``evict`` that of the cache."""

    def __init__(self, context: CacheContext) -> None:
        super().__init__(context)
        self._blocks: dict[Node, _Block] = {}
        self._clock = itertools.count()

    def _path(self, node: Node) -> list[_Block]:
        """The blocks on the path to a node, from the root on."""
        size = self.context.block_size
        return [self._blocks[node[0], node[1][:end]] for end in range(size, len(node[1]) + 1, size)]

    def root(self, namespace: str) -> Node:
        return namespace, ()

    def match(self, namespace: str, token_ids: Sequence[int], max_tokens: int) -> PrefixMatch:
        size, tokens = self.context.block_size, tuple(token_ids[: max(max_tokens, 0)])
        end, blocks = 0, list[int]()
        while end + size <= len(tokens) and (namespace, tokens[: end + size]) in self._blocks:
            end += size
            blocks.append(self._blocks[namespace, tokens[:end]].block_id)
        return PrefixMatch((namespace, tokens[:end]), blocks, end)

    def lock(self, node: Node) -> None:
        for block in self._path(node):
            block.locks += 1

    def unlock(self, node: Node, *, is_used: bool = True) -> None:
        for block in reversed(self._path(node)):
            block.locks -= 1
            block.last_used = next(self._clock)

    def insert(self, node: Node, token_ids: Sequence[int], block_ids: Sequence[int]) -> tuple[Node, list[bool]]:
        size, taken = self.context.block_size, list[bool]()
        namespace, tokens = node
        for index, block_id in enumerate(block_ids):
            tokens = (*tokens, *token_ids[index * size : (index + 1) * size])
            is_new = (namespace, tokens) not in self._blocks
            if is_new:
                self._blocks[namespace, tokens] = _Block(block_id)
            self._blocks[namespace, tokens].locks += 1
            taken.append(is_new)
        return (namespace, tokens), taken

    def evict(self, num_blocks: int) -> list[int]:
        # A longer path was given back before the shorter one it goes through, so ends go before their beginnings.
        free = sorted((node for node, block in self._blocks.items() if not block.locks), key=self._worth)
        return [self._blocks.pop(node).block_id for node in free[:num_blocks]]

    def _worth(self, node: Node) -> int:
        return self._blocks[node].last_used

    def drop(self) -> list[int]:
        return self.evict(len(self._blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_evictable_blocks(self) -> int:
        return sum(not block.locks for block in self._blocks.values())
