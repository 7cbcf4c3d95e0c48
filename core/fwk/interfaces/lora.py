"""LoRA: kernels for batches of mixed adapters, and places adapters come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from fwk.interfaces.declaration import Declaration
from fwk.interfaces.device import Upload, upload_to
from fwk.types import ForwardBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """A loaded LoRA adapter. ``key`` is its name and the hash of its content: another content is another adapter.

    - ``name``: what requests call it.
    - ``path``: its local folder.
    - ``rank``: the largest of its matrices.
    """

    name: str
    key: str
    path: str
    rank: int


@dataclass(slots=True)
class AdaptedBatch(ForwardBatch):
    """A step, and the slot of each token's adapter: [num_tokens] int32, -1 for none; None: no token has one.

    - ``adapter_ids``: [num_tokens] int32 on the device.
    - ``adapter_ids_np``: the same on the CPU (numpy); None with it.
    """

    adapter_ids: Tensor | None = None
    adapter_ids_np: Any = None

    @classmethod
    def of(cls, batch: ForwardBatch, adapter_ids: Tensor | None = None, adapter_ids_np: Any = None) -> AdaptedBatch:
        """A step's inputs, and the slots, [num_tokens] int32 each."""
        return cls(*_inputs(batch), adapter_ids=adapter_ids, adapter_ids_np=adapter_ids_np)


_inputs = attrgetter(*(item.name for item in fields(ForwardBatch)))


@dataclass(frozen=True, slots=True)
class LoRAMatrices:
    """What an adapter adds to one matrix W of the checkpoint: W + scale * b @ a.

    - ``a``: [rank, in_features]
    - ``b``: [out_features, rank]
    - ``scale``: alpha / rank, or as the adapter says.
    """

    a: Tensor
    b: Tensor
    scale: float

    @property
    def rank(self) -> int:
        """Of these two."""
        return int(self.a.shape[0])


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """An adapter as a source reads it. ``modules`` are named as the matrices of the checkpoint, without ``.weight``.

    ``fingerprint`` is a hash of everything the numbers depend on: K/V are reused between adapters of equal name and
    fingerprint, in this run and, by caches that outlive it, in later ones.
    """

    fingerprint: str
    modules: Mapping[str, LoRAMatrices]


@dataclass(frozen=True, slots=True)
class LoRAPart:
    """One matrix of the checkpoint in a layer, and which of its features this rank holds.

    - ``prefix``: the matrix's name in the checkpoint, without ``.weight``.
    - ``in_features``: of the whole matrix.
    - ``out_features``: of the whole matrix.
    - ``inputs``: those of this rank.
    - ``outputs``: those of this rank.
    """

    prefix: str
    in_features: int
    out_features: int
    inputs: range
    outputs: range


@dataclass(frozen=True, slots=True)
class LoRALayer:
    """A linear layer adapters can change. The outputs of its parts stand side by side; they share the input.

    - ``index``: its number among the registered layers.
    - ``parts``: at least one.
    """

    index: int
    parts: tuple[LoRAPart, ...]


@dataclass(frozen=True, slots=True)
class LoRAContext:
    """What a LoRA backend is built with. ``max_adapters`` is the number of its slots.

    - ``device``: the worker's.
    - ``dtype``: of activations.
    - ``max_rank``: the largest rank that ``load`` is given (``--max-lora-rank``).
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``upload``: core's own way to the device; ``send`` takes it.
    """

    device: torch.device
    dtype: torch.dtype
    max_adapters: int
    max_rank: int
    options: Any = None
    upload: Upload | None = None

    @property
    def send(self) -> Upload:
        """Brings what ``plan`` makes to the device."""
        return self.upload or upload_to(self.device)


PackedAdapter = Mapping[int, Any]
"""What ``pack`` returned, by the layer's index; layers the adapter leaves alone are missing."""


class LoRABackend(ABC):
    """Holds the matrices of up to ``max_adapters`` adapters and adds their products to linear layers.

    Knows nothing of the layers' own weights, of the model, or of other ranks: the matrices it gets are cut to this
    rank. For a layer whose input is sharded the result is a share of the sum, as the layer's own is.

    - ``layers``: what ``register`` returned, by index.
    """

    def __init__(self, context: LoRAContext) -> None:
        self.context = context
        self.layers: list[LoRALayer] = []
        self._by_parts: dict[tuple[LoRAPart, ...], LoRALayer] = {}

    def register(self, parts: Sequence[LoRAPart]) -> LoRALayer:
        """Called once for each layer that can be adapted, while the model is built.

        The layers of a model that is built anew, with other weights, are those of before.
        """
        known = self._by_parts.get(tuple(parts))
        if known is not None:
            return known
        layer = self._by_parts[tuple(parts)] = LoRALayer(len(self.layers), tuple(parts))
        self.layers.append(layer)
        return layer

    @abstractmethod
    def pack(self, layer: LoRALayer, matrices: Sequence[LoRAMatrices | None]) -> Any:
        """Repack an adapter's matrices for one layer, once, in host memory.

        ``matrices`` has an entry per part, None where the adapter leaves the part alone, at least one that is not;
        they are cut to this rank and of any floating dtype.
        """

    @abstractmethod
    def load(self, slot: int, adapter: PackedAdapter) -> None:
        """Put an adapter into a slot, in place of the one that was there. Called between steps."""

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Forget what is in a slot."""

    @abstractmethod
    def plan(self, batch: AdaptedBatch) -> None:
        """Prepare for a step whose tokens have ``batch.adapter_ids``: slots, -1 for none; None when no token has one.

        Valid for every ``apply`` until the next call. Before the first one no token has an adapter.
        """

    @abstractmethod
    def apply(self, y: Tensor, x: Tensor, layer: LoRALayer) -> Tensor:
        """``y`` plus each token's adapter's share; may change and return ``y``.

        x: [num_tokens, in_features], y: [num_tokens, out_features of all parts], both this rank's, the tokens those
        of the planned batch. Costs next to nothing when no token of the step has an adapter.
        """


@dataclass(frozen=True, kw_only=True)
class LoRABackendSpec(Declaration):
    """Declares LoRA kernels (``--lora-backend``)."""

    family: ClassVar[str] = "lora"


@dataclass(frozen=True, slots=True)
class LoRASourceContext:
    """What a LoRA source is built with.

    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    options: Any = None


class LoRASource(ABC):
    """Finds adapters by name, and reads them. Used in the API process (``find``) and in every worker (``open``)."""

    def __init__(self, context: LoRASourceContext) -> None:
        self.context = context

    @property
    @abstractmethod
    def is_open(self) -> bool:
        """Whether there is any place ``find`` may look: if no source has one, adapters come by command line only."""

    @abstractmethod
    def find(self, name: str) -> Path | None:
        """The adapter's local folder, or None when it is unknown here. ``name`` is a client's: trust nothing in it.

        Never leaves the places the source was told to use. May block; called off the event loop.
        """

    @abstractmethod
    def open(self, path: Path) -> AdapterWeights | None:
        """Read the adapter in a folder that was found, or named by the operator; None: in no layout known here.

        Raises ``ModelLoadError`` when it is damaged or asks for what LoRA backends do not compute. The message names
        files without their folder: it is shown to clients.
        """


@dataclass(frozen=True, kw_only=True)
class LoRASourceSpec(Declaration):
    """Declares a LoRA source; all are asked in order of rank."""

    family: ClassVar[str] = "lora_sources"
