"""The ``torch`` backend below the engine: logits against peft, and sharded layers against whole ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.helpers.adapters import reference
from tests.helpers.lora_adapters import ADAPTERS
from tests.helpers.models import Tensors, allocate, make_context
from tests.helpers.ranks import Rank
from torch import Tensor

import fwk_native as native
from fwk.interfaces.lora import AdaptedBatch, LoRABackend, LoRAContext, LoRAMatrices, LoRAPart, LoRASourceContext
from fwk.interfaces.model import ModelContext
from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.quant import LinearShape, ParamSpec, QuantContext, QuantMethod
from fwk.plugins import discover, find, load_object
from fwk.types import ForwardBatch, ModelConfig
from fwk_kit.testing.batches import block_tables, make_batch
from fwk_layers import ColumnParallelLinear, GatedMLP, Part, QKVLinear, RowParallelLinear
from fwk_lora.feature import AdapterPlace
from fwk_lora.feature.worker import AdapterStore
from fwk_lora.local import LocalAdapterOptions
from fwk_lora.torch_lora.backend import TorchLoRA
from fwk_models.llama.model import Llama
from fwk_native.thread_pool import ThreadPool
from fwk_quant.int8 import Int8Options
from fwk_quant.int8.method import Int8Method

SLOTS = 4


def backend(dtype: torch.dtype = torch.float32, max_rank: int = 16) -> TorchLoRA:
    return TorchLoRA(LoRAContext(torch.device("cpu"), dtype, SLOTS, max_rank))


def context_of(folder: Path, tp: ParallelGroup | None = None, dtype: torch.dtype = torch.float32) -> ModelContext:
    config = ModelConfig.from_dict(json.loads((folder / "config.json").read_text()), "test")
    context = make_context(config, Tensors.of_folder(folder), tp=tp, dtype=dtype)
    context.lora = backend(dtype)
    return context


def store_of(lora: LoRABackend) -> AdapterStore:
    source = load_object(find(discover(), "lora_sources", "local"))
    return AdapterStore(lora, [source(LoRASourceContext(LocalAdapterOptions()))])


def place(store: AdapterStore, folder: Path, slot: int) -> None:
    """Load an adapter and put it into a slot, as a new sequence does."""
    answer = store.load(folder.name, str(folder))
    store.put(AdapterPlace(slot, str(answer["key"])))


def with_ids(batch: ForwardBatch, ids: Sequence[int]) -> AdaptedBatch:
    array = np.array(ids, np.int32)
    return AdaptedBatch.of(batch, torch.from_numpy(array), array)


@pytest.fixture(scope="module")
def model(folders: Path) -> tuple[ModelContext, Llama]:
    """The base model with every adapter in the slot of its place in ``ADAPTERS``."""
    context = context_of(folders / "base")
    with torch.inference_mode():
        llama = Llama(context)
    allocate(context, 64)
    store = store_of(context.lora)
    for slot, name in enumerate(ADAPTERS):
        place(store, folders / name, slot)
    return context, llama


def logits(model: tuple[ModelContext, Llama], prompts: list[list[int]], ids: list[int]) -> list[Tensor]:
    """Of all tokens of each prompt, each on the adapter in its slot (-1: none), all in one step."""
    context, llama = model
    lens = [len(p) for p in prompts]
    batch = make_batch([0] * len(prompts), lens, block_tables(lens), token_ids=prompts)
    batch = with_ids(batch, np.repeat(ids, lens).tolist())
    with torch.inference_mode():
        batch.plan = context.attention.plan(batch, context.attention_layers)
        context.lora.plan(batch)
        return list(llama.logits(llama.forward(batch)).split(lens))


PROMPTS = [list(range(3, 40)), [9], [300, 2, 7, 7], list(range(100, 117)), list(range(200, 206))]


@pytest.fixture(scope="module")
def expected(folders: Path) -> dict[str, list[Tensor]]:
    """Logits of PROMPTS by transformers, with and without each adapter, which peft applies without merging."""
    found: dict[str, list[Tensor]] = {}
    for name in ["", *ADAPTERS]:
        network = reference(folders / "base", folders / name if name else None)
        with torch.inference_mode():
            found[name] = [network(input_ids=torch.tensor([p])).logits[0] for p in PROMPTS]
    return found


def test_adapters_matter(expected: dict[str, list[Tensor]]) -> None:
    for name in ADAPTERS:
        for one, other in zip(expected[name], expected[""], strict=True):
            assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("name", ["", *ADAPTERS])
def test_logits_are_those_of_peft(model, expected, name: str) -> None:  # type: ignore[no-untyped-def]
    slot = list(ADAPTERS).index(name) if name else -1
    found = logits(model, PROMPTS, [slot] * len(PROMPTS))
    for one, other in zip(found, expected[name], strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("ids", [[0, 1, 2, 3, -1], [-1, 1, 0, 1, -1], [2, -1, 2, -1, 2], [3, 3, -1, -1, 1]])
def test_a_batch_of_mixed_adapters_is_each_alone(model, expected, ids: list[int]) -> None:  # type: ignore[no-untyped-def]
    """Tokens of one adapter stand together or apart; both ways are taken."""
    names = ["", *ADAPTERS]
    for i, one in enumerate(logits(model, PROMPTS, ids)):
        torch.testing.assert_close(one, expected[names[ids[i] + 1]][i], atol=1e-4, rtol=1e-4)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


@pytest.mark.gate(1)
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_their_share_of_an_adapter(folders: Path, size: int) -> None:
    """Column parallel: B is cut (whole heads, KV heads repeated); row parallel: A is, and the parts add up."""
    whole = context_of(folders / "base")
    ranks = [context_of(folders / "base", Rank(rank, size)) for rank in range(size)]
    x, inner = random(9, 64), random(9, 96)
    ids = [0, 0, -1, 1, 1, 1, 0, -1, 0]
    batch = with_ids(make_batch([0], [9], block_tables([9])), ids)

    def build(context: ModelContext) -> tuple[QKVLinear, RowParallelLinear, GatedMLP, RowParallelLinear]:
        prefix = "model.layers.1"
        layers = (
            QKVLinear(context, f"{prefix}.self_attn"),
            RowParallelLinear(context, f"{prefix}.self_attn.o_proj", 64, 64, num_units=4),
            GatedMLP(context, f"{prefix}.mlp"),
            RowParallelLinear(context, "model.layers.0.mlp.down_proj", 96, 64),
        )
        for part in ("q", "k", "v", "o"):  # layer 0's are not built here, but the adapters have them
            context.lora.register([lora_part(context, f"model.layers.0.self_attn.{part}_proj")])
        for part in ("gate", "up"):
            context.lora.register([lora_part(context, f"model.layers.0.mlp.{part}_proj")])
        store = store_of(context.lora)
        place(store, folders / "wide", 0)
        place(store, folders / "odd", 1)
        context.lora.plan(batch)
        return layers

    qkv, output, mlp, down = build(whole)
    parts = [build(context) for context in ranks]
    wanted = qkv(x).split(qkv.out_features, -1)
    for rank, (own, *_) in enumerate(parts):
        q, k, v = own(x).split(own.out_features, -1)
        heads = slice(16 * (rank * 2 // size), 16 * (rank * 2 // size) + k.shape[1])
        torch.testing.assert_close(q, wanted[0].chunk(size, -1)[rank])
        torch.testing.assert_close(k, wanted[1][:, heads])
        torch.testing.assert_close(v, wanted[2][:, heads])
    for i, (layer, features) in enumerate(((output, x), (mlp, None), (down, inner)), 1):
        if features is None:
            total, one = sum(own[i](x) for own in parts), layer(x)
        else:
            pieces = features.chunk(size, -1)
            total = sum(own[i](piece.contiguous()) for own, piece in zip(parts, pieces, strict=True))
            one = layer(features)
        torch.testing.assert_close(total, one, atol=1e-4, rtol=1e-4)


def lora_part(context: ModelContext, prefix: str) -> LoRAPart:
    rows, columns = context.weights.tensors[f"{prefix}.weight"].shape  # type: ignore[attr-defined]
    return LoRAPart(prefix, columns, rows, range(columns), range(rows))


class Coarse(QuantMethod):
    """Weights rounded to tenths: what a layer computes with is its format's business alone."""

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(0, 1, torch.float32)}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Tensor:
        return (loaded["weight"] * 10).round().to(torch.int8)

    def apply(self, weights: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weights.float() / 10, bias)


