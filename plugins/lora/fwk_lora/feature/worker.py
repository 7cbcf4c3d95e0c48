"""The part in each worker: adapters are read, checked and cut to its rank, and put into slots as sequences start."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fwk.errors import ModelLoadError, PluginFault
from fwk.interfaces.feature import ModelBuild, WorkerPart, WorkerPartContext
from fwk.interfaces.lora import (
    AdaptedBatch,
    AdapterWeights,
    LoRABackend,
    LoRAContext,
    LoRAMatrices,
    LoRAPart,
    LoRASource,
    LoRASourceContext,
    PackedAdapter,
)
from fwk.interfaces.model import ModelContext
from fwk.types import Batch, ForwardBatch, NewSequence
from fwk_lora.feature import AdapterPlace, LoRAOptions

log = logging.getLogger(__name__)

ZEROS = "zeros"
"""Key of the adapters of ``AdapterStore.fill``; those of loaded ones name their fingerprint, too."""


_ROOT = re.compile(r"(?:(?:model|language_model|text_model)\.)+(?=layers\.\d+\.)")
"""What names of a decoder's layers begin with. In a model that also sees or hears it depends on the release of
transformers that wrote the checkpoint, and on the one that an adapter was trained with; encoders' have other words."""


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

    def put(self, place: AdapterPlace) -> None:
        """See to it that an adapter is in its place."""
        if self._slots.get(place.slot) != place.key:
            self._slots.pop(place.slot, None)  # where loading fails, neither is there
            self._backend.load(place.slot, self._loaded[place.key])
            self._slots[place.slot] = place.key

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
                why = _misfit(weights)
                if why is not None:
                    told = f"{getattr(source.open, 'who', type(source).__name__)} {why} in open"
                    log.error("%s", told)
                    raise PluginFault(told)
                return weights
        raise ModelLoadError("it holds no adapter in a layout that is known here (adapter_config.json is missing)")

    def _pack(self, weights: AdapterWeights) -> PackedAdapter:
        """Check an adapter against the model's layers, cut it to this rank, and let the backend repack it."""
        left = self._renamed(weights.modules)
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

    def _renamed(self, modules: Mapping[str, LoRAMatrices]) -> dict[str, LoRAMatrices]:
        """By names of the checkpoint's, where they differ in what those of the decoder's layers begin with."""
        ours = {part.prefix: part.prefix for layer in self._backend.layers for part in layer.parts}
        ours |= {_ROOT.sub("", name): name for name in ours if _ROOT.match(name)}
        found: dict[str, LoRAMatrices] = {}
        for name, matrices in modules.items():
            own = name if name in ours or not _ROOT.match(name) else ours.get(_ROOT.sub("", name), name)
            if own in found:
                raise ModelLoadError(f"it changes {own} twice, once as {name}")
            found[own] = matrices
        return found

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


class AdapterMatrices(WorkerPart):
    """Linear layers register with the LoRA backend; steps with adapters are computed by calling them."""

    graphs = "eager"  # no capture has room for such a step

    def __init__(self, context: WorkerPartContext) -> None:
        super().__init__(context)
        options: LoRAOptions = context.options
        assert context.plugins is not None
        self._backend: LoRABackend = context.plugins.build(
            "lora",
            LoRAContext,
            device=context.device,
            dtype=context.dtype,
            max_adapters=options.max_loras_per_batch,
            max_rank=options.max_lora_rank,
            upload=context.send,
        )
        sources = [source for _, source in context.plugins.build_all("lora_sources", LoRASourceContext)]
        self.store = AdapterStore(self._backend, sources)
        self._adapter = np.full(context.num_slots, -1, np.int32)  # its slot of the backend, by sequence; -1: none

    def operations(self) -> Mapping[str, Callable[..., Any]]:
        return {"load": self.store.load, "unload": self.store.unload}

    def model_context(self, context: ModelContext, build: ModelBuild) -> str:
        if build.role == "served":  # what drafts is no adapter's
            context.lora = self._backend
        return ""

    def rehearsal(self) -> list[AdapterPlace]:
        return self.store.fill()

    def rehearsed(self) -> None:
        self.store.unload(ZEROS)

    def begin(self, new: NewSequence, asked: AdapterPlace) -> None:
        self.store.put(asked)
        self._adapter[new.slot] = asked.slot

    def forget(self, slot: int) -> None:
        self._adapter[slot] = -1

    def wants_hidden(self, slots: np.ndarray) -> bool:
        return True  # tokens are told apart by their place in the step, in the last layer, too

    def inputs(self, batch: Batch, forward: ForwardBatch) -> None:
        adapters = self._adapter[[scheduled.slot for scheduled in batch.sequences]]
        ids = adapters if forward.is_decode else np.repeat(adapters, np.diff(forward.query_start_np))
        self._backend.plan(AdaptedBatch.of(forward, self.context.send(ids), ids))

    def computed(self, batch: Batch, forward: ForwardBatch, hidden: Tensor, logits: Tensor | None) -> None:
        self._backend.plan(AdaptedBatch.of(forward))  # steps to come may have none


def _misfit(weights: AdapterWeights) -> str | None:
    """Why what a source answers is no adapter that can be cut and packed, as a predicate."""
    modules: Any = weights.modules
    if not isinstance(weights.fingerprint, str) or not weights.fingerprint:
        return f"answered the fingerprint {weights.fingerprint!r:.100}, which tells no content apart,"
    if not isinstance(modules, Mapping) or not modules:
        return "answered an adapter without modules"
    for name, own in modules.items():
        if not isinstance(name, str) or not isinstance(own, LoRAMatrices):
            return f"answered {type(own).__name__} as the matrices of {name!r:.100}"
        for x in (own.a, own.b):
            if not isinstance(x, Tensor) or x.ndim != 2 or 0 in x.shape or not x.is_floating_point():
                what = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
                return f"answered {what} for {name!r:.100}, no matrix of floats,"
        if own.a.shape[0] != own.b.shape[1]:
            return f"answered the ranks {own.a.shape[0]} and {own.b.shape[1]} for one pair, of {name!r:.100},"
        if not isinstance(own.scale, int | float) or not math.isfinite(own.scale):
            return f"answered the scale {own.scale!r:.100} for {name!r:.100}"
    return None


def _span(x: Tensor, dim: int, features: range) -> Tensor:
    return x.narrow(dim, features.start, len(features))
