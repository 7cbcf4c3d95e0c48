"""The LoRA adapters a worker has loaded: read, checked and cut to its rank; put into slots as batches ask for them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.lora import (
    AdapterWeights,
    LoRABackend,
    LoRAMatrices,
    LoRAPart,
    LoRASource,
    PackedAdapter,
)
from fwk.types import Batch, ForwardBatch
from fwk.types.batch import AdapterPlace

ZEROS = "zeros"
"""Key of the adapters of ``AdapterStore.fill``; those of loaded ones name their fingerprint, too."""


class AdapterStore:
    """Adapters in host memory by key, and which of them is in which slot of the backend."""

    def __init__(self, backend: LoRABackend, sources: list[LoRASource]) -> None:
        self._backend = backend
        self._sources = sources
        self._loaded: dict[str, PackedAdapter] = {}
        self._slots: dict[int, str] = {}

    def load(self, name: str, path: str) -> dict[str, str | int]:
        """Read an adapter: its ``key`` and ``rank``, or the ``error`` to tell. A bad adapter fails no other request."""
        try:
            weights = self._read(Path(path))
            key = f"{name}@{weights.fingerprint}"
            self._loaded[key] = self._pack(weights)
        except ModelLoadError as error:
            return {"error": str(error)}
        return {"key": key, "rank": max(matrices.rank for matrices in weights.modules.values())}

    def unload(self, key: str) -> None:
        """Forget an adapter no sequence uses any more. Unknown keys are none of a worker's business."""
        self._loaded.pop(key, None)
        for slot in [slot for slot, other in self._slots.items() if other == key]:
            self._backend.clear(slot)
            del self._slots[slot]

    def begin(self, batch: Batch) -> None:
        """Put the adapters of a step's new sequences where the plan says."""
        for new in batch.new:
            place = new.adapter
            if place is not None and self._slots.get(place.slot) != place.key:
                self._backend.load(place.slot, self._loaded[place.key])
                self._slots[place.slot] = place.key

    def plan(self, forward: ForwardBatch) -> None:
        """Prepare the backend for a step."""
        self._backend.plan(forward)

    def fill(self) -> list[AdapterPlace]:
        """An adapter of zeros for every slot, of the largest rank and for all layers; ``unload`` their key after it."""
        rank = self._backend.context.max_rank
        modules = {
            part.prefix: LoRAMatrices(torch.zeros(rank, part.in_features), torch.zeros(part.out_features, rank), 1.0)
            for layer in self._backend.layers
            for part in layer.parts
        }
        self._loaded[ZEROS] = self._pack(AdapterWeights(ZEROS, modules))
        return [AdapterPlace(slot, ZEROS) for slot in range(self._backend.context.max_adapters)]

    def _read(self, path: Path) -> AdapterWeights:
        for source in self._sources:
            weights = source.open(path)
            if weights is not None:
                return weights
        raise ModelLoadError("it holds no adapter in a layout that is known here (adapter_config.json is missing)")

    def _pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Check an adapter against the model's layers, cut it to this rank, and let the backend repack it."""
        left = dict(weights.modules)
        packed: dict[int, object] = {}
        for layer in self._backend.layers:
            matrices = [self._cut(part, left.pop(part.prefix, None)) for part in layer.parts]
            if any(own is not None for own in matrices):
                packed[layer.index] = self._backend.pack(layer, matrices)
        if left:
            some = ", ".join(list(left)[:3]) + (", ..." if len(left) > 3 else "")
            raise ModelLoadError(
                f"it changes {some}, which this model does not have or which is no linear layer adapters can change "
                "(embeddings and the LM head are not)"
            )
        return packed

    def _cut(self, part: LoRAPart, matrices: LoRAMatrices | None) -> LoRAMatrices | None:
        if matrices is None:
            return None
        most = self._backend.context.max_rank
        if matrices.rank > most:
            raise ModelLoadError(f"its rank is {matrices.rank}, more than --max-lora-rank {most}")
        a, b = matrices.a, matrices.b
        if a.shape[1] != part.in_features or b.shape[0] != part.out_features:
            raise ModelLoadError(
                f"it was made for another model: its {part.prefix} goes from {a.shape[1]} to {b.shape[0]} features, "
                f"this model's from {part.in_features} to {part.out_features}"
            )
        return LoRAMatrices(_span(a, 1, part.inputs), _span(b, 0, part.outputs), matrices.scale)


def _span(x: Tensor, dim: int, features: range) -> Tensor:
    return x.narrow(dim, features.start, len(features))


class NoAdapters:
    """What a worker has in an ``AdapterStore``'s place when LoRA is off."""

    def fill(self) -> list[AdapterPlace]:
        """No slot to fill."""
        return []

    def unload(self, key: str) -> None:
        """Nothing to forget."""

    def begin(self, batch: Batch) -> None:
        """Nothing to put anywhere."""

    def plan(self, forward: ForwardBatch) -> None:
        """Nothing to prepare."""
