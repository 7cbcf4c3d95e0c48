"""Experts in slots: ranks hold any of them, some more than once, and others after the next rebalancing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from fwk.interfaces.expert_placement import ExpertPlacement, PlacementShape
from fwk.interfaces.moe import ExpertWeights, MoERunner

if TYPE_CHECKING:
    from torch import Tensor

TURNS = 64
"""Into as many classes tokens are divided, which an expert's replicas share as evenly as they can."""


class MovableWeights(Protocol):
    """A layer's experts in the checkpoint."""

    def of(self, numbers: Sequence[int]) -> ExpertWeights:
        """Those with these numbers, for a runner to read. What a living runner holds of them is not read again."""
        ...

    def built(self) -> None:
        """Whatever is read from now on, is read while the model serves."""
        ...


class PlacedExperts(MoERunner):
    """The runner of a rank's slots (``PlacedLayer``). The router's ids become slots here, and are counted.

    An expert's replicas compute the same numbers; which of them a token is given decides only the order in which
    ranks' sums are added. By default it follows from all of the token's experts, and so from the token alone.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[], MoERunner],
        placement: ExpertPlacement,
        shape: PlacementShape,
        slots: Sequence[int],
        group: int,
        device: torch.device,
    ) -> None:
        """build: an empty runner of one group's slots. group: this rank's, of ``shape.num_ranks``."""
        self._build, self._runner = build, build()
        super().__init__(self._runner.context)
        self.name, self.shape, self.slots = name, shape, tuple(slots)
        size = shape.num_slots // shape.num_ranks
        self._own = range(group * size, (group + 1) * size)
        self._by_row = placement.by_row
        random = torch.Generator().manual_seed(shape.num_experts)
        self._words = torch.randint(TURNS, (shape.num_experts,), generator=random).to(device)
        self._table = self._places(self.slots).to(device)
        self.counts: Tensor | None = None
        if placement.counts:
            self.counts = torch.zeros(shape.num_experts, dtype=torch.int64, device=device)

    def load(self, experts: ExpertWeights) -> None:
        raise NotImplementedError("read takes experts that can be read again")

    def read(self, experts: MovableWeights) -> None:
        """Read the experts of this rank's slots."""
        self._experts = experts
        self._runner.load(experts.of(self._held(self.slots)))
        experts.built()

    def place(self, slots: Sequence[int]) -> None:
        held = self._held(slots)
        if held != self._held(self.slots):
            runner = self._build()
            runner.load(self._experts.of(held))
            self._runner = runner
        self.slots = tuple(slots)
        self._table = self._places(slots).to(self._table.device)

    def apply(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        if self.counts is not None:
            ids = expert_ids.flatten()
            self.counts.scatter_add_(0, ids, torch.ones_like(ids))  # bincount would wait for the device
        if self.shape.num_slots == self.shape.num_experts:
            return self._runner.apply(x, self._table[expert_ids, 0], weights)
        if self._by_row:
            turns = torch.arange(len(expert_ids), device=expert_ids.device).unsqueeze(-1)
        else:
            turns = self._words[expert_ids].sum(-1, keepdim=True)
        return self._runner.apply(x, self._table[expert_ids, turns % TURNS], weights)

    def _held(self, slots: Sequence[int]) -> tuple[int, ...]:
        return tuple(slots[slot] for slot in self._own)

    def _places(self, slots: Sequence[int]) -> Tensor:
        """[num_experts, TURNS]: this rank's slot for an expert and a class of tokens; -1: another rank's."""
        replicas: list[list[int]] = [[] for _ in range(self.shape.num_experts)]
        for slot, expert in enumerate(slots):
            replicas[expert].append(slot - self._own.start if slot in self._own else -1)
        # Experts begin with different replicas: those of one token would all be given to the first ranks otherwise.
        rows = [[own[(turn + expert) % len(own)] for turn in range(TURNS)] for expert, own in enumerate(replicas)]
        return torch.tensor(rows)
