"""Which channels of queries and keys are large, over texts that a model reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fwk import AttentionBackendSpec, hookimpl
from fwk.interfaces.attention import AttentionBackend, AttentionContext, AttentionLayer, BlockFormat, KVSpec

if TYPE_CHECKING:
    from fwk.types import ForwardBatch

NAME = "recorder"


@dataclass(slots=True)
class Sizes:
    """Sums of absolute values over all tokens of a layer."""

    queries: Tensor  # [num_kv_heads, head_size] float64: of all heads that share a KV head
    keys: Tensor  # [num_kv_heads, head_size] float64

    def lists(self) -> dict[str, list[list[int]]]:
        """Channels of each KV head, heaviest first, by what is asked for: of products, those of the sums."""
        found = {"q": self.queries, "k": self.keys, "qk": self.queries * self.keys}
        return {kind: x.argsort(stable=True, dim=1, descending=True).tolist() for kind, x in found.items()}


class Recorder(AttentionBackend):
    """Another backend, whose queries and keys are looked at."""

    make: ClassVar[Callable[[AttentionContext], AttentionBackend]]
    sizes: ClassVar[dict[str, Sizes]] = {}

    def __init__(self, context: AttentionContext) -> None:
        super().__init__(context)
        self._inner = type(self).make(context)
        self.sizes.clear()

    def block_format(self, spec: KVSpec) -> BlockFormat:
        return self._inner.block_format(spec)

    def plan(self, batch: ForwardBatch, layers: list[AttentionLayer]) -> Any:
        return self._inner.plan(batch, layers)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        layer: AttentionLayer,
        batch: ForwardBatch,
        extra: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        queries = q.double().abs().sum(0).unflatten(0, (layer.num_kv_heads, -1)).sum(1)
        keys = k.double().abs().sum(0)
        name = layer.prefix or f"model.layers.{layer.index}.self_attn"
        known = self.sizes.get(name)
        if known is None:
            self.sizes[name] = Sizes(queries, keys)
        else:
            known.queries += queries
            known.keys += keys
        return self._inner.forward(q, k, v, layer, batch, extra)


class RecorderPlugin:
    """Declares it, with the abilities of another declaration."""

    def __init__(self, inner: AttentionBackendSpec, make: Callable[[AttentionContext], AttentionBackend]) -> None:
        self._spec = replace(
            inner,
            name=NAME,
            load="fwk_kit.training.channels:Recorder",
            features=inner.features - {"latent", "tree_mask", "cross_attention"},
        )
        Recorder.make = staticmethod(make)

    @hookimpl
    def attention_backends(self) -> list[AttentionBackendSpec]:
        return [self._spec]
