"""Products of e4m3 activations and weights, against float64 of the numbers that e4m3 has by its definition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.interpreted import interpreted
from tests.helpers.models import make_quantised_context
from tests.helpers.quantised import checkpoint_twins, e4m3, online_twins
from torch import Tensor

from fwk.errors import ConfigError
from fwk.interfaces.quant import RoundedRows
from fwk_layers import ColumnParallelLinear, Part
from fwk_quant.fp8 import scaled

LEVELS = e4m3(np.arange(127, dtype=np.uint8)).astype(np.float64)
PREFIX = "model.layers.0.mlp"
WHY_NOT = scaled.why_not(128, 128, is_block=False, dtype=torch.bfloat16, device=torch.device("cpu"))
"""Of torch 2.11, in which a GPU machine's environment is tried."""


def rounded(x: np.ndarray, group: int | None = None, scale: float | None = None) -> np.ndarray:
    """x [n, columns] as e4m3 numbers times their scales, in float64."""
    groups = x.reshape(len(x), -1, group or x.shape[1]).astype(np.float32)
    scales = np.abs(groups).max(-1, keepdims=True) / np.float32(448) if scale is None else np.float32(scale)
    scales = np.maximum(scales, np.float32(1e-12))
    numbers = groups / scales
    size = np.abs(numbers)
    right = np.clip(np.searchsorted(LEVELS, size), 1, len(LEVELS) - 1)
    down, up = size - LEVELS[right - 1], LEVELS[right] - size
    is_lower = (down < up) | ((down == up) & (right % 2 == 1))  # of a tie's two, the one with the last bit clear
    nearest = np.sign(numbers) * np.where(is_lower, LEVELS[right - 1], LEVELS[right])
    return (nearest * scales).reshape(x.shape)


def gate_up(path: Path, dtype: torch.dtype, **options: Any) -> tuple[Any, ColumnParallelLinear]:
    if WHY_NOT is not None:
        pytest.skip(f"the scaled product {WHY_NOT}")
    context = make_quantised_context(
        path, dtype=dtype, plugin_options={"quant.fp8": {"fp8_activations": "8bit", **options}}, quantization="fp8"
    )
    parts = [Part(f"{PREFIX}.{name}_proj", context.config.intermediate_size) for name in ("gate", "up")]
    return context, ColumnParallelLinear(context, parts, context.config.hidden_size)


def activations(columns: int, dtype: torch.dtype) -> Tensor:
    """Tokens of different sizes, one of zeros, and inside each some numbers far larger than others."""
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(1))
    x *= torch.logspace(-3, 2, 9)[:, None]
    x[:, ::37] *= 20
    x[4] = 0
    return x.to(dtype)


CASES = {
    "fp8-block": 128,
    "fp8-compressed-block": 128,
    "fp8-compressed-channel": None,
    "fp8-compressed-tensor": None,
    "online-fp8": None,
}


@pytest.mark.gate(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_products(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    twins = online_twins("fp8", tmp_path) if name == "online-fp8" else checkpoint_twins(name, tmp_path)
    context, layer = gate_up(twins.path, dtype)
    assert layer.weights.rounds_input
    plain = load_file(twins.plain / "model.safetensors")
    weight = torch.cat([plain[f"{PREFIX}.{part}_proj.weight"] for part in ("gate", "up")]).double()
    x = activations(context.config.hidden_size, dtype)
    before = x.clone()
    with torch.inference_mode():
        mine, none, bias = layer(x), layer(x[:0]), torch.ones(len(weight), dtype=dtype)
        layer.bias = bias
        torch.testing.assert_close(layer(x), mine + bias)
    wanted = torch.from_numpy(rounded(x.float().numpy(), CASES[name])) @ weight.T
    assert torch.equal(x, before)
    assert mine.dtype == dtype
    assert none.shape == (0, len(weight))
    error = (mine.double() - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-30)
    assert float(error.max()) < {torch.float32: 1e-5, torch.bfloat16: 5e-3}[dtype]
    assert not mine[4].any()


@pytest.mark.gate(3)
@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=interpreted)])
@pytest.mark.parametrize("name", CASES)
def test_inputs_that_came_rounded(name: str, backend: str, tmp_path: Path) -> None:
    """Operators may round in groups that the layer names: to the last bit the product is that of inputs it rounds."""
    twins = online_twins("fp8", tmp_path) if name == "online-fp8" else checkpoint_twins(name, tmp_path)
    context, layer = gate_up(twins.path, torch.bfloat16, fp8_gemm_backend=backend)
    columns = context.config.hidden_size
    group = layer.method.input_group(layer.weights)
    assert group == (CASES[name] or columns)
    assert layer.input_group is None, "torch's operators round nothing"
    layer.bias = torch.ones(layer.weights.numbers.shape[0], dtype=torch.bfloat16)
    x = activations(columns, torch.bfloat16)
    given = RoundedRows(*scaled.quantise(x, min(group, columns)), x.dtype)
    none = RoundedRows(given.numbers[:0], given.scales[:0], x.dtype)
    with torch.inference_mode():
        assert torch.equal(layer(given), layer(x))
        assert (layer(none).shape, layer(none).dtype) == ((0, len(layer.bias)), x.dtype)


