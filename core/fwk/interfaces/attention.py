"""Attention kernels over a paged KV cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

from fwk.interfaces.declaration import Declaration, Facts
from fwk.interfaces.device import Upload, upload_to
from fwk.interfaces.native import NO_THREADS, NativeThreads

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from fwk.interfaces.device import Staging
    from fwk.types import ForwardBatch


class KVKind(Enum):
    """What a layer keeps of the past.

    - ``FULL``: K and V of all tokens.
    - ``SLIDING_WINDOW``: K and V, of which the last ``AttentionLayer.sliding_window`` tokens are read.
    - ``LATENT``: one vector per token that is K and V (multi-head latent attention).
    - ``STATE``: a state of fixed size instead of K and V.
    """

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    LATENT = "latent"
    STATE = "state"


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one layer stores per token: K and V of each head; of kind LATENT only K, whose first part serves as V.

    - ``kind``: what is stored.
    - ``num_kv_heads``: of this rank.
    - ``head_size``: numbers in a head of K.
    - ``value_head_size``: numbers in a head of V.
    - ``sliding_window``: tokens that are read, the newest included; None: all.
    """

    kind: KVKind
    num_kv_heads: int
    head_size: int
    value_head_size: int
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """How a backend wants one layer's blocks laid out: the shape of a single block, and its element type.

    A block must stand for itself: scales of quantised K/V are part of it, so that whoever copies a block's bytes
    copies all there is. Bytes of zero must read as finite numbers.

    - ``block_shape``: of one block, without the dimension of blocks.
    - ``dtype``: of its elements.
    - ``head_dim``: which dimension of ``block_shape`` counts the K/V heads, each with all that is kept of it, and the
      same bytes whatever other heads the rank has; None: heads are not told apart.
    """

    block_shape: tuple[int, ...]
    dtype: torch.dtype
    head_dim: int | None = None


