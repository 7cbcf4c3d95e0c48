"""Products with packed matrices in Triton: its kernels against float64, what is refused, and their machine code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.interpreted import interpreted
from tests.helpers.machine_code import compiled, is_triton_before
from tests.helpers.models import make_quantised_context
from tests.helpers.packed import packed_matrix
from tests.helpers.quantised import checkpoint_twins
from tests.helpers.tiny import save_llama
from torch import Tensor

import fwk
from fwk import SamplingParams
from fwk.errors import ConfigError, ModelLoadError
from fwk_layers import ColumnParallelLinear, Part, QKVLinear
from fwk_quant._common.integers import IntegerMatrix
from fwk_quant._linear_triton import choice, matrix
from fwk_quant._linear_triton.matrix import FEW_TOKENS, TritonMatrix, parts_of

FORMS = [
    ("int8", 1, False, 1),
    ("int8", 2, True, 1),
    ("int4", 1, False, 1),
    ("int4", 16, True, 1),
    ("e4m3", 1, False, 1),
    ("e4m3", 4, False, 16),
]


def given(num_tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(num_tokens, columns, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.gate(4)
@interpreted
@pytest.mark.parametrize("num_tokens", [1, 19, FEW_TOKENS + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products(form: tuple[str, int, bool, int], dtype: torch.dtype, num_tokens: int) -> None:
    rows, columns = 72, 512
    packed, plain = packed_matrix(*form, rows, columns, torch.Generator().manual_seed(3))
    assert parts_of(rows, columns, 32)[0] > 1
    bias = given(1, rows, dtype)[0]
    x = given(num_tokens, columns, dtype)
    wanted = x.double() @ plain.double().T
    one = TritonMatrix(packed, (rows, columns))
    # Packed numbers that are scaled in groups are rounded once more, as weights of that type are.
    near = 1e-5 if dtype == torch.float32 else 2.0**-6 * float(wanted.abs().max())
    torch.testing.assert_close(one.apply(x, None).double(), wanted, rtol=near, atol=near)
    torch.testing.assert_close(one.apply(x, bias).double(), wanted + bias.double(), rtol=near, atol=near)


@interpreted
def test_one_part_of_inputs_that_no_tile_divides() -> None:
    packed, plain = packed_matrix("int4", 1, False, 1, 70, 72, torch.Generator().manual_seed(3))
    assert parts_of(70, 72, 32)[0] == 1
    x, bias = given(5, 72, torch.float32), given(1, 70, torch.float32)[0]
    found = TritonMatrix(packed, (70, 72)).apply(x, bias)
    torch.testing.assert_close(found.double(), x.double() @ plain.double().T + bias, rtol=1e-5, atol=1e-5)


@interpreted
def test_inputs_in_another_order_and_rows_that_stand_apart() -> None:
    packed, plain = packed_matrix("int8", 2, False, 1, 16, 64, torch.Generator().manual_seed(3))
    order = torch.randperm(64, generator=torch.Generator().manual_seed(4))
    x = given(3, 64, torch.float32)
    found = TritonMatrix(packed, (16, 64), order).apply(x, None)
    torch.testing.assert_close(found, x[:, order] @ plain.T, rtol=1e-5, atol=1e-5)
    wide = torch.cat((x, torch.full_like(x, torch.nan)), 1)
    assert torch.equal(TritonMatrix(packed, (16, 64), order).apply(wide[:, :64], None), found)
    in_place = TritonMatrix(packed, (16, 64))
    assert torch.equal(in_place.apply(wide[:, :64], None), in_place.apply(x, None))
    assert found[:0].shape == TritonMatrix(packed, (16, 64)).apply(x[:0], None).shape


@interpreted
@pytest.mark.parametrize(("groups", "row_block"), [(1, 1), (4, 128)])
def test_rounded_inputs(groups: int, row_block: int) -> None:
    """Products of e4m3 numbers are exact, and added up in float32."""
    rows, columns = 136, 512
    packed, plain = packed_matrix("e4m3", groups, False, row_block, rows, columns, torch.Generator().manual_seed(3))
    x = given(7, columns, torch.float32)
    of_groups = x.unflatten(1, (groups, -1))
    scales = (of_groups.abs().amax(-1, keepdim=True) / 448).float()
    rounded = ((of_groups / scales).to(torch.float8_e4m3fn).double() * scales).flatten(1)
    wanted = rounded @ plain.double().T
    found = TritonMatrix(replace(packed, rounds_input=True), (rows, columns)).apply(x, None)
    near = 1e-5 * float(wanted.abs().max())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=near)
    assert float((x.double() @ plain.double().T - wanted).abs().max()) > 100 * near, "rounding made no difference"


@interpreted
def test_a_sum_is_cut_by_the_matrix_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's bits do not depend on others in its tile."""
    packed, _ = packed_matrix("int4", 4, True, 1, 64, 512, torch.Generator().manual_seed(3))
    one, x = TritonMatrix(packed, (64, 512)), given(16, 512, torch.bfloat16)
    together = one.apply(x, None)
    assert torch.equal(one.apply(x[5:6], None), together[5:6])


def test_parts_cover_every_input_once() -> None:
    for outputs in (64, 1000, 4096, 30000):
        for inputs in (64, 512, 4096, 14336):
            for step in (32, 64, 128):
                parts, span = parts_of(outputs, inputs, step)
                assert span % step == 0
                assert (parts - 1) * span < inputs <= parts * span
                assert 1 <= parts <= matrix.MAX_PARTS
    assert parts_of(4096, 4096, 64)[0] == 4
    assert parts_of(28672, 4096, 64)[0] == 1


