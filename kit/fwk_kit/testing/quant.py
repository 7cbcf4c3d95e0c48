"""What every weight format must do."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fwk.interfaces.parallel import ParallelGroup
from fwk.interfaces.quant import PLAIN, LinearShape, OneFormat, QuantContext, QuantizerSpec, QuantMethod
from fwk.plugins import Registered
from fwk_kit.testing.base import PluginSuite
from fwk_kit.testing.serving import TINY, tokens_of
from fwk_kit.testing.weights import SMALL, Tensors, layer_context
from fwk_layers import ColumnParallelLinear, Part, RowParallelLinear, VocabEmbedding
from fwk_native.thread_pool import ThreadPool

HIDDEN, INNER, VOCAB = (int(SMALL[name]) for name in ("hidden_size", "intermediate_size", "vocab_size"))
GATE, UP, DOWN, EMBED = "m.gate_proj", "m.up_proj", "m.down_proj", "m.embed_tokens"
SHAPES = {GATE: (INNER, HIDDEN), UP: (INNER, HIDDEN), DOWN: (HIDDEN, INNER), EMBED: (VOCAB, HIDDEN)}


class _Rank(ParallelGroup):
    """One of two ranks; the suite puts their parts together itself."""

    def __init__(self, rank: int) -> None:
        self.rank, self.size = rank, 2

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        return x


def random(*shape: int, seed: int = 0) -> Tensor:
    """Numbers as weights have them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


