"""Build a model from a transformers checkpoint and run it without an engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fwk.config import EngineOptions
from fwk.interfaces.attention import AttentionContext, AttentionLayer
from fwk.interfaces.declaration import Facts
from fwk.interfaces.loader import LoaderContext, WeightSource
from fwk.interfaces.model import Model, ModelContext, ModelSpec
from fwk.interfaces.operators import OperatorContext
from fwk.interfaces.parallel import ParallelGroup, SingleRank
from fwk.interfaces.quant import OneFormat, QuantContext, QuantMethod
from fwk.plugins import Registered, build, choose, discover, find, load_object
from fwk.plugins.selection import plugin_options as plugin_options_of
from fwk.types import ModelConfig
from fwk.worker.loading.quantization import ChosenQuantization
from fwk.worker.loading.weights import TrackedWeights
from fwk_kit.testing.batches import block_tables, make_batch
from fwk_kit.testing.weights import Tensors
from fwk_native.thread_pool import ThreadPool


def make_context(
    config: ModelConfig,
    weights: WeightSource,
    *,
    dtype: torch.dtype = torch.float32,
    tp: ParallelGroup | None = None,
    max_model_len: int = 512,
    block_size: int = 16,
    ep_size: int = 1,
    operators: str = "torch",
) -> ModelContext:
    """A context with the plain plugins on the CPU. operators: those between matrices, by their plugin's name."""
    plugins, device, threads = discover(), torch.device("cpu"), ThreadPool()
    method = load_object(find(plugins, "quant", "none"))
    plain, wide = (method(QuantContext(device, kind, {}, threads=threads)) for kind in (dtype, torch.float32))
    attention = load_object(find(plugins, "attention", "torch"))(
        AttentionContext(device, dtype, "auto", block_size, threads=threads)
    )
    group = SingleRank() if tp is None else tp
    runner = load_object(find(plugins, "moe", "torch"))
    made = load_object(find(plugins, "operators", operators))(OperatorContext(device, dtype, threads=threads))
    parts = plain, attention, group, max_model_len, runner, made
    return ModelContext(config, weights, dtype, device, OneFormat(plain), *parts, ep_size=ep_size, plain_float32=wide)


class ThreadRank(ParallelGroup):
    """A rank whose group is the threads of ``on_ranks``."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, shared: list[Tensor | None]) -> None:
        self.rank, self.size = rank, size
        self._barrier, self._shared = barrier, shared

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._shared[self.rank] = x
        self._barrier.wait()
        parts = [part.clone() for part in self._shared if part is not None]
        self._barrier.wait()
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return torch.cat(self._exchange(x), dim)


def on_ranks(size: int, work: Callable[[ParallelGroup], Tensor]) -> list[Tensor]:
    """What ``work`` gives on each rank of a group of threads."""
    barrier, shared = threading.Barrier(size), [None] * size

    def run(rank: int) -> Tensor:
        try:
            return work(ThreadRank(rank, size, barrier, shared))  # type: ignore[arg-type]
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def make_quantised_context(
    path: Path,
    *,
    dtype: torch.dtype = torch.float32,
    tp: ParallelGroup | None = None,
    ep_size: int = 1,
    plugin_options: dict[str, dict[str, object]] | None = None,
    **options: Any,
) -> ModelContext:
    """A context on a real checkpoint, with the quantisation chosen as a worker chooses it. options: of the engine."""
    plugins, device, threads = discover(), torch.device("cpu"), ThreadPool()
    loader = next(
        load_object(item)
        for item in plugins.family("loaders")
        if item.name == ("gguf" if path.is_file() else "safetensors")
    )
    checkpoint = loader(LoaderContext()).open(path)
    config = ModelConfig.from_dict(checkpoint.config(), str(path))
    weights = TrackedWeights(checkpoint.weights())
    context = make_context(config, weights, dtype=dtype, tp=tp, ep_size=ep_size)

    def build_method(item: Registered) -> QuantMethod:
        raw = config.raw.get("quantization_config") or {}
        own = plugin_options_of(item, plugin_options or {})
        return build(item, QuantContext(device, dtype, raw, own, threads))

    context.quant = ChosenQuantization(EngineOptions(**options), plugins, Facts(), weights, context.plain, build_method)
    return context


MAX_SEQUENCES = 8


class RunnableModel:
    """A model with a KV cache, fed with token ids."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype = torch.float32,
        num_blocks: int = 64,
        tp: ParallelGroup | None = None,
        ep_size: int = 1,
        implementation: str = "auto",
        model_class: type[Model] | None = None,
        operators: str = "torch",
    ) -> None:
        """model_class: instead of what an installed plugin names."""
        raw = json.loads((folder / "config.json").read_text())
        facts = Facts(architecture=raw["architectures"][0], task="generate")
        spec = choose(discover(), "models", implementation, facts).chosen
        assert spec is not None
        assert isinstance(spec.declaration, ModelSpec)
        self.spec = spec.name
        config = ModelConfig.from_dict(spec.declaration.normalised(raw), str(folder))
        self.weights = Tensors.of_folder(folder)
        self.context = make_context(config, self.weights, dtype=dtype, tp=tp, ep_size=ep_size, operators=operators)
        with torch.inference_mode():
            self.model: Model = (model_class or load_object(spec))(self.context)
        allocate(self.context, num_blocks)
        for state in self.context.recurrent_states:
            state.allocate(MAX_SEQUENCES, torch.device("cpu"))

    @property
    def layers(self) -> list[AttentionLayer]:
        return self.context.attention_layers

    def step(self, pasts: Sequence[int], token_ids: Sequence[Sequence[int]], tables: list[list[int]]) -> list[Tensor]:
        """Logits of every new token, by sequence."""
        lens = [len(ids) for ids in token_ids]
        batch = make_batch(pasts, lens, tables, token_ids=token_ids)
        for state in self.context.recurrent_states:
            for tensor in state.tensors.values():
                tensor[[i for i, past in enumerate(pasts) if not past]] = 0
        with torch.inference_mode():
            batch.plan = self.context.attention.plan(batch, self.layers) if self.layers else None
            return list(self.model.logits(self.model.forward(batch)).split(lens))

    def logits(self, token_ids: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """Logits of all tokens of one sequence, computed in chunks of these lengths."""
        (table,) = block_tables([len(token_ids)])
        rows, past = [], 0
        for length in [len(token_ids)] if chunks is None else chunks:
            rows += self.step([past], [token_ids[past : past + length]], [table])
            past += length
        assert past == len(token_ids)
        return torch.cat(rows)


def allocate(context: ModelContext, num_blocks: int) -> None:
    """Give every attention layer its part of a KV cache."""
    for layer in context.attention_layers:
        form = context.attention.block_format(layer.kv_spec)
        layer.kv_cache = torch.zeros((num_blocks, *form.block_shape), dtype=form.dtype)
