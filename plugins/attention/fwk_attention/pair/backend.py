"""One attention backend for prompts and one for next tokens, over one KV cache."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from fwk.errors import ConfigError
from fwk.interfaces.attention import AttentionBackend, AttentionLayer, BlockFormat, CaptureSizes, KVSpec
from fwk.types import ForwardBatch
from fwk.types.batch import KVGroup


@dataclass(slots=True)
class Part:
    """Consecutive sequences of a step that one backend computes."""

    side: Side
    batch: ForwardBatch
    tokens: slice


@dataclass(slots=True)
class PairPlan:
    """What ``forward`` needs.

    fresh: by KV group, [n] int64: blocks whose first slot is written in this step. finders: of a static plan, by KV
    group: the first layer, which finds them anew each time, so that a replay does, too.
    """

    parts: list[Part]
    fresh: dict[int, Tensor | None] = field(default_factory=dict[int, Tensor | None])
    finders: dict[int, AttentionLayer] = field(default_factory=dict[int, AttentionLayer])


class Side:
    """One of the two backends, with layers of its own: each keeps with a layer what is its own."""

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self._layers: list[AttentionLayer] = []
        self._own: dict[int, tuple[AttentionLayer, AttentionLayer]] = {}  # by id, which a layer has while it is here
        self._of: list[AttentionLayer] | None = None

    def layers(self, layers: list[AttentionLayer]) -> list[AttentionLayer]:
        """Its twins of these."""
        if layers is not self._of or len(layers) != len(self._layers):
            self._of = layers
            self._layers = [self._own.setdefault(id(layer), (layer, replace(layer, state=None)))[1] for layer in layers]
        for layer, twin in zip(layers, self._layers, strict=True):
            twin.kv_cache, twin.kv_group = layer.kv_cache, layer.kv_group
        return self._layers

    def layer(self, layer: AttentionLayer) -> AttentionLayer:
        """Its twin of one that was planned for."""
        return self._own[id(layer)][1]


class AttentionPair(AttentionBackend):
    """Sequences in front that have one new token are decoded; a step's other tokens are the prefill backend's.

    The prefill backend has the whole step where drafts form a tree, where a layer reads tensors of its own alongside q,
    k and v, and where a decoding sequence reads blocks that a prompt fills in the same step.
    """

    not_recorded = "prompts and next tokens have attention backends of their own"

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        super().__init__(prefill.context)
        self._prefill, self._decode = Side(prefill), Side(decode)
        self._staging = self.context.staging() if self.context.staging is not None else None
        self._rooms: dict[int, int] = {}
        self._null_block = 0

    def block_format(self, spec: KVSpec) -> BlockFormat:
        """Raises ``ConfigError`` where the two would lay it out differently."""
        ours, theirs = (side.backend.block_format(spec) for side in (self._prefill, self._decode))
        if ours != theirs:
            raise ConfigError(
                f"--prefill-attention-backend and --decode-attention-backend lay out K/V differently: blocks of "
                f"{list(ours.block_shape)} and of {list(theirs.block_shape)} numbers; choose one backend for both"
            )
        return ours

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> PairPlan:
        split = self._split(batch, layers)
        plan = PairPlan([])
        for side, first, last in ((self._decode, 0, split), (self._prefill, split, batch.num_seqs)):
            if first == last:
                continue
            mine, tokens = _part_of(batch, first, last)
            mine.plan = side.backend.plan(mine, side.layers(layers))
            plan.parts.append(Part(side, mine, tokens))
        if self._staging is not None:
            self._staging.turn()
        for group in {layer.kv_group for layer in layers}:
            slots = batch.kv_groups[group].slot_mapping_np
            fresh = np.asarray(slots[slots % self.context.block_size == 0] // self.context.block_size, np.int64)
            plan.fresh[group] = self._send(group, fresh) if len(fresh) else None
        if self._staging is not None:
            self._staging.sent()
        return plan

    def init_capture(self, layers: list[AttentionLayer], sizes: CaptureSizes) -> None:
        self._null_block = sizes.null_block
        self._decode.backend.init_capture(self._decode.layers(layers), sizes)

    def plan_static(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> PairPlan | None:
        mine, tokens = _part_of(batch, 0, batch.num_seqs)
        mine.plan = self._decode.backend.plan_static(mine, self._decode.layers(layers))
        if mine.plan is None:
            return None
        finders: dict[int, AttentionLayer] = {}
        for layer in layers:
            finders.setdefault(layer.kv_group, layer)
        return PairPlan([Part(self._decode, mine, tokens)], finders=finders)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        plan: PairPlan = batch.plan
        self._clear(layer, batch, plan)
        more = () if extra is None else (extra,)
        if len(plan.parts) == 1:
            (part,) = plan.parts
            return part.side.backend.forward(q, k, v, part.side.layer(layer), part.batch, *more)
        # What decodes stores first: a prompt may read a block that a sequence before it completes.
        return torch.cat(
            [
                part.side.backend.forward(
                    q[part.tokens],
                    k[part.tokens],
                    None if v is None else v[part.tokens],
                    part.side.layer(layer),
                    part.batch,
                )
                for part in plan.parts
            ]
        )

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        self._prefill.backend.move(self._prefill.layers(layers), source, target)

    def _split(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> int:
        """Sequences in front that are decoded."""
        if batch.tree_mask is not None:
            return 0
        is_longer = np.diff(batch.query_start_np) != 1
        split = int(is_longer.argmax()) if is_longer.any() else batch.num_seqs
        if split in (0, batch.num_seqs):
            return split
        if any(layer.needs - layer.extras.keys() for layer in layers):
            return 0
        size, first = self.context.block_size, int(batch.query_start_np[split])
        counts = -(-batch.seq_lens_np[:split] // size)
        for group in {layer.kv_group for layer in layers}:
            where = batch.kv_groups[group]
            table = where.block_table_np[:split]
            read = table[np.arange(table.shape[1]) < counts[:, None]]
            if np.isin(read, np.unique(where.slot_mapping_np[first:] // size)).any():
                return 0
        return split

    def _send(self, group: int, values: np.ndarray) -> Tensor:
        if self._staging is None:
            return torch.from_numpy(values)
        name = f"fresh {group}"
        if self._rooms.get(group, 0) < len(values):
            self._rooms[group] = 2 * len(values)
            self._staging.add(name, (self._rooms[group],), torch.int64)
        return self._staging.fill(name, values)[1]

    def _clear(self, layer: AttentionLayer, batch: ForwardBatch, plan: PairPlan) -> None:
        """Forget what an earlier owner left in blocks that are begun.

        A backend that reads whole blocks does so where it stores; here the other one may read what it stores.
        """
        assert layer.kv_cache is not None, "forward before the KV cache was allocated"
        group = layer.kv_group
        if plan.finders.get(group) is layer:
            size, slots = self.context.block_size, batch.kv_groups[group].slot_mapping
            plan.fresh[group] = torch.where(slots % size == 0, slots // size, self._null_block)
        fresh = plan.fresh[group]
        if fresh is not None:
            layer.kv_cache.view(torch.uint8).index_fill_(0, fresh, 0)


def _part_of(batch: ForwardBatch, first: int, last: int) -> tuple[ForwardBatch, slice]:
    """Sequences ``first`` to ``last`` as a batch of their own, and their tokens."""
    mine = copy.copy(batch)
    start, stop = int(batch.query_start_np[first]), int(batch.query_start_np[last])
    tokens = slice(start, stop)
    if last - first == batch.num_seqs:
        return mine, tokens
    mine.token_ids, mine.positions = batch.token_ids[tokens], batch.positions[tokens]
    mine.query_start = batch.query_start[first : last + 1] - start
    mine.query_start_np = batch.query_start_np[first : last + 1] - start
    mine.seq_lens, mine.seq_lens_np = batch.seq_lens[first:last], batch.seq_lens_np[first:last]
    mine.kv_groups = [
        KVGroup(
            group.slot_mapping[tokens],
            group.block_table[first:last],
            group.slot_mapping_np[tokens],
            group.block_table_np[first:last],
        )
        for group in batch.kv_groups
    ]
    mine.is_decode = first == 0
    wanted = batch.hidden_indices
    if wanted is not None:  # what is not wanted may be computed, too: on a device, looking would mean waiting for it
        is_host = wanted.device.type == "cpu"
        mine.hidden_indices = wanted[(wanted >= start) & (wanted < stop)] - start if is_host else None
    return mine, tokens