@dataclass(slots=True)
class AttentionLayer:
    """One layer as a backend sees it. ``kv_cache`` is bound by the worker after the cache is allocated.

    A layer of kind LATENT has one KV head of which only K is stored: its value is the first ``value_head_size``
    numbers of K. In other layers K and V have the same size.

    ``extras`` are constants of the layer that its attention uses, by the feature that reads them, in these shapes:

    - ``sinks`` [num_heads] float32: a further score of each query, which takes part in the softmax and has no value.
    - ``alibi_slopes`` [num_heads] float32: a score falls by the slope for each position between query and key.
    - ``chunk_size`` [] int64: a query sees keys of its own chunk of positions only (position // chunk_size).
    - ``distance_bias`` [num_heads, n] float32: what a score gains by how many positions the key is behind the query;
      the last number counts for all that are further.

    ``needs`` are the features a backend must declare for this layer beyond those that other fields ask for: the names
    of the extras, and others that the model and the backend agree on. Core compares words and knows none of them.

    - ``index``: of this layer among the model's attention layers
    - ``num_heads``: query heads of this rank.
    - ``num_kv_heads``: K/V heads of this rank; divides ``num_heads``.
    - ``head_size``: numbers in a head of Q and K.
    - ``scale``: factor on scores before the softmax (mostly head_size ** -0.5).
    - ``sliding_window``: tokens that a query sees, itself included; None: all.
    - ``soft_cap``: scores become soft_cap * tanh(score / soft_cap) before the softmax
    - ``value_head_size``: 0: head_size
    - ``kind``: what it keeps; set by ``__post_init__`` for a sliding window.
    - ``kv_group``: which block table of ``batch.kv_groups`` is its own; set by the worker, 0 is that of all tokens.
    - ``kv_cache``: [num_blocks, *BlockFormat.block_shape]
    - ``head_dim``: ``BlockFormat.head_dim`` of its blocks.
    - ``state``: the backend's own, per layer
    - ``is_pruned``: its outcome is read at ``batch.hidden_indices`` alone, where that is not None
    - ``prefix``: the layer's name in the checkpoint, for messages
    - ``k_scale``: what the checkpoint says K is to be divided by where it is kept in fewer bits by a constant; None:
      nothing.
    - ``v_scale``: the same for V.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    value_head_size: int = 0
    kind: KVKind = KVKind.FULL
    kv_group: int = 0
    kv_cache: Tensor | None = None
    head_dim: int | None = None
    state: Any = None
    is_pruned: bool = False
    extras: Mapping[str, Tensor] = field(default_factory=dict[str, "Tensor"])
    needs: frozenset[str] = frozenset()
    prefix: str = ""
    k_scale: float | None = None
    v_scale: float | None = None

    def __post_init__(self) -> None:
        self.value_head_size = self.value_head_size or self.head_size
        if self.kind is KVKind.FULL and self.sliding_window is not None:
            self.kind = KVKind.SLIDING_WINDOW
        if self.kind is KVKind.LATENT:
            if self.num_kv_heads != 1 or self.value_head_size > self.head_size:
                raise ValueError("a latent layer has one KV head, and a value no larger than it")
        elif self.value_head_size != self.head_size:
            raise ValueError("K and V differ in size only in a latent layer")
        self.needs = self.needs | frozenset(self.extras)

    @property
    def features(self) -> frozenset[str]:
        """What a backend must be able to do for this layer, in the words of ``AttentionBackendSpec.features``."""
        asked = {
            "sliding_window": self.sliding_window is not None,
            "soft_cap": self.soft_cap is not None,
            "latent": self.kind is KVKind.LATENT,
        }
        return self.needs | {name for name, is_asked in asked.items() if is_asked}

    @property
    def kv_spec(self) -> KVSpec:
        """What it stores per token."""
        return KVSpec(self.kind, self.num_kv_heads, self.head_size, self.value_head_size, self.sliding_window)


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What an attention backend is built with.

    ``kv_dtype`` is the user's word, one of the declaration's ``kv_dtypes``: what it means in bytes is the backend's
    affair. ``auto`` is ``dtype``. ``threads`` runs native operators. ``staging()`` makes buffers for what a plan copies
    to a device; None where the device is the host.

    kv_layout: one of the declaration's ``kv_layouts``, to be kept to as another backend shares the cache; empty: the
        backend may lay out K/V as it likes.
    is_deterministic: a token's numbers must not depend on how the tokens before it were divided into steps, to the bit;
        only asked of backends that offer ``deterministic``.
    tp_rank, tp_size: which of the ranks this is that share each layer's heads. Each has consecutive ones, in the order
        of ranks; where there are more ranks than KV heads, neighbours have the same one.

    - ``device``: the worker's.
    - ``block_size``: tokens in a block of the KV cache.
    - ``options``: the plugin's own options, validated; None where it declares none.
    - ``upload``: core's own way to the device, for what is in no such buffer; ``send`` takes it.
    """

    device: torch.device
    dtype: torch.dtype
    kv_dtype: str
    block_size: int
    options: Any = None
    threads: NativeThreads = NO_THREADS
    staging: Callable[[], Staging] | None = None
    kv_layout: str = ""
    is_deterministic: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    upload: Upload | None = None

    @property
    def send(self) -> Upload:
        """Brings an array to the device."""
        return self.upload or upload_to(self.device)


@dataclass(frozen=True, slots=True)
class CaptureSizes:
    """What captured decode steps may hold at most.

    num_seqs: rows, of which a sequence with drafts has several.
    null_block: of the KV cache, which no sequence holds: rows that stand for no sequence store there.
    rows_per_seq: of one sequence at most. So many times the blocks of a full cache are read by a step's rows together,
        and more only where sequences share some.

    - ``max_seq_len``: tokens of one sequence
    - ``num_blocks``: of the KV cache
    """

    num_seqs: int
    max_seq_len: int
    num_blocks: int
    null_block: int
    rows_per_seq: int = 1