@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_a_model_is_served_as_by_torch(name: str, tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=1)
    asked = SamplingParams(max_tokens=3, temperature=0.0, logprobs=1, ignore_eos=True)
    found: list[Any] = []
    for backend in ("torch", "triton"):
        options = {f"{name}_gemm_backend": backend, f"{name}_activations": "full"}
        with fwk.LLM(str(tmp_path), quantization=name, dtype="float32", max_total_tokens=256, **options) as llm:
            found.append(llm.generate([[5, 9, 2], list(range(3, 73))], asked))
    for torchs, tritons in zip(*found, strict=True):
        assert torchs.token_ids == tritons.token_ids


@interpreted
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quantization": "int4", "int4_activations": "8bit"}, "keeps activations as they are"),
        ({"quantization": "int8", "enable_deterministic_inference": True}, "depend on the number of tokens"),
    ],
    ids=lambda x: "" if isinstance(x, str) else x["quantization"],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=1)
    backend = {f"{options['quantization']}_gemm_backend": "triton"}
    with pytest.raises(ConfigError, match=words):
        fwk.LLM(str(tmp_path), dtype="bfloat16", **backend, **options)


@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_neither_a_device_nor_an_interpreter(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    save_llama(tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=f"--{name}-gemm-backend triton is not possible: its kernels need a cuda"):
        fwk.LLM(str(tmp_path), quantization=name, device="cpu", **{f"{name}_gemm_backend": "triton"})


@interpreted
@pytest.mark.parametrize("name", ["int4", "int8", "fp8"])
def test_triton_is_not_installed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "ANYWHERE", replace(choice.ANYWHERE, packages=("triton>=99",)))
    save_llama(tmp_path, num_hidden_layers=1)
    with pytest.raises(ConfigError, match=f"--{name}-gemm-backend triton is not possible: triton needs triton>=99"):
        fwk.LLM(str(tmp_path), quantization=name, device="cpu", **{f"{name}_gemm_backend": "triton"})


@pytest.mark.gate(1)
@interpreted
@pytest.mark.parametrize("num_tokens", [3, FEW_TOKENS + 1])
@pytest.mark.parametrize("name", ["fp8-block", "fp8-compressed-channel"])
def test_a_layer_whose_inputs_are_rounded(name: str, num_tokens: int, tmp_path: Path) -> None:
    """Products of few tokens are the kernels', of more torch's; both multiply the same numbers."""
    twins = checkpoint_twins(name, tmp_path, hidden_size=128, intermediate_size=128)
    options = {"fp8_activations": "8bit"}
    mine, torchs = (gate_up(twins.path, fp8_gemm_backend=backend, **options) for backend in ("triton", "torch"))
    x = given(num_tokens, 128, torch.bfloat16)
    wanted = torchs(x)
    near = 2.0**-7 * float(wanted.abs().max())  # both are rounded to bfloat16
    torch.testing.assert_close(mine(x), wanted, rtol=near, atol=near)
    assert not torch.equal(gate_up(twins.path, fp8_activations="full")(x), wanted), "rounding made no difference"


def gate_up(path: Path, **options: Any) -> ColumnParallelLinear:
    plugin_options = {"quant.fp8": options}
    context = make_quantised_context(path, dtype=torch.bfloat16, plugin_options=plugin_options, quantization="fp8")
    parts = [Part(f"model.layers.0.mlp.{name}_proj", context.config.intermediate_size) for name in ("gate", "up")]
    return ColumnParallelLinear(context, parts, context.config.hidden_size)


@interpreted
def test_scales_of_activations_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    folder = checkpoint_twins("fp8-compressed-tensor", tmp_path).path
    tensors = load_file(folder / "model.safetensors")
    known = {f"model.layers.0.mlp.{name}_proj.input_scale": torch.ones(1) for name in ("gate", "up")}
    save_file(tensors | known, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="--fp8-gemm-backend triton rounds activations by their own"):
        gate_up(folder, fp8_gemm_backend="triton", fp8_activations="8bit")
    kept = gate_up(folder, fp8_gemm_backend="triton")
    x = given(3, kept.in_features, torch.bfloat16)
    torch.testing.assert_close(kept(x), gate_up(folder, fp8_activations="full")(x), rtol=2e-2, atol=2e-2)


@interpreted
def test_groups_of_different_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint_twins("int4-gptq-act-order", tmp_path).path
    monkeypatch.setattr(IntegerMatrix, "in_order", lambda self: (self, None))
    options = {"quant.int4": {"int4_gemm_backend": "triton"}}
    with pytest.raises(ModelLoadError, match="its groups differ in size, which --int4-gemm-backend triton"):
        QKVLinear(make_quantised_context(folder, plugin_options=options), "model.layers.0.self_attn")


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_machine_code(target: str, dtype: str) -> None:
    """No numbers in local memory, matrices read 128 bits at a time and multiplied by tensor cores."""
    found = compiled(target, dtype, "packed-products")
    products = [code for code in found if code["name"] == "packed_products"]
    assert len(products) == 12
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["shared"] <= (64 if target == "gfx942" else 100) * 1024, code
    for code in products:  # 3.6 reads int4 for gfx942 by narrower loads
        assert code["loads_of_128_bits"] > 0 or (target == "gfx942" and is_triton_before("3.9")), code
        assert code["matrix_products"] > 0, code


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["90", "100"])
def test_machine_code_of_rounded_inputs(target: str) -> None:
    found = compiled(target, "bf16", "rounded-products")
    assert [code["name"] for code in found] == ["packed_products"] * 4
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["shared"] <= 100 * 1024, code
        assert code["loads_of_128_bits"] > 0, code
        assert code["e4m3_products"] + code["matrix_products"] > 0, code
