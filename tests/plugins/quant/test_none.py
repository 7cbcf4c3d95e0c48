"""Unquantised linear layers, packed and not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fwk_native as native
from fwk.interfaces.quant import LinearShape, QuantContext
from fwk_native.thread_pool import ThreadPool
from fwk_quant.none.method import PlainMethod

CPU = torch.device("cpu")


def method(dtype: torch.dtype) -> PlainMethod:
    return PlainMethod(QuantContext(CPU, dtype, {}, threads=ThreadPool()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_tokens", [1, 8, 33, 513])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("way", ["native", "onednn", "torch"])
def test_equals_a_product_in_float64(
    dtype: torch.dtype, num_tokens: int, has_bias: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    if way != "native":
        monkeypatch.setattr(native, "refusal", lambda: "is not wanted here")
    plain = method(dtype)
    if way == "torch":
        plain.why_unpacked = "the test says so"
    shape = LinearShape(70, (48, 20), dtype, CPU, "layer")
    weight, bias = torch.randn(68, 70).to(dtype), torch.randn(68).to(dtype) if has_bias else None
    # Rows of a wider tensor, as views of a fused layer's output are.
    x = torch.randn(num_tokens, 140).to(dtype)[:, 35:105]
    with torch.inference_mode():
        out = plain.apply(plain.finish({"weight": weight.clone()}, shape), x, bias)
    assert out.dtype == dtype
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(out.double(), wanted, atol=tolerance, rtol=0.01)


def test_reads_one_matrix_that_follows_both_sides() -> None:
    (spec,) = method(torch.bfloat16).params(LinearShape(8, (4,), torch.bfloat16, CPU, "x")).values()
    assert (spec.output_dim, spec.input_dim, spec.dtype) == (0, 1, torch.bfloat16)
    assert spec.shape(4, 8) == (4, 8)


def test_without_a_compiler_and_onednn_says_why_and_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native.compiler, "COMPILERS", ("no-such-compiler",))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain = method(torch.float32)
    assert "run by torch on unpacked weights (this torch has no oneDNN), more slowly: the native kernel" in caplog.text
    assert "finds no C++ compiler (no-such-compiler, or what CXX names): install one" in caplog.text
    weight = torch.randn(3, 5)
    assert plain.finish({"weight": weight}, LinearShape(5, (3,), torch.float32, CPU, "x")) is weight
    torch.testing.assert_close(plain.apply(weight, torch.ones(2, 5), None), weight.sum(1).expand(2, 3))


@pytest.mark.parametrize("has_compiler", [True, False])
def test_unpacked_memory_is_not_kept(has_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiler:
        monkeypatch.setattr(native, "refusal", lambda: "is not wanted here")
    plain = method(torch.float32)
    weight = torch.randn(64, 64)
    packed = plain.finish({"weight": weight}, LinearShape(64, (64,), torch.float32, CPU, "x"))
    weight.zero_()
    assert plain.apply(packed, torch.ones(1, 64), None).abs().sum() > 0
    assert plain.can_embed == has_compiler


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_are_those_of_the_weight(dtype: torch.dtype) -> None:
    plain = method(dtype)
    weight = torch.randn(68, 35).to(dtype)
    packed = plain.finish({"weight": weight}, LinearShape(35, (68,), dtype, CPU, "x"))
    indices = torch.tensor([67, 0, 31, 32, 0])
    assert torch.equal(plain.rows(packed, indices), weight[indices])
    assert plain.rows(packed, indices[:0]).shape == (0, 35)
