"""Linear layers: what they read, how they shard, and that the ranks' parts make up the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.helpers.models import Tensors, make_context
from tests.helpers.ranks import Rank
from torch import Tensor

from fwk.errors import ModelLoadError
from fwk.interfaces.model import ModelContext
from fwk.interfaces.quant import LinearShape, OneFormat, ParamSpec, QuantContext, QuantMethod
from fwk.types import ModelConfig
from fwk_layers import ColumnParallelLinear, GatedMLP, LMHead, Part, QKVLinear, RowParallelLinear, VocabEmbedding


def config(**changes: Any) -> ModelConfig:
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 33,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 6,
    }
    return ModelConfig.from_dict({**raw, **changes}, "test")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def ranks(tensors: dict[str, Tensor], size: int, **changes: Any) -> list[ModelContext]:
    return [make_context(config(**changes), Tensors(tensors), tp=Rank(rank, size)) for rank in range(size)]


def qkv_tensors(kv_heads: int = 2) -> dict[str, Tensor]:
    rows = {"q": 48, "k": 6 * kv_heads, "v": 6 * kv_heads}
    weights = {f"a.{name}_proj.weight": random(n, 24, seed=i) for i, (name, n) in enumerate(rows.items())}
    return weights | {f"a.{name}_proj.bias": random(n, seed=i) for i, (name, n) in enumerate(rows.items())}


def by_hand(tensors: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias"))


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
def test_qkv_ranks_hold_whole_heads(size: int, bias: bool) -> None:
    tensors = qkv_tensors()
    if not bias:
        tensors = {name: x for name, x in tensors.items() if "weight" in name}
    layers = [QKVLinear(context, "a", bias=bias) for context in ranks(tensors, size)]
    x = random(5, 24)
    outputs = [layer(x).split(layer.out_features, -1) for layer in layers]
    for i, name in enumerate(("q", "k", "v")):
        joined = torch.cat([parts[i] for parts in outputs], -1)
        torch.testing.assert_close(joined, by_hand(tensors, f"a.{name}_proj", x))
    assert (layers[0].num_heads, layers[0].num_kv_heads) == (8 // size, 2 // size)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_more_ranks_than_kv_heads_repeat_them(kv_heads: int) -> None:
    tensors = qkv_tensors(kv_heads)
    x = random(3, 24)
    whole = by_hand(tensors, "a.k_proj", x).view(3, kv_heads, 6)
    for rank, context in enumerate(ranks(tensors, 4, num_key_value_heads=kv_heads)):
        layer = QKVLinear(context, "a", bias=True)
        assert (layer.num_heads, layer.num_kv_heads) == (2, 1)
        _, k, _ = layer(x).split(layer.out_features, -1)
        # Query heads 2 * rank and 2 * rank + 1 belong to this KV head.
        torch.testing.assert_close(k, whole[:, 2 * rank * kv_heads // 8])


@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_parts_add_up(bias: bool) -> None:
    tensors = {"o.weight": random(24, 48)} | ({"o.bias": random(24)} if bias else {})
    x = random(4, 48)
    layers = [RowParallelLinear(context, "o", 48, 24, num_units=8, bias=bias) for context in ranks(tensors, 2)]
    total = sum(layer(part.contiguous()) for layer, part in zip(layers, x.chunk(2, -1), strict=True))
    torch.testing.assert_close(total, by_hand(tensors, "o", x))


def test_row_parallel_asks_for_the_sum() -> None:
    class Doubling(Rank):
        def all_reduce(self, x: Tensor) -> Tensor:
            return x * 2

    tensors = {"o.weight": random(24, 48)}
    context = make_context(config(), Tensors(tensors), tp=Doubling(0, 1))
    x = random(4, 48)
    torch.testing.assert_close(RowParallelLinear(context, "o", 48, 24)(x), by_hand(tensors, "o", x) * 2)


def test_gated_mlp_shards() -> None:
    tensors = {
        "m.gate_proj.weight": random(40, 24, seed=1),
        "m.up_proj.weight": random(40, 24, seed=2),
        "m.down_proj.weight": random(24, 40, seed=3),
    }
    x = random(5, 24)
    wanted = F.linear(
        F.silu(by_hand(tensors, "m.gate_proj", x)) * by_hand(tensors, "m.up_proj", x), tensors["m.down_proj.weight"]
    )
    for size in (1, 2, 4):
        total = sum(GatedMLP(context, "m")(x) for context in ranks(tensors, size))
        torch.testing.assert_close(total, wanted, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_vocabulary_that_does_not_divide_is_padded(size: int) -> None:
    tensors = {"e.weight": random(33, 24, seed=1), "h.weight": random(33, 24, seed=2)}
    token_ids = torch.tensor([0, 5, 16, 17, 32, 32])
    x = random(3, 24)
    contexts = ranks(tensors, size)
    embeddings = [VocabEmbedding(context, "e") for context in contexts]
    torch.testing.assert_close(sum(e(token_ids) for e in embeddings), tensors["e.weight"][token_ids])

    def joined(heads: list[LMHead]) -> Tensor:
        rows = [head.method.apply(head.weights, x, None) for head in heads]
        assert {y.shape[-1] for y in rows} == {-(-33 // size)}
        return torch.cat(rows, -1)[:, :33]

    own = [LMHead(context, "h") for context in contexts]
    torch.testing.assert_close(joined(own), by_hand(tensors, "h", x))
    another = [LMHead(context, "h", e) for context, e in zip(contexts, embeddings, strict=True)]
    torch.testing.assert_close(joined(another), by_hand(tensors, "h", x))
    tied = [LMHead(context, "none", e) for context, e in zip(contexts, embeddings, strict=True)]
    torch.testing.assert_close(joined(tied), by_hand(tensors, "e", x))


def test_a_rank_past_the_vocabulary_holds_padding_alone() -> None:
    heads = [LMHead(rank, "h") for rank in ranks({"h.weight": random(1, 24)}, 2, vocab_size=1)]
    first, second = (head.method.apply(head.weights, random(3, 24), None) for head in heads)
    assert first.all()
    assert not second.any()


def test_lm_head_gathers_and_trims() -> None:
    class Gathering(Rank):
        def all_gather(self, x: Tensor, dim: int) -> Tensor:
            return torch.cat((x, x), dim)

    context = make_context(config(), Tensors({"h.weight": random(33, 24)}), tp=Gathering(0, 2))
    assert LMHead(context, "h")(random(2, 24)).shape == (2, 33)


class Greedy(QuantMethod):
    """Has other weights for an LM head, of zeros."""

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {"weight": ParamSpec(output_dim=0, input_dim=1, dtype=shape.dtype)}

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Tensor:
        return loaded["weight"]

    def apply(self, weights: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weights, bias)

    def lm_head(self, weights: Tensor, is_greedy: Tensor) -> Tensor:
        return torch.zeros_like(weights)


@pytest.mark.parametrize(
    ("size", "is_final", "is_told", "leaves_out"),
    [(1, True, True, True), (1, False, True, False), (2, True, True, False), (1, True, False, False)],
)
def test_only_a_whole_head_at_the_end_may_leave_logits_out(
    size: int, is_final: bool, is_told: bool, leaves_out: bool
) -> None:
    (context, *_) = ranks({"h.weight": random(33, 24)}, size)
    context.is_greedy = torch.zeros(1, dtype=torch.int64) if is_told else None
    context.quant = OneFormat(Greedy(QuantContext(context.device, context.dtype, {})))
    logits = LMHead(context, "h", is_final=is_final)(random(2, 24))
    assert bool((logits == 0).all()) == leaves_out


@pytest.mark.parametrize(
    ("size", "build", "message"),
    [
        (3, lambda context: QKVLinear(context, "a"), "a.q_proj: 8 heads cannot be shared by 3 ranks"),
        (8, lambda context: QKVLinear(context, "a"), "a.k_proj: 3 heads cannot be shared by 8 ranks"),
        (7, lambda context: GatedMLP(context, "a"), "a.gate_proj: 40 features cannot be shared by 7 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(size: int, build: Any, message: str) -> None:
    heads = {"num_attention_heads": 24, "num_key_value_heads": 3} if "k_proj" in message else {}
    context = make_context(config(**heads), Tensors({}), tp=Rank(0, size))
    with pytest.raises(ModelLoadError, match=f"{message}.*--tensor-parallel-size"):
        build(context)


class Grouped(QuantMethod):
    """A format with a scale per 4 inputs, one per part and an optional order: records what it is given."""

    def params(self, shape: LinearShape) -> Mapping[str, ParamSpec]:
        return {
            "packed": ParamSpec(1, 0, torch.int32, output_block=2),
            "scales": ParamSpec(0, 1, torch.float32, input_block=4),
            "scale": ParamSpec(None, None, torch.float32),
            "order": ParamSpec(None, 0, torch.int32, is_optional=True),
        }

    def finish(self, loaded: Mapping[str, Tensor], shape: LinearShape) -> Mapping[str, Tensor]:
        return dict(loaded)

    def apply(self, weights: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        raise NotImplementedError


def test_packed_formats_shard_and_join_by_their_own_shape() -> None:
    tensors = {
        f"{p}.{name}": random(*shape, seed=i).mul_(100).to(dtype)
        for i, p in enumerate(("g", "u"))
        for name, shape, dtype in (
            ("packed", (24, 20), torch.int32),
            ("scales", (40, 6), torch.float32),
            ("scale", (), torch.float32),
        )
    }
    parts = [Part("g", 40), Part("u", 40)]
    for rank, context in enumerate(ranks(tensors, 2)):
        context.quant = OneFormat(Grouped(context.plain.context), "grouped")
        loaded = ColumnParallelLinear(context, parts, 24).weights
        half = slice(10 * rank, 10 * rank + 10)
        assert torch.equal(loaded["packed"], torch.cat((tensors["g.packed"][:, half], tensors["u.packed"][:, half]), 1))
        assert loaded["scales"].shape == (40, 6)
        assert torch.equal(loaded["scale"], torch.stack((tensors["g.scale"], tensors["u.scale"])))
        assert "order" not in loaded
        row = RowParallelLinear(context, "g", 24, 40).weights
        assert torch.equal(row["scales"], tensors["g.scales"][:, 3 * rank : 3 * rank + 3])
        assert torch.equal(row["packed"], tensors["g.packed"][12 * rank : 12 * rank + 12])
    tensors["g.order"] = torch.arange(24, dtype=torch.int32)
    context = ranks(tensors, 1)[0]
    context.quant = OneFormat(Grouped(context.plain.context), "grouped")
    with pytest.raises(ModelLoadError, match="'order' is there for some parts of g's fused layer, not for all"):
        ColumnParallelLinear(context, parts, 24)
