"""The Triton operators' declaration and machine code; their numbers: tests/contracts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.interpreted import check_never_chosen_by_itself, interpreted
from tests.helpers.machine_code import compiled
from tests.helpers.pretend_cuda import JOURNAL, pretended, triton_kernels

import fwk
from fwk import SamplingParams
from fwk.interfaces.operators import OperatorContext
from fwk.plugins import build, find
from fwk_kit.testing.base import installed
from fwk_kit.testing.serving import TINY
from fwk_operators.triton_ops.backend import TritonOperators

PLUGINS = installed()
TRITON = find(PLUGINS, "operators", "triton")
ROUNDED: dict[str, Any] = {
    "load_format": "dummy",
    "max_total_tokens": 256,
    "max_running_requests": 2,
    "max_prefill_tokens": 8,
    "chunked_prefill_size": 8,
    "dtype": "bfloat16",
    "quantization": "fp8",
    "fp8_activations": "8bit",
    "fp8_gemm_backend": "triton",
    "attention_backend": "torch",
    "operator_backend": "triton",
    "sampling_backend": "torch",
    "disable_cuda_graph": True,
}


def test_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_never_chosen_by_itself(PLUGINS, "operators", monkeypatch)


@interpreted
def test_a_residual_whose_rows_stand_apart() -> None:
    operators = build(TRITON, OperatorContext(torch.device("cpu"), torch.float32))
    wide = torch.randn(3, 20)
    residual, x, weight = wide[:, :16], torch.randn(3, 16), torch.rand(16)
    total = residual + x
    found = operators.add_rms_norm(x, residual, weight, 1e-6)
    torch.testing.assert_close(found, total * (total.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight)
    torch.testing.assert_close(residual, total)


OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3ForCausalLM": {"model_type": "qwen3", "head_dim": 16},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text", "head_dim": 16},
}


@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize("name", ["LlamaForCausalLM", *(pytest.param(x, marks=pytest.mark.sweep) for x in OTHERS)])
def test_inputs_of_fp8_products_are_rounded_as_they_are_made(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the product after attention and the head's are left to round their inputs; no bit changes."""
    config = TINY | {"num_hidden_layers": 1, "architectures": [name]} | OTHERS.get(name, {})
    (tmp_path / "config.json").write_text(json.dumps(config))

    def served() -> tuple[list[tuple[int, float]], int]:
        asked = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, logprobs=1)
        with (
            triton_kernels(),
            pretended() as plugins,
            fwk.LLM(str(tmp_path), plugins=plugins, device="pretended", **ROUNDED) as llm,
        ):
            JOURNAL.clear()
            done = llm.generate([[1, 7, 3, 9]], asked)[0]
        assert JOURNAL.faults == []
        return [(entry.token_id, entry.logprob) for entry in done.logprobs or []], JOURNAL.launches["round_rows"]

    together, left = served()
    monkeypatch.setattr(TritonOperators, "rounds", False)
    apart, all_of_them = served()
    assert together == apart
    steps = 2
    assert left == steps * 2
    assert all_of_them == steps * 5


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_machine_code(target: str, dtype: str) -> None:
    """No numbers in local memory, and memory read 128 bits at a time."""
    found = compiled(target, dtype, "operators")
    assert {code["name"] for code in found} == {"norm_rows", "rotate_rows", "gate_rows", "table_rows"}
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        # Where a row of a table begins is known only when its index was read.
        assert code["loads_of_128_bits"] > 0 or code["name"] == "table_rows" or target == "gfx942", code