def test_inputs_stay_as_they_are_where_an_adapter_reads_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, layer = gate_up(checkpoint_twins("fp8-block", tmp_path).path, torch.bfloat16)
    monkeypatch.setattr(layer._operators, "rounds", True, raising=False)
    assert layer.input_group == 128
    monkeypatch.setattr(layer, "_lora", object())
    assert layer.input_group is None


def test_the_checkpoints_own_scale_of_activations(tmp_path: Path) -> None:
    """Parts of a fused layer round their common input by the larger of their scales; what is beyond it is cut off."""
    twins = checkpoint_twins("fp8", tmp_path)
    tensors = load_file(twins.path / "model.safetensors")
    tensors[f"{PREFIX}.up_proj.input_scale"] = torch.tensor(0.02)
    save_file(tensors, twins.path / "model.safetensors")
    context, layer = gate_up(twins.path, torch.float32)
    plain = load_file(twins.plain / "model.safetensors")
    weight = torch.cat([plain[f"{PREFIX}.{part}_proj.weight"] for part in ("gate", "up")]).double()
    x = activations(context.config.hidden_size, torch.float32)
    with torch.inference_mode():
        mine = layer(x)
    assert layer.method.input_group(layer.weights) is None, "operators know tokens' own scales only"
    wanted = torch.from_numpy(rounded(x.numpy(), scale=0.02)) @ weight.T
    torch.testing.assert_close(mine.double(), wanted, atol=1e-5 * float(wanted.abs().max()), rtol=0)


def test_a_token_gets_the_same_beside_others(tmp_path: Path) -> None:
    context, layer = gate_up(checkpoint_twins("fp8-block", tmp_path).path, torch.bfloat16)
    x = activations(context.config.hidden_size, torch.bfloat16)
    with torch.inference_mode():
        alone = torch.cat([layer(x[i : i + 1]) for i in range(len(x))])
        torch.testing.assert_close(layer(x).float(), alone.float(), atol=1e-6, rtol=2**-7)


def test_auto_keeps_activations_on_a_cpu(tmp_path: Path) -> None:
    path = checkpoint_twins("fp8-block", tmp_path).path
    assert not gate_up(path, torch.bfloat16, fp8_activations="auto")[1].weights.rounds_input


