"""Read a checkpoint into transformers' modules: linear layers become fwk's, everything else is copied."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from fwk.errors import ModelLoadError
from fwk_layers import ColumnParallelLinear, LMHead, Part

if TYPE_CHECKING:
    from fwk.interfaces.model import ModelContext


class Linear(nn.Module):
    """A linear layer of fwk's where transformers had one of torch's: quantised and adapted like any other."""

    def __init__(self, layer: ColumnParallelLinear | LMHead, out_features: int) -> None:
        super().__init__()
        self.layer, self.out_features = layer, out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)


def load_weights(context: ModelContext, model: Any) -> None:
    """Raises ``ModelLoadError`` naming tensors that are missing, or that the model has no place for."""
    names = list(context.weights.names())
    replaced = replace_linears(context, model, {name.rpartition(".")[0] for name in names})
    left = [name for name in names if name.rpartition(".")[0] not in replaced]
    if not names:  # a source that has whatever it is asked for
        left = [name for name, _ in model.named_parameters()]
    loaded = copy_tensors(context, model, left)
    missing = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in loaded)
    if missing:
        raise ModelLoadError(
            f"the checkpoint lacks {len(missing)} tensors of transformers' {type(model).__name__} ({missing[0]}, ...)"
            if len(missing) > 1
            else f"the checkpoint lacks the tensor {missing[0]!r} of transformers' {type(model).__name__}"
        )


def replace_linears(context: ModelContext, model: Any, stored: set[str]) -> set[str]:
    """Exchange the linear layers that the checkpoint holds under their own names; returns those names.

    A head tied to the embedding stays: the two share one tensor.
    """
    config, head = context.config, model.get_output_embeddings()
    replaced: set[str] = set()
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear or (stored and name not in stored):
            continue
        if module is head and config.tie_word_embeddings:
            continue
        sizes = (module.out_features, module.in_features)
        if module is head and sizes == (config.vocab_size, config.hidden_size) and module.bias is None:
            layer: ColumnParallelLinear | LMHead = LMHead(context, name)
        else:
            parts = [Part(name, module.out_features)]
            layer = ColumnParallelLinear(context, parts, module.in_features, bias=module.bias is not None)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, Linear(layer, module.out_features))
        replaced.add(name)
    return replaced


def copy_tensors(context: ModelContext, model: Any, names: Iterable[str]) -> set[int]:
    """Copy tensors, renamed and joined as transformers' tables say; returns the ids of the parameters filled."""
    transforms = get_model_conversion_mapping(model)
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    places = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    joined: dict[str, WeightConverter] = {}
    loaded: set[int] = set()

    def fill(name: str, value: Tensor) -> None:
        place = places[name]
        if place.shape != value.shape:
            raise ModelLoadError(f"{name} is {tuple(value.shape)} in the checkpoint, {tuple(place.shape)} in the model")
        place.data.copy_(value)
        loaded.add(id(place))

    for name in sorted(names, key=dot_natural_key):
        if name in places:
            fill(name, context.weights.tensor(name, tuple(places[name].shape)))
            continue
        target, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, places)
        if target not in places:
            continue  # nobody reads it, which core reports
        if pattern is None:
            fill(target, context.weights.tensor(name, tuple(places[target].shape)))
            continue
        converter = joined.setdefault(target, deepcopy(by_pattern[pattern]))
        converter.add_tensor(target, name, pattern, _plain(context, name))  # pyright: ignore[reportArgumentType]
    for target, converter in joined.items():
        for name, value in converter.convert(target, model=model, config=model.config).items():
            fill(name, value[0] if isinstance(value, list) else value)
    return loaded


def _plain(context: ModelContext, name: str) -> Tensor:
    """A tensor of a shape that only transformers' table knows."""
    value = context.weights.raw(name)
    if not value.is_floating_point():
        raise ModelLoadError(f"{name} is packed, and cannot be joined with others as transformers wants it")
    return value