class QuantizerSuite(PluginSuite):
    """Layers of the format against float32 of the same weights: whole, fused and on two ranks.

    max_error: how far products may be off, as a share of their norm; None: not at all for a format that keeps its
        numbers, else a quarter.
    """

    family = "quant"
    interface = QuantMethod
    max_error: ClassVar[float | None] = None

    def packed(self, layout: str, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        """How a checkpoint of ``layout`` holds ``weight`` [out, in]: tensors by name after the prefix, their numbers.

        Override it for every layout alongside ``plain``; what it answers None for is skipped.
        """
        return ({"weight": weight}, weight) if layout == PLAIN else None

    def method(self, item: Registered) -> QuantMethod:
        """The method under test, on the CPU in float32."""
        return self.make(item, QuantContext(torch.device("cpu"), torch.float32, {}, self.given(item), ThreadPool()))

    def layouts(self, item: Registered) -> list[str]:
        """Those of the declaration that ``packed`` can make."""
        assert isinstance(item.declaration, QuantizerSpec)
        found = [x for x in item.declaration.layouts if self.packed(x, GATE, random(INNER, HIDDEN)) is not None]
        if not found:
            pytest.skip(f"{item.name} reads {', '.join(item.declaration.layouts)}: override packed() to make one")
        return found

    def checkpoint(self, item: Registered, layout: str, seed: int = 0) -> tuple[Tensors, dict[str, Tensor]]:
        """Weights in a layout, and the numbers they stand for."""
        tensors: dict[str, Tensor] = {}
        numbers: dict[str, Tensor] = {}
        for prefix, shape in SHAPES.items():
            made = self.packed(layout, prefix, random(*shape, seed=seed))
            assert made is not None
            tensors |= {f"{prefix}.{name}": tensor for name, tensor in made[0].items()}
            numbers[prefix] = made[1]
        return Tensors(tensors, layout), numbers

    def context(self, item: Registered, layout: str, weights: Tensors, tp: ParallelGroup | None = None) -> Any:
        """What layers in this format are built with."""
        return layer_context(weights, OneFormat(self.method(item), layout), tp=tp)

    def bound(self, item: Registered, layout: str) -> float:
        """The error allowed in products of weights in this layout."""
        if self.max_error is not None:
            return self.max_error
        assert isinstance(item.declaration, QuantizerSpec)
        return 1e-5 if layout in item.declaration.exact else 0.25

    def close(self, item: Registered, layout: str, mine: Tensor, wanted: Tensor) -> None:
        """Compare by the norm of the difference."""
        assert mine.shape == wanted.shape
        assert mine.dtype == torch.float32
        error = float((mine - wanted).norm() / wanted.norm().clamp(min=1e-30))
        assert error <= self.bound(item, layout), f"{layout}: off by {error:.2g} of the norm"

    def exercise(self, item: Registered) -> None:
        self.test_products(item)

    def fused(self, context: Any) -> ColumnParallelLinear:
        """Two parts that stand side by side."""
        return ColumnParallelLinear(context, [Part(GATE, INNER), Part(UP, INNER)], HIDDEN)

    def test_products(self, item: Registered) -> None:
        """Fused and single layers, for one token and for many."""
        for layout in self.layouts(item):
            weights, numbers = self.checkpoint(item, layout)
            context = self.context(item, layout, weights)
            fused, down = self.fused(context), RowParallelLinear(context, DOWN, INNER, HIDDEN)
            both = torch.cat([numbers[GATE], numbers[UP]])
            for num_tokens in (1, 5, 40):
                x, y = random(num_tokens, HIDDEN), random(num_tokens, INNER)
                before = x.clone()
                with torch.inference_mode():
                    self.close(item, layout, fused(x), F.linear(x, both))
                    self.close(item, layout, down(y), F.linear(y, numbers[DOWN]))
                assert torch.equal(x, before), "apply() changed its input"

    def test_no_tokens(self, item: Registered) -> None:
        layout = self.layouts(item)[0]
        context = self.context(item, layout, self.checkpoint(item, layout)[0])
        assert self.fused(context)(torch.zeros(0, HIDDEN)).shape == (0, 2 * INNER)

    def test_a_token_gets_the_same_beside_others(self, item: Registered) -> None:
        layout = self.layouts(item)[0]
        fused = self.fused(self.context(item, layout, self.checkpoint(item, layout)[0]))
        x = random(33, HIDDEN)
        with torch.inference_mode():
            together, alone = fused(x), torch.cat([fused(x[i : i + 1]) for i in range(33)])
        torch.testing.assert_close(alone, together, atol=1e-3, rtol=1e-4)

    def test_bias_is_added_once(self, item: Registered) -> None:
        layout = self.layouts(item)[0]
        fused = self.fused(self.context(item, layout, self.checkpoint(item, layout)[0]))
        x, bias = random(3, HIDDEN), random(2 * INNER)
        with torch.inference_mode():
            without = fused(x)
            fused.bias = bias
            torch.testing.assert_close(fused(x), without + bias, atol=1e-4, rtol=1e-4)

    def test_two_ranks_make_up_the_whole(self, item: Registered) -> None:
        for layout in self.layouts(item):
            weights, numbers = self.checkpoint(item, layout)
            contexts = [self.context(item, layout, weights, _Rank(rank)) for rank in range(2)]
            x, y = random(5, HIDDEN), random(5, INNER)
            with torch.inference_mode():
                parts = [self.fused(context)(x).chunk(2, -1) for context in contexts]
                mine = torch.cat([torch.cat([part[i] for part in parts], -1) for i in range(2)], -1)
                self.close(item, layout, mine, F.linear(x, torch.cat([numbers[GATE], numbers[UP]])))
                rows = [RowParallelLinear(context, DOWN, INNER, HIDDEN) for context in contexts]
                total = sum(row(z.contiguous()) for row, z in zip(rows, y.chunk(2, -1), strict=True))
                assert isinstance(total, Tensor)
                self.close(item, layout, total, F.linear(y, numbers[DOWN]))

    def test_encoding_makes_what_params_says(self, item: Registered) -> None:
        assert isinstance(item.declaration, QuantizerSpec)
        if PLAIN not in item.declaration.layouts:
            pytest.skip(f"{item.name} quantises nothing while loading: plain is not among its layouts")
        method = self.method(item)
        shape = LinearShape(HIDDEN, (INNER,), torch.float32, torch.device("cpu"), GATE)
        made = method.encode(random(INNER, HIDDEN), GATE)
        for name, spec in method.params(shape).items():
            if name in made or not spec.is_optional:
                assert tuple(made[name].shape) == spec.shape(INNER, HIDDEN), name
                assert made[name].dtype == spec.dtype, name
        assert set(made) <= set(method.params(shape)), "encode() makes tensors params() does not name"
        halves = self.make(item, QuantContext(torch.device("cpu"), torch.bfloat16, {}, self.given(item), ThreadPool()))
        if halves.encodes_from is not None:
            weight = random(INNER, HIDDEN)
            rounded = halves.encode(weight.to(halves.encodes_from), GATE)
            for name, wanted in halves.encode(weight, GATE).items():
                assert torch.equal(rounded[name], wanted), f"encode() does not round {name} to encodes_from first"

    def test_rows_of_an_embedding(self, item: Registered) -> None:
        method = self.method(item)
        if not method.can_embed:
            with pytest.raises(NotImplementedError):
                method.rows(None, torch.zeros(1, dtype=torch.int64))
            return
        for layout in self.layouts(item):
            weights, numbers = self.checkpoint(item, layout)
            ids = torch.tensor([0, VOCAB - 1, 5, 5, 160])
            embedding = VocabEmbedding(self.context(item, layout, weights), EMBED)
            self.close(item, layout, embedding(ids), numbers[EMBED][ids])

    def test_an_lm_head_of_greedy_steps_has_the_largest(self, item: Registered) -> None:
        method, layout = self.method(item), self.layouts(item)[0]
        context = layer_context(self.checkpoint(item, layout)[0], OneFormat(method, layout))
        weights, is_greedy = RowParallelLinear(context, DOWN, INNER, HIDDEN).weights, torch.zeros(1, dtype=torch.int64)
        head = method.lm_head(weights, is_greedy)
        if head is weights:
            return
        for num_rows in (0, 1, 2, 3, 4, 5, 9, 33):
            x = random(num_rows, INNER)
            with torch.inference_mode():
                whole = method.apply(weights, x, None)
                is_greedy.fill_(0)
                assert torch.equal(method.apply(head, x, None), whole)
                is_greedy.fill_(1)
                found = method.apply(head, x, None)
            assert torch.equal(found.where(found != -torch.inf, whole), whole)
            is_largest = whole == whole.amax(-1, keepdim=True)
            assert torch.equal(found[is_largest], whole[is_largest])

    def test_two_models_have_weights_of_their_own(self, item: Registered) -> None:
        layout = self.layouts(item)[0]
        made = [self.checkpoint(item, layout, seed) for seed in (0, 99)]
        layers = [self.fused(self.context(item, layout, weights)) for weights, _ in made]
        x = random(4, HIDDEN)
        for layer, (_, numbers) in zip(layers, made, strict=True):
            with torch.inference_mode():
                self.close(item, layout, layer(x), F.linear(x, torch.cat([numbers[GATE], numbers[UP]])))

    def test_serves_a_tiny_model(self, item: Registered) -> None:
        self.skip_where_refused(item)
        assert isinstance(item.declaration, QuantizerSpec)
        if self.declaration is not None or PLAIN not in item.declaration.layouts:
            pytest.skip("weights of the tiny model are plain: set served_request, and override served_model()")
        tokens_of(TINY, item.package, quantization=item.name, **self.serve_with)
