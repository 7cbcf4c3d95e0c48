"""Experts by one native operator, in every packed format: against the same linear layers one after another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.models import make_quantised_context
from tests.helpers.quantised import checkpoint_twins, gguf_twins, online_twins
from torch import Tensor

import fwk
import fwk_native as native
from fwk.errors import ModelLoadError
from fwk.interfaces.moe import ExpertWeights, MoEContext
from fwk_layers import ColumnParallelLinear, Part, RowParallelLinear
from fwk_moe._common.loop import LayerLoop
from fwk_moe.cpu.runner import CpuRunner
from fwk_native.thread_pool import ThreadPool
from fwk_quant._linear_cpu.kernel import FloatKernel, LinearCall

NUM_EXPERTS, TOP_K = 4, 2
WIDE: dict[str, Any] = {
    "num_hidden_layers": NUM_EXPERTS,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_attention_heads": 8,
}
"""So that a matrix has slices, of which the last is smaller."""


class LayersAsExperts(ExpertWeights):
    """The feed-forward networks of a model's layers."""

    def __init__(self, context: Any) -> None:
        self.hidden, self.inner = context.config.hidden_size, context.config.intermediate_size
        self.made = [self._make(context, f"model.layers.{index}.mlp") for index in range(NUM_EXPERTS)]

    def _make(self, context: Any, prefix: str) -> tuple[ColumnParallelLinear, RowParallelLinear]:
        parts = [Part(f"{prefix}.{name}_proj", self.inner) for name in ("gate", "up")]
        gate_up = ColumnParallelLinear(context, parts, self.hidden)
        down = RowParallelLinear(context, f"{prefix}.down_proj", self.inner, self.hidden)
        for seed, layer in enumerate((gate_up, down)):
            random = torch.Generator().manual_seed(seed)
            layer.bias = torch.randn(sum(layer.out_features), generator=random).to(context.dtype)
        return gate_up, down

    def layers(self, expert: int):  # type: ignore[no-untyped-def]
        return self.made[expert]

    def native(self, layer: Any, num_slices: int):  # type: ignore[no-untyped-def]
        return layer.native(num_slices)

    def stacked(self) -> tuple[Tensor, Tensor]:
        raise NotImplementedError


def moe_context(experts: LayersAsExperts, dtype: torch.dtype, threads: int, activation: str = "silu") -> MoEContext:
    return MoEContext(
        *(NUM_EXPERTS, TOP_K, experts.hidden, experts.inner, activation, dtype, torch.device("cpu")),
        threads=ThreadPool(threads),
    )


def routed(num_tokens: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, hidden, generator=random).to(dtype)
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=random).argsort(-1)[:, :TOP_K]
    return x, ids, torch.rand(num_tokens, TOP_K, generator=random)


def made(name: str, folder: Path) -> Any:
    kind, _, rest = name.partition("-")
    if kind == "gguf":
        return gguf_twins(rest, folder / "t", **WIDE)
    return online_twins(rest, folder / "t", **WIDE) if kind == "online" else checkpoint_twins(rest, folder / "t")


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in found:
            found[name] = made(name, tmp_path_factory.mktemp("t"))
        return found[name]

    return get


FORMATS = [
    ("online-int8", {"quantization": "none"}),
    ("online-int8", {"quantization": "none", "shorten": False}),
    ("online-int8", {"quantization": "int8"}),
    ("online-int4", {"quantization": "int4"}),
    ("online-fp4", {"quantization": "fp4"}),
    *((f"gguf-{kind}", {"quantization": "gguf"}) for kind in ("Q8_0", "Q5_0", "Q4_1", "Q6_K", "Q4_K")),
]
CASES = [
    (name, options, dtype)
    for name, options in FORMATS
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.bfloat16 or options == {"quantization": "none"}
]