@dataclass(frozen=True, slots=True)
class Turn:
    """What is still to be done to queries and keys, in the words and with the roundings of ``Operators``.

    cos, sin: of ``rotate``, [num_tokens, 1, head_size]. weight: [num_heads + num_kv_heads, head_size], of ``rms_norm``
    of each head, which comes before; None: there is none.

    - ``eps``: of ``rms_norm``.
    - ``rounds_last``: as in ``Operators.rms_norm``.
    """

    cos: Tensor
    sin: Tensor
    weight: Tensor | None = None
    eps: float = 0.0
    rounds_last: bool = False


class AttentionBackend(ABC):
    """One per worker; holds no state between steps except what is the same for all of them.

    - ``turns``: whether it has ``forward_turned``.
    - ``not_recorded``: why a host cannot record steps of it to replay them; empty: it can.
    """

    turns: bool = False
    not_recorded: str = ""

    def __init__(self, context: AttentionContext) -> None:
        self.context = context

    @abstractmethod
    def block_format(self, spec: KVSpec) -> BlockFormat:
        """Layout of one block of ``block_size`` tokens: K, V and whatever is needed to read them."""

    @abstractmethod
    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> Any:
        """Prepare what all layers of this step share. Called once a step; the answer becomes ``batch.plan``."""

    @abstractmethod
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Store ``k`` and ``v`` at ``slot_mapping``, then attend over each sequence's whole past.

        q: [num_tokens, num_heads, head_size]; k, v: [num_tokens, num_kv_heads, head_size]; k is already rotated;
        v is None in a latent layer. Returns [num_tokens, num_heads, value_head_size] in q's dtype.

        Causal, or as ``batch.tree_mask`` says. A sliding window hides keys whose *position* is too far behind the
        query's. *All* tokens of the batch are stored before any is read: a sequence may read blocks that another
        sequence of the same batch fills (a prefix shared within one step). Where K/V are stored in fewer bits, the
        step's own are read back as they were stored: a token's output does not depend on how its past was chunked.
        ``extra`` holds tensors of this step and layer beyond q, k and v, by names that the layer's ``needs`` announced;
        a backend that declares no such feature is never given any, and may leave the argument out.

        In a layer that needs ``cross_attention``, k and v are not the queries' but what an encoder made of the prompts
        that start in this step (perhaps none), stored at ``slot_mapping``: [num_encoded, num_kv_heads, head_size].
        Every query sees all ``seq_lens`` keys of its sequence, and is none of them.

        Where the layer is narrowed, what is returned of tokens that are not in ``batch.hidden_indices`` means nothing.
        """

    def forward_turned(self, qkv: Tensor, layer: AttentionLayer, batch: ForwardBatch, turn: Turn) -> Tensor:
        """``forward``, of queries and keys that are first normalised and rotated; a backend may do it as it stores.

        qkv: [num_tokens, num_heads + 2 * num_kv_heads, head_size], queries, keys and values side by side, of which
        nothing is needed any more. The layer is not latent and has no ``extra``.
        """
        raise NotImplementedError(f"{type(self).__name__} turns nothing")

    def init_capture(self, layers: list[AttentionLayer], sizes: CaptureSizes) -> None:
        """Make the buffers of ``plan_static``. Called when the KV cache is bound, before steps are captured.

        Called again when it is bound anew (on a device its size is known only once steps and captures were measured on
        a small one): what was made before is then of no use.

        Backends with the feature ``graph_capture`` must have both.
        """
        raise NotImplementedError(f"{type(self).__name__} declares graph_capture, but cannot plan for it")

    def plan_static(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> Any:
        """As ``plan``, for a decode step that is captured, or replayed from a capture: its last rows may be padding.

        What ``forward`` launches for such a plan depends on the number of rows alone, and reads all else from
        buffers that are where they were when a step of as many rows was captured: so a replay, which calls neither
        ``forward`` nor anything else in Python, computes this step. ``batch.kv_groups`` have block tables of one width.

        Padding rows have one token, at the first slot of ``CaptureSizes.null_block``. Rows may be a token and a chain
        of drafts of one sequence, with one block table: each reads what those before it store. Every row gets the
        numbers that ``plan`` and ``forward`` give. None: the buffers are too small, and the step is computed operator
        by operator. As with ``plan``, steps may still be queued that read the buffers.
        """
        raise NotImplementedError(f"{type(self).__name__} declares graph_capture, but cannot plan for it")

    def move(self, layers: list[AttentionLayer], source: Tensor, target: Tensor) -> None:
        """Copy K/V of slot ``source[i]`` to slot ``target[i]`` for every i, in all layers, as if all at once.

        source, target: [n] int64; a slot may be in both. Called between steps, after a tree of drafts was verified:
        its accepted path becomes consecutive. Backends with the feature ``tree_mask`` must have it.
        """
        raise NotImplementedError(f"{type(self).__name__} declares tree_mask, but cannot move slots")


@dataclass(frozen=True, kw_only=True)
class AttentionBackendSpec(Declaration):
    """Declares an attention backend.

    kv_dtypes: the formats it can keep K/V in, as users write them (``--kv-cache-dtype``).
    features: abilities among ``sliding_window``, ``soft_cap``, ``graph_capture`` (``plan_static``: decode steps, and
        the verification of chains of drafts, can be captured on a device), ``tree_mask``, ``latent``, ``sinks``,
        ``alibi_slopes``, ``chunk_size``, ``distance_bias``, ``cross_attention``, ``kv_groups`` (it looks a layer's
        blocks up in ``batch.kv_groups[layer.kv_group]`` wherever it does; without, all layers share one block table),
        ``late_lengths`` (it heeds ``batch.num_fewer``: lengths that only the device knows; without, no step is planned
        while drafts are being verified),
        and any other word that a model's layers need (``AttentionLayer.needs``).
    kv_layouts: by K/V format (of ``kv_dtypes``), the name of a layout of blocks that it can keep to: two backends with
        the same name can share a cache, one for prompts and one for next tokens. ``rows`` is [K and V, or K alone in a
        latent layer; num_kv_heads; block_size; row]: a row is a head's numbers of a token, in quantised formats
        followed by padding to a multiple of four bytes and a float32 to multiply them with. A block that is begun is
        cleared before: the other backend may read all of it.
    made_of: backends of the run, as of ``Plugins.items``, that are one as this one: what ``load`` names is called with
        their objects, and they keep to its ``kv_layouts``.

    - ``dtypes``: of activations that it computes in.
    - ``head_sizes``: None: any
    - ``block_sizes``: None: any
    """

    family: ClassVar[str] = "attention"

    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    kv_dtypes: tuple[str, ...] = ("auto",)
    head_sizes: tuple[int, ...] | None = None
    block_sizes: tuple[int, ...] | None = None
    features: frozenset[str] = frozenset()
    kv_layouts: Mapping[str, str] = field(default_factory=dict[str, str])
    made_of: tuple[Any, ...] = ()

    def refusal(self, facts: Facts) -> str | None:
        if facts.dtype not in self.dtypes:
            return f"computes in {', '.join(self.dtypes)}, this run in {facts.dtype}"
        if facts.kv_dtype not in self.kv_dtypes:
            return f"keeps K/V as {', '.join(self.kv_dtypes)}, not {facts.kv_dtype}"
        if self.head_sizes is not None and facts.head_size and facts.head_size not in self.head_sizes:
            return (
                f"has kernels for head sizes {', '.join(map(str, self.head_sizes))}, this model's is {facts.head_size}"
            )
        if self.block_sizes is not None and facts.block_size not in self.block_sizes:
            return f"works with --page-size {' or '.join(map(str, self.block_sizes))}, not {facts.block_size}"
        missing = sorted(facts.features - self.features)
        if missing:
            return f"lacks {', '.join(missing)}, which this run needs"
        return super().refusal(facts)

    def abilities(self) -> frozenset[str]:
        return self.features | self.offers
