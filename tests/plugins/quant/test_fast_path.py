"""Quantised checkpoints are computed by the native kernel of integers, as what is quantised while loading is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.quantised import checkpoint_twins, gguf_twins
from torch import Tensor

import fwk
import fwk_native as native
from fwk.interfaces.quant import LinearShape
from fwk_quant._common.method import IntegerMethod
from fwk_quant._linear_cpu.kernel import PackedMatrix
from fwk_quant.gguf.method import GGUFMethod

pytestmark = pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")

BITS = {"int4-gptq": 3, "int4-awq": 3, "int8-gptq": 2, "gguf": 2, "gguf as int8": 2}
"""The kernel's format of each kind: 3 has 4 bits, 2 has 8."""


@pytest.mark.gate(2)
@pytest.mark.parametrize("kind", list(BITS))
def test_layers_are_packed(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    formats: list[int] = []
    for method in (IntegerMethod, GGUFMethod):
        finish = method.finish

        def noting(self: Any, loaded: Mapping[str, Tensor], shape: LinearShape, finish: Any = finish) -> Any:
            made = finish(self, loaded, shape)
            for matrix in made if isinstance(made, list) else [made]:
                assert isinstance(matrix, PackedMatrix), shape.prefix
                formats.append(matrix.header.format)
            return made

        monkeypatch.setattr(method, "finish", noting)
    twins = gguf_twins("Q8_0", tmp_path) if kind.startswith("gguf") else checkpoint_twins(kind, tmp_path)
    options = {"quantization": "int8"} if kind == "gguf as int8" else twins.options
    with fwk.LLM(str(twins.path), max_total_tokens=256, **{**options, "dtype": "bfloat16"}) as llm:
        sampling = fwk.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        assert len(llm.generate([[1, 2, 3]], sampling)[0].token_ids) == 4
    assert len(formats) >= 8
    assert set(formats) == {BITS[kind]}
