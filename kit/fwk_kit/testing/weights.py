"""Weights in memory, and the context layers are built with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.attention import AttentionContext
from fwk.interfaces.declaration import Facts
from fwk.interfaces.loader import WeightSource
from fwk.interfaces.model import ModelContext
from fwk.interfaces.operators import OperatorContext
from fwk.interfaces.parallel import ParallelGroup, SingleRank
from fwk.interfaces.quant import PLAIN, LinearShape, ParamSpec, QuantContext, Quantization, QuantMethod
from fwk.plugins import choose, load_object
from fwk.types import ModelConfig
from fwk_kit.testing.base import installed
from fwk_native.thread_pool import ThreadPool

SMALL = {
    "architectures": ["X"],
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""The sizes of the layers that suites build: multiples of the groups that quantisers use."""


class PlainWeights(QuantMethod):
    """Unquantised layers, without a plugin."""

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(0, 1, shape.dtype)}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Tensor:
        return loaded["weight"]

    def apply(self, weights: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weights, bias)


class Tensors(WeightSource):
    """Weights from memory, of one layout; remembers which were asked for."""

    def __init__(self, tensors: dict[str, Tensor], layout: str = PLAIN) -> None:
        self.tensors = tensors
        self.layout = layout
        self.asked: set[str] = set()
        self.skipped: set[str] = set()

    @staticmethod
    def of_folder(folder: Path) -> Tensors:
        with safe_open(folder / "model.safetensors", "pt") as file:  # type: ignore[no-untyped-call]
            return Tensors({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self.asked.add(name)
        if name not in self.tensors:
            raise ModelLoadError(f"no tensor {name}")
        found = self.tensors[name]
        if tuple(found.shape) != shape:
            raise ModelLoadError(f"{name} is {tuple(found.shape)}, not {shape}")
        return found

    def raw(self, name: str) -> Tensor:
        self.asked.add(name)
        return self.tensors[name]

    def skip(self, name: str) -> None:
        self.skipped.add(name)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def layouts(self, prefix: str) -> tuple[str, ...]:
        return (self.layout,)


def layer_context(
    weights: WeightSource, quant: Quantization, *, tp: ParallelGroup | None = None, **config: Any
) -> ModelContext:
    """What layers are built with on the CPU in float32: the format under test, all else as ``auto`` chooses it."""
    plugins, device, dtype = installed(), torch.device("cpu"), torch.float32
    threads = ThreadPool()

    def take(family: str) -> Any:
        item = choose(plugins, family, "auto", Facts()).chosen
        assert item is not None
        return load_object(item)

    attention = take("attention")(AttentionContext(device, dtype, "auto", 16, threads=threads))
    plain = PlainWeights(QuantContext(device, dtype, {}, threads=threads))
    group = SingleRank() if tp is None else tp
    model = ModelConfig.from_dict({**SMALL, **config}, "fwk_kit.testing")
    operators = take("operators")(OperatorContext(device, dtype, threads=threads))
    return ModelContext(model, weights, dtype, device, quant, plain, attention, group, 512, take("moe"), operators)
