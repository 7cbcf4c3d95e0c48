"""The attention function that transformers' modules call: it hands Q, K and V to fwk's backend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from fwk.errors import ModelLoadError
from fwk_layers import Attention

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext
    from fwk.types import ForwardBatch

NAME = "fwk_paged"
_HOME = "fwk_attention"
"""Attribute of every module: the model's ``PagedAttention``."""
_HARMLESS = frozenset({"position_ids", "cache_position", "position_embeddings"})
"""Tensors that modules pass on and that no attention function reads."""


class PagedAttention:
    """The attention layers of one model, found while it runs for the first time (``recording``)."""

    def __init__(self, context: ModelContext, model: nn.Module) -> None:
        self._context = context
        self._layer_types: list[str] | None = getattr(model.config, "layer_types", None)  # type: ignore[union-attr]
        self._layers: dict[nn.Module, Attention] = {}
        self._batch: ForwardBatch | None = None
        self._seen: list[tuple[Tensor, Tensor]] | None = None
        self._called: set[nn.Module] = set()
        for module in model.modules():
            module.__dict__[_HOME] = self

    @contextmanager
    def on(self, batch: ForwardBatch) -> Iterator[None]:
        """Attend over the past of ``batch``."""
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    @contextmanager
    def recording(self) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """Attend to nothing, but note the layers and, for each, its Q and K: [num_tokens, heads, head_size]."""
        self._seen, self._called = [], set()
        try:
            yield self._seen
        finally:
            self._seen = None

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> Tensor:
        """q: [1, num_heads, num_tokens, head_size]; k, v alike. Returns [1, num_tokens, num_heads, size of v]."""
        q, k, v = (x[0].transpose(0, 1).contiguous() for x in (q, k, v))
        width = v.shape[-1]
        if self._seen is not None:
            self._record(module, q, k, v, settings)
            self._seen.append((q, k))
            return v.new_zeros(1, q.shape[0], q.shape[1], width)
        assert self._batch is not None
        if width < q.shape[-1]:
            v = F.pad(v, (0, q.shape[-1] - width))
        out = self._layers[module](q, k, v, self._batch).view(1, q.shape[0], q.shape[1], -1)
        return out[..., :width] if width < out.shape[-1] else out

    def _record(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, settings: dict[str, Any]) -> None:
        where = f"{type(module).__name__} of transformers"
        if module in self._called:
            raise ModelLoadError(f"{where} is used twice in one pass, but its K/V have one place")
        self._called.add(module)
        if module in self._layers:
            return
        window = settings.get("sliding_window")
        self._check(module, where, window, settings)
        if q.shape[-1] != k.shape[-1] or v.shape[-1] > k.shape[-1] or v.shape[1] != k.shape[1]:
            raise ModelLoadError(f"{where} has Q, K and V of sizes {q.shape[-1]}, {k.shape[-1]} and {v.shape[-1]}")
        self._layers[module] = Attention(
            self._context,
            q.shape[1],
            k.shape[1],
            head_size=q.shape[-1],
            scale=settings.get("scaling"),
            sliding_window=int(window) if window else None,
            soft_cap=settings.get("softcap"),
        )

    def _check(self, module: nn.Module, where: str, window: int | None, settings: dict[str, Any]) -> None:
        """Refuse what the backend would not do."""
        unknown = sorted(
            name for name, x in settings.items() if isinstance(x, Tensor) and x.numel() and name not in _HARMLESS
        )
        if unknown:
            raise ModelLoadError(f"{where} wants {', '.join(unknown)} in attention, which fwk's backends do not know")
        if settings.get("is_causal", getattr(module, "is_causal", True)) is False:
            raise ModelLoadError(f"{where} looks ahead: it is no causal language model")
        index = getattr(module, "layer_idx", None)
        kinds = self._layer_types
        kind = kinds[index] if kinds and isinstance(index, int) and index < len(kinds) else None
        if kind not in (None, "full_attention", "sliding_attention"):
            raise ModelLoadError(f"{where}: layer {index} is of type {kind!r}; only full and sliding are known")
        is_sliding = kind == "sliding_attention" or (kind is None and self._context.config.sliding_window is not None)
        if is_sliding and not window:
            raise ModelLoadError(f"{where}: layer {index} has a sliding window that it does not tell of")


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """The function transformers calls; its result is [1, num_tokens, num_heads, head_size], and no weights."""
    home: PagedAttention = module.__dict__[_HOME]
    return home.attend(module, query, key, value, {**settings, "attention_mask": attention_mask}), None


AttentionInterface.register(NAME, _attend)