ROUNDED = pytest.param(
    Int8Method, marks=pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler"), id="int8"
)


@pytest.mark.parametrize("kind", [Coarse, ROUNDED])
def test_lora_goes_around_any_weight_format(kind: type[QuantMethod], folders: Path) -> None:
    """Adapters get the layer's inputs as they are, also where the format rounds them."""
    context = context_of(folders / "base")
    method = kind(QuantContext(context.device, context.dtype, {}, Int8Options(int8_activations="8bit"), ThreadPool()))
    part = Part("model.layers.0.self_attn.q_proj", 64)
    layer = ColumnParallelLinear(context, [part], 64, method=method)
    tensors = load_file(folders / "narrow/adapter_model.safetensors")
    a, b = (tensors[f"base_model.model.model.layers.0.self_attn.q_proj.lora_{x}.weight"] for x in "AB")
    packed = context.lora.pack(layer._lora_layer, [LoRAMatrices(a, b, 4.0)])
    context.lora.load(2, {0: packed})
    context.lora.plan(with_ids(make_batch([0], [3], block_tables([3])), [2, -1, 2]))
    x = random(3, 64)
    wanted = method.apply(layer.weights, x, None) + torch.tensor([[1.0], [0.0], [1.0]]) * 4.0 * (x @ a.T @ b.T)
    torch.testing.assert_close(layer(x), wanted, atol=1e-4, rtol=1e-4)


def test_layers_without_lora_are_untouched_by_it(folders: Path) -> None:
    context = context_of(folders / "base")
    context.lora = None
    layer = ColumnParallelLinear(context, [Part("model.layers.0.self_attn.q_proj", 64)], 64)
    assert layer._lora is None


def test_no_adapter_in_the_step_is_no_work(folders: Path) -> None:
    context = context_of(folders / "base")
    layer = ColumnParallelLinear(context, [Part("model.layers.0.self_attn.q_proj", 64)], 64)
    context.lora.plan(AdaptedBatch.of(make_batch([0], [3], block_tables([3]))))
    y = random(3, 64)
    assert context.lora.apply(y, None, layer._lora_layer) is y  # type: ignore[arg-type]


def test_bfloat16_is_near(folders: Path, expected) -> None:  # type: ignore[no-untyped-def]
    context = context_of(folders / "base", dtype=torch.bfloat16)
    with torch.inference_mode():
        llama = Llama(context)
    allocate(context, 64)
    place(store_of(context.lora), folders / "wide", 0)
    for one, other in zip(logits((context, llama), PROMPTS, [0] * 5), expected["wide"], strict=True):
        assert torch.nn.functional.cosine_similarity(one.float(), other, dim=-1).mean() > 0.99
