"""Weight formats of linear layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.native import NO_THREADS, NativeLinear, NativeThreads
from fwk.interfaces.weights_cache import PackedTensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.loader import WeightSource

PLAIN = "plain"
"""The layout of floating-point weights: one tensor ``weight``, [out_features, in_features]."""

PACKED = "packed"
"""In ``WeightSource.stored_sizes``: quantised weights of a layout that is not told apart, which stay as they are."""

ALL = 2**31
"""As a ``ParamSpec``'s block: one entry for all features."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """A linear layer on this rank; ``out_features`` has one entry per fused part (q, k, v or gate, up).

    - ``in_features``: this rank's inputs.
    - ``dtype``: of activations.
    - ``device``: the worker's.
    - ``prefix``: of the layer's first part in the checkpoint
    - ``layout``: how the checkpoint holds it
    """

    in_features: int
    out_features: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    prefix: str
    layout: str = PLAIN


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One tensor a method reads from the checkpoint for each part of a layer.

    ``output_dim`` and ``input_dim`` say along which dimensions it follows the layer's sides, so that core can
    shard it for tensor parallelism and join fused parts; None means the dimension is not there. One entry stands for
    ``output_block`` or ``input_block`` features (a scale per group of 128, eight 4-bit numbers in an int32; ``ALL``).
    Parts without an output dimension are stacked: ``[num_parts, ...]``.

    shards_input: whether a rank that holds a part of the inputs reads only their entries.
    is_uniform: whether the checkpoint may hold a single number that stands for all entries.
    trailing: sizes of further dimensions (the bytes of a block).

    - ``dtype``: that it is read as.
    - ``is_optional``: whether the checkpoint may lack it.
    """

    output_dim: int | None
    input_dim: int | None
    dtype: torch.dtype
    is_optional: bool = False
    output_block: int = 1
    input_block: int = 1
    shards_input: bool = True
    is_uniform: bool = False
    trailing: tuple[int, ...] = ()

    def shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """Of the tensor in the checkpoint, for one part of these sizes."""
        sizes = {
            self.output_dim: -(-out_features // self.output_block),
            self.input_dim: -(-in_features // self.input_block),
        }
        return (*(size for _, size in sorted((d, s) for d, s in sizes.items() if d is not None)), *self.trailing)


Weights = Any
"""What ``finish`` returns; only the same method's ``apply`` looks inside."""


@dataclass(frozen=True, slots=True)
class QuantContext:
    """What a quantisation method is built with. ``checkpoint_config`` is config.json's ``quantization_config``.

    ``threads`` runs native operators. ``is_deterministic``: a token's products must be the same to the bit however many
    others there are; only asked of methods whose declaration offers ``deterministic``.

    - ``device``: the worker's.
    - ``dtype``: of activations.
    - ``options``: the plugin's own options, validated; None where it declares none.
    """

    device: torch.device
    dtype: torch.dtype
    checkpoint_config: Mapping[str, Any]
    options: Any = None
    threads: NativeThreads = NO_THREADS
    is_deterministic: bool = False


@dataclass(frozen=True, slots=True)
class PackedNumbers:
    """A matrix [rows, columns] for kernels of other plugins: its numbers are ``(number - zero) * scale``.

    kind: of ``numbers``: ``int8``: [rows, columns] int8; ``int4``: [rows, columns / 2] uint8, whose low halves are the
    first half of a row's columns and whose high halves the second; ``e4m3``: [rows, columns] float8_e4m3fn.
    scales: [rows / row_block, groups] of any floating type, both rounded up; a group is a run of columns, all of one
    size but perhaps the last. zeros: [rows, groups] integers; None: 8 for ``int4``, else 0.
    rounds_input: activations become e4m3 as well, each group of a token's by its largest number.

    - ``row_block``: rows that share a row of scales.
    - ``group_size``: columns of a group; ``ALL``: one group.
    """

    kind: str
    numbers: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    row_block: int = 1
    group_size: int = ALL
    rounds_input: bool = False


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Activations in e4m3, as ``Operators`` that round them give them to a layer.

    numbers: [num_tokens, columns] float8_e4m3fn. scales: [num_tokens, groups] float32, a group is a run of columns; the
    value is number * scale. dtype: of the numbers that were rounded, and so of the layer's outputs.
    """

    numbers: Tensor
    scales: Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the numbers."""
        return self.numbers.shape


class QuantMethod(ABC):
    """Creates, repacks and applies the weights of linear layers; knows nothing of the model or other ranks.

    ``LinearShape.layout`` says what the checkpoint holds: ``plain`` for a method that quantises while loading, or one
    of the layouts it declares. ``can_embed``: it has ``rows``, so embeddings in its layouts stay packed too, and a tied
    head's weights serve as the embedding.

    - ``label``: what messages call it; core's to set.
    """

    can_embed: bool = False
    label: str = ""

    def __init__(self, context: QuantContext) -> None:
        self.context = context

    @abstractmethod
    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        """The tensors to read for each part, by their name after the layer's prefix (``weight``, ``scales``).

        In the layout ``plain``, these are the tensors ``encode`` makes.
        """

    def encode(self, weight: Tensor, prefix: str) -> Mapping[str, Tensor]:
        """Quantise one part's plain weight, [out_features, in_features] as the checkpoint holds it.

        It is whole, and cut for this rank afterwards, so that every number of ranks computes with the same values.
        """
        return {"weight": weight}

    @property
    def is_encoding(self) -> bool:
        """Whether ``encode`` does anything. Otherwise weights may be read as their parameter's type, at their place."""
        return type(self).encode is not QuantMethod.encode

    @property
    def encodes_from(self) -> torch.dtype | None:
        """The type ``encode`` rounds plain weights to first, so that they may be read as that; None: it does not."""
        return None

    def read(
        self, weights: WeightSource, prefix: str, layout: str, size: tuple[int, int]
    ) -> Mapping[str, Tensor] | None:
        """One part's whole tensors, in the shapes of ``params``, where the checkpoint holds them in another form.

        For layouts whose tensors do not follow the layer's sides, and so cannot be cut or joined as they are. size:
        out_features and in_features of the part. None: they are stored as ``params`` says, and core reads them.
        Raises ``ModelLoadError`` naming the tensor.
        """
        return None

    @abstractmethod
    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Weights:
        """Repack once for the kernel. ``loaded``: in the shapes of ``params``, sharded, joined along ``output_dim``."""

    @abstractmethod
    def apply(self, weights: Weights, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [num_tokens, in_features] to [num_tokens, sum(out_features)] in x's dtype."""

    @property
    def variance(self) -> str:
        """Why a token's products may depend on how many others there are, where the declaration promises that they do
        not (an option, sizes that the kernel does not take); empty: they do not."""
        return ""

    def input_group(self, weights: Weights) -> int | None:
        """How many columns of an input share a scale, where ``apply`` rounds it to e4m3 by their largest number.

        The scale is that number / 448, at least 1e-12; operators may then round in the same pass that made the input.
        weights: ``finish``'s. None: it does not.
        """
        return None

    def apply_rounded(self, weights: Weights, x: RoundedRows, bias: Tensor | None) -> Tensor:
        """``apply``, of [num_tokens, in_features] that were rounded in groups of ``input_group``."""
        raise NotImplementedError(f"{type(self).__name__} rounds no inputs")

    @property
    def packed_version(self) -> str | None:
        """What ``finish`` makes depends on, besides the shape and what was loaded: kernels, options, instruction sets.

        None: its results are not kept from one start to the next.
        """
        return None

    def to_packed(self, weights: Weights) -> PackedTensors | None:
        """``finish``'s weights as tensors to keep; None for these. Only asked with a ``packed_version``."""
        return None

    def from_packed(self, packed: PackedTensors) -> Weights:
        """The weights that ``to_packed`` was given, from an earlier start of the same ``packed_version``."""
        raise NotImplementedError(f"{type(self).__name__} keeps nothing")

    def native(self, weights: Weights, num_slices: int) -> list[NativeLinear] | None:
        """The layer for native operators of other plugins, in up to ``num_slices`` parts of its outputs, in order.

        weights: ``finish``'s. None where no native kernel computes them.
        """
        return None

    def packed_numbers(self, weights: Weights) -> PackedNumbers | None:
        """The layer for kernels of other plugins that unpack it themselves, and keep activations as they are.

        weights: ``finish``'s. None where they have another form.
        """
        return None

    def lm_head(self, weights: Weights, is_greedy: Tensor) -> Weights:
        """What a model's last layer gives ``apply``, made of ``finish``'s weights; by default those themselves.

        is_greedy: [1] int64 on the device, which holds 1 in steps whose sampling needs of a row's outputs only the
        largest, else 0. It is set before a step and stays where it is, so that operators of a recorded step read it.
        In steps of 1 ``apply`` may return -inf for outputs other than the largest of a row; the largest, and all that
        equal it, are the same to the bit, and a row with an output that is no number has one, too. A tied embedding
        keeps ``finish``'s weights, which the result may share.
        """
        return weights

    def rows(self, weights: Weights, indices: Tensor) -> Tensor:
        """indices: [n] int64 to the rows of the matrix they name, [n, in_features] in the context's dtype."""
        raise NotImplementedError(f"{type(self).__name__} has no embeddings")


class LayerKind(Enum):
    """What a weight is used for.

    - ``LINEAR``: a product.
    - ``EMBEDDING``: rows of a table.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """How one layer is computed, and which of the layouts the checkpoint offers is read for it.

    - ``method``: computes it.
    - ``layout``: among ``WeightSource.layouts`` of the layer.
    """

    method: QuantMethod
    layout: str = PLAIN


class Quantization(ABC):
    """Chooses the format of every layer of a model."""

    @abstractmethod
    def choose(self, prefix: str, kind: LayerKind = LayerKind.LINEAR, stored: str | None = None) -> LayerFormat:
        """The format of the layer ``prefix``, whose weights the checkpoint holds below ``stored`` (None: ``prefix``).

        Raises ``ModelLoadError`` when what the checkpoint holds cannot be read as the user asked.
        """


class OneFormat(Quantization):
    """The same for every layer."""

    def __init__(self, method: QuantMethod, layout: str = PLAIN) -> None:
        self._format = LayerFormat(method, layout)

    def choose(self, prefix: str, kind: LayerKind = LayerKind.LINEAR, stored: str | None = None) -> LayerFormat:
        return self._format


@dataclass(frozen=True, kw_only=True)
class QuantizerSpec(Declaration):
    """Declares a weight format.

    layouts: names of checkpoint layouts it reads (``WeightSource.layouts``); with ``plain`` among them it can
    compute any unquantised layer. For each layer ``auto`` takes the best-ranked quantiser that reads one of the
    layouts the checkpoint offers without changing its numbers.
    exact: those of ``layouts`` whose numbers stay the checkpoint's.
    bits: about what a weight of ``plain`` takes once it was quantised while loading; None: as many as its type.
    is_lossless, keeps_plain: of version 1 (``api=1``), which said with two switches what ``exact`` says: whether the
    numbers of layouts other than ``plain`` stay, and whether those of ``plain`` do.
    """

    family: ClassVar[str] = "quant"

    layouts: tuple[str, ...] = (PLAIN,)
    exact: tuple[str, ...] = ()
    bits: float | None = None
    is_lossless: bool = False
    keeps_plain: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.api == 1 and self.exact:
            raise ValueError(f"quantizer {self.name!r}: exact is of version 2 of this interface: say api=2")
        if self.api > 1 and (self.is_lossless or self.keeps_plain):
            raise ValueError(
                f"quantizer {self.name!r}: is_lossless and keeps_plain are of version 1: name the layouts in exact"
            )
        unread = set(self.exact) - set(self.layouts)
        if unread:
            raise ValueError(
                f"quantizer {self.name!r}: exact names {', '.join(sorted(unread))}, which it does not read"
            )

    def auto_skip_reason(self, facts: Facts) -> str | None:
        if not facts.layouts or set(facts.layouts) & set(self.exact):
            return None
        stored = " and ".join(facts.layouts)
        return f"keeps no numbers of weights stored as {stored}: auto quantises nothing, name it with --quantization"

    def is_meant_for(self, facts: Facts) -> bool:
        return bool(set(facts.layouts) & set(self.exact))
