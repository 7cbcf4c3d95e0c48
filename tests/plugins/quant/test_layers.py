"""Quantised layers in numbers: against float32 of the same values, whole and sharded, and how many bytes they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tests.helpers.interpreted import interpreted
from tests.helpers.models import make_quantised_context
from tests.helpers.quantised import CHECKPOINTS, ONLINE, Twins, checkpoint_twins, gguf_twins, online_twins
from tests.helpers.ranks import Rank
from torch import Tensor

import fwk_native as native
from fwk.errors import ConfigError, ModelLoadError
from fwk_layers import ColumnParallelLinear, LMHead, Part, QKVLinear, RowParallelLinear, VocabEmbedding
from fwk_quant._common import product
from fwk_quant._linear_cpu.kernel import PackedMatrix
from fwk_quant._linear_cpu.pages import SLAB

ATTENTION, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"


GGUF_TYPES = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"]
EVERY = [*CHECKPOINTS, *(f"online-{name}" for name in ONLINE), *(f"gguf-{name}" for name in GGUF_TYPES)]


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Twins]:
    """Checkpoints by name, made once. Their rows suit two ranks, and groups on two ranks in all but the K blocks."""
    made: dict[str, Twins] = {}

    def make(name: str) -> Twins:
        if name not in made:
            folder = tmp_path_factory.mktemp("twins") / "t"
            if name.startswith("online-"):
                made[name] = online_twins(name[7:], folder, hidden_size=128)
            elif name.startswith("gguf-"):
                made[name] = gguf_twins(name[5:], folder, hidden_size=512, intermediate_size=512, num_attention_heads=8)
            else:
                made[name] = checkpoint_twins(name, folder)
        return made[name]

    return make


def context(twins: Twins, **settings: Any) -> Any:
    options = {name: value for name, value in twins.options.items() if name == "quantization"}
    return make_quantised_context(twins.path, **{**options, **settings})


def plain(twins: Twins) -> dict[str, Tensor]:
    return load_file(twins.plain / "model.safetensors")


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def joined(weights: dict[str, Tensor], prefix: str, names: list[str]) -> Tensor:
    return torch.cat([weights[f"{prefix}.{name}_proj.weight"] for name in names])


def made_hidden(twins: Twins) -> int:
    return context(twins).config.hidden_size


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PRODUCTS = [(name, dtype) for name in EVERY for dtype in DTYPES if dtype == torch.float32 or "online" not in name]
"""In 16 bits, weights quantised while loading are rounded before: the next test."""


@pytest.mark.gate(10)
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize(("name", "dtype"), PRODUCTS)
def test_products_of_fused_layers(name: str, dtype: torch.dtype, num_tokens: int, twins: Any) -> None:
    """The same values in float32, within the rounding of dtype."""
    made = twins(name)
    layer_context = context(made, dtype=dtype)
    hidden = layer_context.config.hidden_size
    x = random(num_tokens, hidden, dtype=dtype)
    with torch.inference_mode():
        qkv = QKVLinear(layer_context, ATTENTION)(x)
        parts = [Part(f"{MLP}.{part}_proj", layer_context.config.intermediate_size) for part in ("gate", "up")]
        gate_up = ColumnParallelLinear(layer_context, parts, hidden)(x)
    weights = plain(made)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    for mine, wanted in (
        (qkv, F.linear(x.float(), joined(weights, ATTENTION, ["q", "k", "v"]))),
        (gate_up, F.linear(x.float(), joined(weights, MLP, ["gate", "up"]))),
    ):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.float(), wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.gate(3)
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("method", ONLINE)
def test_bfloat16_weights_quantised_while_loading(method: str, num_tokens: int, twins: Any) -> None:
    made = twins(f"online-{method}")
    x = random(num_tokens, 128, dtype=torch.bfloat16)
    with torch.inference_mode():
        mine = QKVLinear(context(made, dtype=torch.bfloat16), ATTENTION)(x)
    full = load_file(made.path / "model.safetensors")
    wanted = F.linear(x.float(), joined(full, ATTENTION, ["q", "k", "v"]))
    error = (mine.float() - wanted).norm() / wanted.norm()
    assert float(error) < {"int8": 0.012, "fp8": 0.04, "int4": 0.13, "fp4": 0.13}[method]


def rounding(name: str, activations: str) -> dict[str, dict[str, object]]:
    """Plugin options for what ``EVERY`` calls ``name``; empty where activations are never rounded."""
    method = "gguf" if name.startswith("gguf") else name.removeprefix("online-").split("-")[0]
    return {} if method == "fp8" else {f"quant.{method}": {f"{method}_activations": activations}}


@pytest.mark.gate(4)
@pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in EVERY if rounding(name, "8bit")])
def test_products_with_rounded_activations(name: str, dtype: torch.dtype, num_tokens: int, twins: Any) -> None:
    made = twins(name)
    layer_context = context(made, dtype=dtype, plugin_options=rounding(name, "8bit"))
    x = random(num_tokens, layer_context.config.hidden_size, dtype=dtype)
    layer, kept = (
        QKVLinear(one, ATTENTION)
        for one in (layer_context, context(made, dtype=dtype, plugin_options=rounding(name, "full")))
    )
    weights = layer.weights if isinstance(layer.weights, list) else [layer.weights]
    assert all(isinstance(matrix, PackedMatrix) for matrix in weights)
    mine, wanted = layer(x), kept(x)
    assert mine.dtype == dtype
    assert 0 < float((mine.float() - wanted.float()).norm() / wanted.float().norm()) < 0.012


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["online-int8", "online-int4", "gguf-Q8_0"])
def test_rounding_that_cannot_be_had_is_refused(name: str, twins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = twins(name)
    (flags,) = rounding(name, "8bit").values()
    flag = "--" + next(iter(flags)).replace("_", "-")
    with pytest.raises(
        ConfigError, match=f"{flag} 8bit is not possible: the native kernel does not compute in float16"
    ):
        QKVLinear(context(made, dtype=torch.float16, plugin_options=rounding(name, "8bit")), ATTENTION)
    monkeypatch.setattr(native.compiler, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=f"{flag} 8bit is not possible: .* finds no C.. compiler"):
        QKVLinear(context(made, plugin_options=rounding(name, "8bit")), ATTENTION)
    QKVLinear(context(made, dtype=torch.bfloat16), ATTENTION)(random(1, made_hidden(made), dtype=torch.bfloat16))


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", EVERY)
def test_bias_is_added_once(name: str, twins: Any) -> None:
    made = twins(name)
    layer_context = context(made)
    inner, hidden = layer_context.config.intermediate_size, layer_context.config.hidden_size
    bias, x = random(hidden), random(3, inner)
    source = layer_context.weights
    read, has = source.tensor, source.has
    source.tensor = lambda n, shape: bias if n == f"{MLP}.down_proj.bias" else read(n, shape)
    source.has = lambda n: n.endswith("down_proj.bias") or has(n)
    mine = RowParallelLinear(layer_context, f"{MLP}.down_proj", inner, hidden, bias=True)(x)
    torch.testing.assert_close(mine, F.linear(x, plain(made)[f"{MLP}.down_proj.weight"], bias), rtol=1e-5, atol=1e-4)


def test_parts_of_several_formats_get_their_own_piece_of_the_bias(twins: Any) -> None:
    made = twins("online-int8")
    mixed = context(made, quantization_layers=("*.k_proj=fp8", "*.v_proj=none"))
    layer = QKVLinear(mixed, ATTENTION)
    assert len(layer.pieces) == 3
    x, layer.bias = random(3, 128), random(sum(layer.out_features))
    with_bias, layer.bias, bias = layer(x), None, layer.bias
    torch.testing.assert_close(with_bias, layer(x) + bias)


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", EVERY)
def test_two_ranks_make_up_the_whole(name: str, twins: Any) -> None:
    made = twins(name)
    weights = plain(made)
    ranks = [context(made, tp=Rank(rank, 2)) for rank in range(2)]
    config = ranks[0].config
    hidden, inner = config.hidden_size, config.intermediate_size
    x, y = random(5, hidden), random(5, inner)
    layers = [QKVLinear(rank, ATTENTION) for rank in ranks]
    outputs = [layer(x).split(layer.out_features, -1) for layer in layers]
    for i, part in enumerate("qkv"):
        mine = torch.cat([output[i] for output in outputs], -1)
        torch.testing.assert_close(mine, F.linear(x, weights[f"{ATTENTION}.{part}_proj.weight"]), rtol=1e-5, atol=1e-4)
    for name, z, size in ((f"{MLP}.down_proj", y, inner), (f"{ATTENTION}.o_proj", x, hidden)):
        rows = [RowParallelLinear(rank, name, size, hidden) for rank in ranks]
        total = sum(row(part.contiguous()) for row, part in zip(rows, z.chunk(2, -1), strict=True))
        torch.testing.assert_close(total, F.linear(z, weights[f"{name}.weight"]), rtol=1e-5, atol=1e-4)


@pytest.mark.gate(1)
@pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("name", ["online-int8", "online-int4", "gguf-Q4_1"])
def test_two_ranks_round_activations_as_one_does(name: str, twins: Any) -> None:
    """Groups of 32 or 64 inputs lie on one rank: what ranks add up differs by float32's rounding alone.

    In 16 bits, for AMX, activations of a rank have one scale: there it differs by their rounding.
    """
    int16_activations = name == "online-int8" and native.has_tiles(native.isa())
    made, options = twins(name), rounding(name, "8bit")
    whole, *ranks = (
        context(made, tp=Rank(rank, size), plugin_options=options) for rank, size in ((0, 1), (0, 2), (1, 2))
    )
    hidden, inner = whole.config.hidden_size, whole.config.intermediate_size
    x, y = random(40, hidden), random(40, inner)
    layer, layers = QKVLinear(whole, ATTENTION), [QKVLinear(rank, ATTENTION) for rank in ranks]
    outputs = [one(x).split(one.out_features, -1) for one in layers]
    for i, part in enumerate(layer(x).split(layer.out_features, -1)):
        assert torch.equal(torch.cat([output[i] for output in outputs], -1), part)
    alone = RowParallelLinear(whole, f"{MLP}.down_proj", inner, hidden)
    rows = [RowParallelLinear(rank, f"{MLP}.down_proj", inner, hidden) for rank in ranks]
    total = sum(row(part.contiguous()) for row, part in zip(rows, y.chunk(2, -1), strict=True))
    torch.testing.assert_close(total, alone(y), rtol=1e-5, atol=5e-4 if int16_activations else 1e-4)


@pytest.mark.gate(2)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K"])
def test_embedding_and_tied_head_share_packed_rows(kind: str, size: int, tmp_path: Path) -> None:
    made = gguf_twins(
        kind, tmp_path, hidden_size=256, intermediate_size=256, num_hidden_layers=1, tie_word_embeddings=True
    )
    matrix = plain(made)["model.embed_tokens.weight"]
    ids, hidden = torch.tensor([0, 319, 5, 5, 160]), random(3, 256)
    ranks = [context(made, tp=Rank(rank, size)) for rank in range(size)]
    embeddings = [VocabEmbedding(rank, "model.embed_tokens") for rank in ranks]
    assert torch.equal(sum(embedding(ids) for embedding in embeddings), matrix[ids])
    heads = [LMHead(rank, "lm_head", embedding) for rank, embedding in zip(ranks, embeddings, strict=True)]
    assert all(head.weights is embedding.weights for head, embedding in zip(heads, embeddings, strict=True))
    logits = torch.cat([head.method.apply(head.weights, hidden, None) for head in heads], -1)[:, :320]
    torch.testing.assert_close(logits, F.linear(hidden, matrix), rtol=1e-5, atol=1e-4)


@pytest.mark.gate(1)
@pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [1, 3])
def test_plain_embedding_and_tied_head_are_one_copy(size: int, dtype: torch.dtype, tmp_path: Path) -> None:
    made = online_twins("int8", tmp_path, tie_word_embeddings=True)
    matrix = load_file(made.path / "model.safetensors")["model.embed_tokens.weight"].to(dtype)
    ids, hidden = torch.tensor([0, 319, 5, 5, 160]), random(3, matrix.shape[1], dtype=dtype)
    ranks = [context(made, tp=Rank(rank, size), quantization="none", dtype=dtype) for rank in range(size)]
    embeddings = [VocabEmbedding(rank, "model.embed_tokens") for rank in ranks]
    heads = [LMHead(rank, "lm_head", embedding) for rank, embedding in zip(ranks, embeddings, strict=True)]
    for head, embedding in zip(heads, embeddings, strict=True):
        assert embedding.matrix is None
        assert embedding.weights is head.weights
    assert torch.equal(sum(embedding(ids) for embedding in embeddings), matrix[ids])
    logits = torch.cat([head.method.apply(head.weights, hidden, None) for head in heads], -1)[:, :320]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(logits.float(), F.linear(hidden.float(), matrix.float()), rtol=tolerance, atol=tolerance)


@pytest.mark.gate(2)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("method", ONLINE)
def test_head_quantised_while_loading_is_sharded_over_the_vocabulary(method: str, size: int, twins: Any) -> None:
    made = twins(f"online-{method}")
    heads = [LMHead(context(made, tp=Rank(rank, size)), "lm_head") for rank in range(size)]
    x = random(2, 128)
    mine = torch.cat([head.method.apply(head.weights, x, None) for head in heads], -1)[:, :320]
    torch.testing.assert_close(mine, F.linear(x, plain(made)["lm_head.weight"]), rtol=1e-5, atol=1e-4)


def held(weights: Any) -> int:
    """Bytes of all tensors in what ``finish`` returned; of those in huge pages, which they share, their own."""
    if isinstance(weights, Tensor):
        whole = weights.untyped_storage().nbytes()
        return weights.nbytes if whole > SLAB else whole
    if isinstance(weights, (list, tuple)):
        return sum(held(item) for item in weights)
    names = getattr(type(weights), "__slots__", ())
    return sum(held(getattr(weights, name)) for name in names)


BYTES_PER_VALUE = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_1": 20 / 32}
BYTES_PER_VALUE |= {"Q5_0": 22 / 32, "Q4_K": 144 / 256, "Q5_K": 176 / 256, "Q6_K": 210 / 256}
BYTES_PER_VALUE |= {"Q2_K": 0.5 + 2 / 16 + 4 / 256, "Q3_K": 0.5 + 1 / 16 + 2 / 256}  # of the kernel's four bits
BYTES_PER_VALUE |= {"IQ4_NL": 34 / 32, "IQ4_XS": 1 + 1 / 32 + 2 / 256, "MXFP4": 5 / 8 + 4 / 32}
BYTES_PER_VALUE |= {"fp4": 6 / 8 + 4 / 16, "fp4-compressed-mx": 5 / 8 + 2 / 32}


@pytest.mark.gate(3)
@pytest.mark.parametrize("name", EVERY)
def test_weights_stay_packed(name: str, twins: Any) -> None:
    """Scales and zeros come on top: at most 16 bits each per 32 values, 0.125 bytes a value."""
    made = twins(name)
    layer_context = context(made, dtype=torch.bfloat16)
    inner, hidden = layer_context.config.intermediate_size, layer_context.config.hidden_size
    layer = RowParallelLinear(layer_context, f"{MLP}.down_proj", inner, hidden)
    layer(random(40, inner, dtype=torch.bfloat16))
    kind = name.removeprefix("online-").removeprefix("gguf-")
    least = BYTES_PER_VALUE[kind if name.startswith("gguf") or kind in BYTES_PER_VALUE else kind.split("-")[0]]
    room = 0.0 if name.startswith("gguf") else 0.13
    if "act-order" in name:
        room += 8 / hidden  # the group of each input
    if kind in ("Q4_K", "Q5_K"):
        room = 4 / 256  # its six-bit numbers have eight
    assert least <= held(layer.weights) / (inner * hidden) <= least + room


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", EVERY)
def test_few_rows_are_unpacked_at_a_time(name: str, twins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = twins(name)
    layer_context = context(made)
    hidden = layer_context.config.hidden_size
    layer = QKVLinear(layer_context, ATTENTION)
    layer.bias = random(sum(layer.out_features))
    x = random(9, hidden)
    whole = layer(x)
    sizes: list[tuple[int, ...]] = []
    linear = F.linear

    def counting(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.append(tuple(weight.shape))
        return linear(x, weight, bias)

    monkeypatch.setattr(product, "CHUNK_VALUES", 5 * hidden)
    monkeypatch.setattr(product.F, "linear", counting)
    torch.testing.assert_close(layer(x), whole, rtol=1e-5, atol=1e-5)
    assert max(sizes) <= (5, hidden)
    assert sum(rows for rows, _ in sizes) == whole.shape[1]


REFUSED_ON_FOUR = {
    "int4-gptq": (f"{MLP}.down_proj", 128, "groups of 32|blocks of", 8),
    "gguf-Q4_K": (f"{MLP}.down_proj", 512, "128 features on a rank are no whole number of the blocks of 256", 4),
    "gguf-Q8_0": (f"{MLP}.down_proj", 512, "16 features on a rank are no whole number of the blocks of 32", 32),
    "online-int4": (f"{MLP}.down_proj", 128, "32 features on a rank are no whole number of the blocks of 64", 4),
}


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", REFUSED_ON_FOUR)
def test_ranks_that_would_split_groups_are_refused(name: str, twins: Any) -> None:
    prefix, inner, message, size = REFUSED_ON_FOUR[name]
    layer_context = context(twins(name), tp=Rank(0, size))
    with pytest.raises(ModelLoadError, match=message):
        RowParallelLinear(layer_context, prefix, inner, layer_context.config.hidden_size)


def method_of(name: str) -> str:
    """Of what ``EVERY`` calls ``name``."""
    return name.removeprefix("online-").split("-")[0]


@pytest.mark.gate(2)
@interpreted
@pytest.mark.parametrize("num_tokens", [2, 70])
@pytest.mark.parametrize("name", [name for name in EVERY if method_of(name) in ("int4", "int8", "fp8")])
def test_products_in_triton(name: str, num_tokens: int, twins: Any) -> None:
    """Of every layout that the methods with packed numbers read, as torch multiplies them."""
    made, method = twins(name), method_of(name)
    mine, torchs = (
        QKVLinear(context(made, plugin_options={f"quant.{method}": {f"{method}_gemm_backend": backend}}), ATTENTION)
        for backend in ("triton", "torch")
    )
    x = random(num_tokens, made_hidden(made))
    torch.testing.assert_close(mine(x), torchs(x), rtol=1e-4, atol=1e-4)
