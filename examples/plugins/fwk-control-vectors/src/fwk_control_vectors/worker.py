"""The part in each worker: adds directions to the residual stream of the tokens of sequences that asked for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fwk.errors import BlameSequence, FwkError
from fwk.interfaces.feature import LoadedModel, WorkerPart, WorkerPartContext
from fwk.types import Batch, ForwardBatch, NewSequence
from fwk_control_vectors import Steering


class ControlVectors(WorkerPart):
    """Steps with such a sequence are computed layer by layer; all others are replayed as ever."""

    graphs = "eager"

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        self._vectors: dict[str, dict[int, Tensor]] = {}  # by key, then by layers before the place
        self._by_slot: dict[int, tuple[dict[int, Tensor], float]] = {}
        self._step: list[tuple[int, int, dict[int, Tensor], float]] = []  # tokens from, to, and what they get
        self._places: list[int] = []

    def model_loaded(self, loaded: LoadedModel) -> None:
        self._places = sorted(loaded.taps)
        for place, tap in loaded.taps.items():
            tap.changes.append(partial(self._add, place))

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"load": self._load, "unload": lambda key: self._vectors.pop(key, None) and None}

    def _load(self, key: str, directions: Mapping[str, bytes]) -> None:
        found: dict[int, Tensor] = {}
        for layer, numbers in directions.items():
            place = int(layer) + 1  # what a layer puts out is what the next one gets
            if place not in self._places:
                last = max(self._places, default=0) - 1
                raise FwkError(f"direction.{layer}: this model takes directions for layers 0 to {last}")
            if len(numbers) != 4 * self.context.hidden_size:
                raise FwkError(
                    f"direction.{layer} has {len(numbers) // 4} numbers, this model's layers {self.context.hidden_size}"
                )
            found[place] = torch.from_numpy(np.frombuffer(numbers, "<f4").copy()).to(self.context.device)
        self._vectors[key] = found

    def begin(self, new: NewSequence, asked: Steering) -> None:
        if asked.key not in self._vectors:
            raise BlameSequence(new.slot, f"the control vector {asked.key.partition('@')[0]!r} was unloaded", True)
        self._by_slot[new.slot] = self._vectors[asked.key], asked.strength

    def forget(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        starts = forward.query_start_np
        self._step = [
            (int(starts[i]), int(starts[i + 1]), *self._by_slot[scheduled.slot])
            for i, scheduled in enumerate(batch.sequences)
            if scheduled.slot in self._by_slot
        ]

    def computed(self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None) -> None:
        self._step = []

    def _add(self, place: int, added: Tensor) -> None:
        for start, end, vectors, strength in self._step:
            if place in vectors:
                added[start:end] += (strength * vectors[place]).to(added.dtype)
