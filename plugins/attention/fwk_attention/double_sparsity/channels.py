"""The file that says which channels of each head are heavy.

JSON, by name: ``model.layers.0.self_attn.qk_proj`` (``q_proj``, ``k_proj``) is a list of a head's channels, heaviest
first, for each head. A name is the layer's in the checkpoint, or counts the attention layers. There are as many lists
as a layer has heads of K/V, or of queries: then those that share a KV head vote by their ranks (Borda), since they
read the same keys; or one for all. Channels that no list names follow in their order.
"""

from __future__ import annotations

import json
from typing import Any, cast

import torch
from torch import Tensor

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionLayer
from fwk_files.regular import read_text

OPTION = "--ds-channel-config-path"
MAKE = "fwk heavy-channels MODEL --out FILE makes one"


class Channels:
    """The file, read. Raises ``ConfigError`` naming it, and the layer that is wrong.

    rank, num_ranks: which of the ranks this is that share the file's heads (``AttentionContext.tp_rank``).
    """

    def __init__(self, path: str, kind: str, rank: int = 0, num_ranks: int = 1) -> None:
        if not path:
            raise ConfigError(f"{OPTION} is needed: {MAKE}")
        self._path, self._kind, self._rank, self._num_ranks = path, kind, rank, num_ranks
        try:
            found: Any = json.loads(read_text(path))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{OPTION} {path}: {error}; {MAKE}") from None
        if not isinstance(found, dict):
            raise ConfigError(f"{OPTION} {path}: JSON with a list by layer is wanted; {MAKE}")
        self._lists = cast(dict[str, Any], found)

    def order(self, layer: AttentionLayer) -> Tensor:
        """[num_kv_heads, head_size] int64: all channels of each KV head, heaviest first."""
        heads, size = layer.num_kv_heads, layer.head_size
        name, found = self._find(layer)
        try:
            given = torch.tensor(found, dtype=torch.int64)
        except (TypeError, ValueError, RuntimeError):
            given = torch.empty(0, dtype=torch.int64)
        counts = self._counts(layer)
        if given.ndim != 2 or given.shape[0] not in counts or not 1 <= given.shape[1] <= size:
            raise ConfigError(
                f"{OPTION} {self._path}: {name} must be a list of up to {size} channels for each of {counts[0]} KV "
                f"heads or {counts[1]} heads: the file is of another model? {MAKE}"
            )
        ordered = given.sort(1).values
        if given.min() < 0 or given.max() >= size or bool((ordered[:, 1:] == ordered[:, :-1]).any()):
            raise ConfigError(f"{OPTION} {self._path}: {name}: a head's channels are different numbers below {size}")
        # A channel that a head does not name comes after all that it does.
        ranks = torch.full((given.shape[0], size), given.shape[1], dtype=torch.int64)
        ranks.scatter_(1, given, torch.arange(given.shape[1]).expand_as(given))
        if len(ranks) == 1:
            ranks = ranks.expand(counts[0], -1)
        is_of_queries = len(ranks) == counts[1] != counts[0]
        mine = layer.num_heads if is_of_queries else heads
        first = self._rank * len(ranks) // self._num_ranks
        return ranks[first : first + mine].unflatten(0, (heads, -1)).sum(1).argsort(stable=True, dim=1)

    def _counts(self, layer: AttentionLayer) -> tuple[int, int, int]:
        """How many lists there may be: of the whole model's KV heads, of its heads, and of all alike."""
        return layer.num_kv_heads * self._num_ranks, layer.num_heads * self._num_ranks, 1

    def _find(self, layer: AttentionLayer) -> tuple[str, Any]:
        names = [f"{prefix}.{self._kind}_proj" for prefix in (layer.prefix, f"model.layers.{layer.index}.self_attn")]
        for name in names:
            if name in self._lists:
                return name, self._lists[name]
        raise ConfigError(f"{OPTION} {self._path} has no {names[-1]}: {MAKE}")