@pytest.mark.gate(4)
@pytest.mark.parametrize(("name", "options", "dtype"), CASES)
def test_equals_the_layers_one_after_another(
    name: str, options: dict[str, Any], dtype: torch.dtype, twins: Any, caplog: pytest.LogCaptureFixture
) -> None:
    options = dict(options)
    own = {"none": {"shorten_weights": options.pop("shorten", True)}}
    experts = LayersAsExperts(make_quantised_context(twins(name).path, dtype=dtype, plugin_options=own, **options))
    loop = LayerLoop(moe_context(experts, dtype, 1), experts.made)
    with torch.inference_mode():
        for threads in (1, 2, 5):
            runner = CpuRunner(moe_context(experts, dtype, threads))
            runner.load(experts)
            assert not caplog.records, "the operator was to compute this format"
            for num_tokens in (1, 3, 40, 200):
                x, ids, weights = routed(num_tokens, experts.hidden, dtype)
                out, wanted = runner.apply(x, ids, weights), loop.apply(x, ids, weights)
                tolerance = 1e-5 if dtype == torch.float32 else 2e-2  # the loop rounds each expert's part, too
                torch.testing.assert_close(out, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))
                for row in (0, num_tokens // 2):
                    one = slice(row, row + 1)
                    assert torch.equal(runner.apply(x[one], ids[one], weights[one]), out[one]), "differs in a batch"


@pytest.mark.parametrize("num_tokens", [1, 3, 200])
def test_experts_of_other_ranks_are_left_out(num_tokens: int, twins: Any) -> None:
    """Ids around its own, against the loop on single pairs of token and expert."""
    experts = LayersAsExperts(make_quantised_context(twins("online-int8").path, quantization="none"))
    context = replace(moe_context(experts, torch.float32, 2), ep_size=3)
    runner, loop = CpuRunner(context), LayerLoop(context, experts.made)
    runner.load(experts)
    random = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, experts.hidden, generator=random)
    ids = torch.rand(num_tokens, 3 * NUM_EXPERTS, generator=random).argsort(-1)[:, :TOP_K] - NUM_EXPERTS
    weights, wanted = torch.rand(num_tokens, TOP_K, generator=random), torch.zeros_like(x)
    for token in range(num_tokens):
        for k in range(TOP_K):
            if 0 <= ids[token, k] < NUM_EXPERTS:
                one = ids[token, k].view(1, 1), weights[token, k].view(1, 1)
                wanted[token] += loop.apply(x[token : token + 1], *one)[0]
    is_elsewhere = ((ids < 0) | (ids >= NUM_EXPERTS)).all(-1)
    x[is_elsewhere] = torch.nan
    out = runner.apply(x, ids, weights)
    assert not out[is_elsewhere].any()
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5 * max(float(wanted.abs().max()), 1.0))


@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "clamped_swiglu"])
def test_activations(activation: str, twins: Any) -> None:
    experts = LayersAsExperts(make_quantised_context(twins("online-int8").path, quantization="none"))
    runner = CpuRunner(moe_context(experts, torch.float32, 2, activation))
    runner.load(experts)
    x, ids, weights = routed(9, experts.hidden, torch.float32)
    x = x * 8  # past the limits of the clamped one
    wanted = LayerLoop(moe_context(experts, torch.float32, 1, activation), experts.made).apply(x, ids, weights)
    atol = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(runner.apply(x, ids, weights), wanted, rtol=1e-5, atol=atol)


def test_a_format_without_a_kernel_says_so(twins: Any, caplog: pytest.LogCaptureFixture) -> None:
    experts = LayersAsExperts(make_quantised_context(twins("online-int8").path, quantization="fp8"))
    runner = CpuRunner(moe_context(experts, torch.float32, 1))
    runner.load(experts)
    assert "experts run one after another, more slowly" in caplog.text
    given = routed(5, experts.hidden, torch.float32)
    wanted = LayerLoop(moe_context(experts, torch.float32, 1), experts.made).apply(*given)
    assert torch.equal(runner.apply(*given), wanted)


def test_an_activation_that_is_not_known_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", hidden_act="relu2")
    with pytest.raises(ModelLoadError, match=r"'relu2' is not among those the cpu MoE runner computes.*backend torch"):
        fwk.LLM(str(tmp_path))


@pytest.mark.gate(2)
@pytest.mark.parametrize("instructions", native.testable_isas())
def test_slices_of_a_matrix_with_rare_weights(instructions: str) -> None:
    """Some weights far below the others of their outputs, which 12 bits do not hold, in every panel."""
    threads = ThreadPool(1)
    kernel = FloatKernel(threads, instructions)
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(1000, 512, generator=random)
    weight[torch.rand(weight.shape, generator=random) < 1e-3] *= 2.0**-40
    matrix = kernel.pack(weight.bfloat16())
    x = torch.randn(3, 512, generator=random).bfloat16()
    wanted, out = kernel.apply(matrix, x, None), torch.empty(3, 1000, dtype=torch.bfloat16)
    slices = kernel.slices(matrix, 3)
    assert [part.first for part in slices] == [0, 352, 704]
    for part in slices:
        scratch = torch.empty(16 * part.row_bytes, dtype=torch.uint8)
        to = out.data_ptr() + part.first * 2
        call = LinearCall(part.matrix, x.data_ptr(), to, None, scratch.data_ptr(), 3, 512, 1000, 1)
        threads.run(part.operator, call)
    assert torch.equal(out, wanted)