@pytest.mark.parametrize(
    ("size", "is_block", "dtype", "device", "capability", "message"),
    [
        ((64, 128), False, torch.bfloat16, "cuda", (8, 9), None),
        ((64, 128), False, torch.bfloat16, "cuda", (8, 0), "needs compute capability 8.9"),
        ((64, 128), False, torch.float16, "cuda", (9, 0), "computes in bfloat16 on a cuda device"),
        ((64, 512), True, torch.bfloat16, "cuda", (9, 0), None),
        ((64, 512), True, torch.bfloat16, "cuda", (10, 0), "needs compute capability 9.0 for scales in blocks"),
        ((64, 120), True, torch.bfloat16, "cuda", (9, 0), "has 64 outputs and 120 inputs, which are no multiples"),
        ((8, 128), False, torch.bfloat16, "cpu", (0, 0), "has 8 outputs"),
        ((16, 16), False, torch.float16, "cpu", (0, 0), "computes in bfloat16 or float32"),
    ],
)
def test_devices_with_scaled_products(
    size: tuple[int, int],
    is_block: bool,
    dtype: torch.dtype,
    device: str,
    capability: tuple[int, int],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = scaled.why_not(*size, is_block=is_block, dtype=dtype, device=torch.device(device))
    assert found is None if message is None else message in (found or "")


def test_devices_of_amd_have_no_scaled_products_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    found = scaled.why_not(64, 128, is_block=False, dtype=torch.bfloat16, device=torch.device("cuda"))
    assert "not offered on AMD" in (found or "")


@pytest.mark.parametrize("activations", ["8bit", "full"])
def test_other_plugins_round_inputs_as_these_layers_do(tmp_path: Path, activations: str) -> None:
    """But by the scale of a token's own; where the checkpoint has one for all, inputs are kept, or that is refused."""
    path = checkpoint_twins("fp8-compressed-channel", tmp_path).path
    _, layer = gate_up(path, torch.bfloat16, fp8_activations=activations)
    method, weights, _ = layer.pieces[0]
    found = method.packed_numbers(replace(weights, input_scale=None))
    assert found is not None
    assert found.rounds_input == (activations == "8bit")
    found = method.packed_numbers(replace(weights, input_scale=torch.ones(())))
    assert found is None if activations == "8bit" else found is not None and not found.rounds_input


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    path = checkpoint_twins("fp8-compressed-channel", tmp_path).path
    with pytest.raises(ConfigError, match="--fp8-activations 8bit is not possible: the scaled product computes in"):
        gate_up(path, torch.float16)


@pytest.mark.parametrize("columns", [256, 640])
def test_scales_of_blocks_stand_as_cublaslt_wants_them(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own checks of what a CUDA device would be given, on tensors without memory."""
    given: dict[str, Tensor] = {}
    real = scaled.scaled_mm

    def on_meta(
        x: Tensor, numbers: Tensor, of_x: Tensor, of_numbers: Tensor, dtype: torch.dtype, is_fast: bool = False
    ) -> Tensor:
        given.update(of_x=of_x, of_numbers=of_numbers)
        strided = (torch.empty_strided(y.shape, y.stride(), device="meta") for y in (of_x, of_numbers))
        return real(x.as_subclass(Tensor).to("meta"), numbers.to("meta"), *strided, dtype)

    class OnDevice(Tensor):
        """Says that it is on a CUDA device."""

        @property
        def device(self) -> torch.device:
            return torch.device("cuda")

    monkeypatch.setattr(scaled, "scaled_mm", on_meta)
    rows = 320
    numbers = torch.zeros(rows, columns).to(torch.float8_e4m3fn)
    scales = scaled.padded_block_scales(torch.rand(-(-rows // 128), columns // 128))
    y = scaled.block_product(torch.randn(5, columns).to(torch.bfloat16).as_subclass(OnDevice), numbers, scales)
    assert (y.shape, y.dtype) == ((5, rows), torch.bfloat16)
    groups = columns // 128
    assert (given["of_x"].shape, given["of_x"].stride()) == ((5, groups), (1, 5))
    apart = -(-groups // 4) * 4
    assert (given["of_numbers"].t().shape, given["of_numbers"].t().stride()) == ((3, groups), (apart, 1))


def one_device(rule: str) -> scaled.Product:
    """A device whose kernels read rows of scales at multiples of four, behind a version of torch's own check."""

    def product(x: Tensor, numbers: Tensor, of_x: Tensor, of_numbers: Tensor, dtype: torch.dtype) -> Tensor:
        blocks = x.shape[1] // 128
        wanted = {"padded": -(-blocks // 4) * 4, "next to each other": blocks}.get(rule)
        if rule == "refuses all" or (wanted is not None and of_numbers.stride(1) != wanted):
            raise ValueError("Invalid scaling configuration")
        apart = blocks if rule == "next to each other" else -(-blocks // 4) * 4
        memory = torch.cat((of_numbers.t().as_strided((of_numbers.shape[1] * of_numbers.stride(1),), (1,)), ZEROS))
        scales = memory.as_strided(of_numbers.t().shape, (apart, 1))
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        of_tokens = of_x.repeat_interleave(128, 1)
        return ((x.float() * of_tokens) @ (numbers.float() * spread).T).to(dtype)

    return product


ZEROS = torch.zeros(8)


@pytest.mark.parametrize(
    ("rule", "spacing"), [("padded", 4), ("next to each other", 1), ("checks nothing", 4), ("refuses all", None)]
)
def test_scales_of_blocks_under_either_rule_of_torch(
    rule: str, spacing: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a row has no multiple of four blocks: the numbers say which is right, not what is accepted."""
    monkeypatch.setattr(scaled, "scaled_mm", one_device(rule))
    assert scaled.scale_spacing(torch.device("cpu")) == spacing
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(scaled, "scale_spacing", lambda device: spacing)
    asked = {"is_block": True, "dtype": torch.bfloat16, "device": torch.device("cuda")}
    found = scaled.why_not(2048, 768, **asked)
    assert found is None if spacing else "takes no scales of 6 blocks a row" in (found or "")
    assert scaled.why_not(2048, 1024, **asked) is None


def test_a_torch_without_scales_of_rows_on_a_cpu_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """2.11's fails an assertion of its own with the first product, long after the start."""

    def fails(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("(scale_a.numel() == 1 && scale_b.numel() == 1) INTERNAL ASSERT FAILED")

    monkeypatch.setattr(scaled, "scaled_mm", fails)
    path = checkpoint_twins("fp8-compressed-channel", tmp_path).path
    with pytest.raises(ConfigError, match="the scaled product takes no scales of rows on a CPU in torch"):
        gate_up(path, torch.bfloat16)


@pytest.mark.parametrize("is_fast", [False, True])
def test_fast_accumulation_is_asked_for(is_fast: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    real = torch.ops.aten._scaled_mm

    def noted(*tensors: Any, use_fast_accum: bool, **settings: Any) -> Tensor:
        seen.append(use_fast_accum)
        return real(*tensors, **settings)

    path = checkpoint_twins("fp8-compressed-channel", tmp_path).path
    context, layer = gate_up(path, torch.bfloat16, fp8_fast_accumulation=is_fast)
    monkeypatch.setattr(torch.ops.aten, "_scaled_mm", noted)
    x = activations(context.config.hidden_size, torch.bfloat16)
    layer(x)
    layer(RoundedRows(*scaled.quantise(x), x.dtype))
    assert seen == [is_fast, is_fast]
