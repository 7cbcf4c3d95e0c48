"""The attention backend of a run, whose answers are checked."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fwk.errors import shaped
from fwk.interfaces.attention import AttentionBackend, AttentionBackendSpec, AttentionContext, AttentionLayer
from fwk.plugins import PluginFactory, Registered, load_object
from fwk.plugins.answers import checked


def build_attention(factory: PluginFactory, **fields: Any) -> AttentionBackend:
    """The backend that was chosen, of those that it is made of if it is. ``fields``: of ``AttentionContext``."""
    item = factory.item("attention")
    assert isinstance(item.declaration, AttentionBackendSpec)
    if not item.declaration.made_of:
        return _checked(item, factory.build(item, AttentionContext, **fields))
    fields["kv_layout"] = item.declaration.kv_layouts[fields["kv_dtype"]]
    parts = [_checked(part, factory.build(part, AttentionContext, **fields)) for part in item.declaration.made_of]
    return load_object(item)(*parts)


def _checked(item: Registered, backend: AttentionBackend) -> AttentionBackend:
    return checked(item, backend, plan=None, plan_static=None, forward=_attended, forward_turned=_turned)


def _attended(answer: Any, q: Tensor, k: Tensor, v: Tensor | None, layer: AttentionLayer, *more: Any) -> str | None:
    return shaped(answer, (*q.shape[:-1], layer.value_head_size), q.dtype)


def _turned(answer: Any, qkv: Tensor, layer: AttentionLayer, *more: Any) -> str | None:
    return shaped(answer, (qkv.shape[0], layer.num_heads, layer.value_head_size), qkv.dtype)
