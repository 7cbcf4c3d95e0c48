"""gpt-oss as it is published: experts in MXFP4; against transformers' own reading of the same tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.architectures import close
from tests.helpers.checkpoints import reference_greedy, reference_logits, token_ids
from tests.helpers.lazy import lazy
from tests.helpers.models import RunnableModel
from tests.helpers.mxfp4 import random_bytes, write_packed

import fwk
import fwk_native as native
from fwk import SamplingParams
from fwk.errors import FwkError
from fwk_models.gpt_oss.experts import mxfp4_numbers

mxfp4 = lazy("transformers.integrations.mxfp4")


def test_numbers_are_those_of_transformers() -> None:
    torch.manual_seed(0)
    blocks, scales = random_bytes(3, 10, 4, 16), random_bytes(3, 10, 4, low=100, high=150)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(mxfp4_numbers(blocks, scales), theirs.transpose(1, 2))


def test_logits_from_packed_experts(tmp_path: Path) -> None:
    reference = write_packed(tmp_path)
    model, prompt = RunnableModel(tmp_path), token_ids(60)
    close(model.logits(prompt, [30, 20, 1, 9]), reference_logits(reference, prompt))
    assert model.weights.asked >= set(model.weights.names())


PACKED = {"quantization_layers": ("*.experts.*=fp4",)}


@pytest.mark.gate(1)
@pytest.mark.parametrize(("quantization", "chosen"), [(PACKED, {"none", "fp4"}), ({}, {"none"})])
def test_it_is_served_with_block_tables_by_group(
    quantization: dict[str, Any], chosen: set[str], tmp_path: Path
) -> None:
    """Experts are computed from their blocks, or as numbers."""
    reference = write_packed(tmp_path)
    prompt = token_ids(50)
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 512, "check_blocks": True}
    with fwk.LLM(str(tmp_path), **options, **quantization) as llm:
        assert llm.engine.info.num_block_tables == 2
        assert set(llm.engine.info.chosen["quant"].split(", ")) == chosen
        assert llm.engine.info.chosen["attention"] == "torch", "the one with sinks"
        (done,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    assert done.token_ids == reference_greedy(reference, prompt, 20)


def test_packed_experts_can_be_kept_small(tmp_path: Path) -> None:
    """Read as numbers, then quantised again: int8 holds a 4-bit block's numbers well."""
    reference = write_packed(tmp_path)
    prompt = token_ids(50)
    with fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=512, quantization="int8") as llm:
        assert "int8" in llm.engine.info.chosen["quant"]
        (done,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, logprobs=1))
    wanted = reference_logits(reference, prompt)[-1].log_softmax(-1)
    assert wanted[done.token_ids[0]] > wanted.max() - 0.5


@pytest.mark.sweep
@pytest.mark.parametrize(("inner", "is_packed"), [(128, True), (96, False)])
def test_ranks_that_get_no_whole_blocks_read_numbers(inner: int, is_packed: bool, tmp_path: Path) -> None:
    reference, prompt = write_packed(tmp_path, intermediate_size=inner), token_ids(50)
    options: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 512, "tensor_parallel_size": 2}
    with fwk.LLM(str(tmp_path), **options, **(PACKED if is_packed else {})) as llm:
        assert ("fp4" in llm.engine.info.chosen["quant"]) == is_packed
        (done,) = llm.generate([prompt], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
    assert done.token_ids == reference_greedy(reference, prompt, 12)


@pytest.mark.skipif(native.refusal() is not None, reason="no C++ compiler")
def test_blocks_stay_packed_in_native_kernels(tmp_path: Path) -> None:
    reference = write_packed(tmp_path)
    prompt = token_ids(50)
    with fwk.LLM(str(tmp_path), dtype="bfloat16", max_total_tokens=512) as llm:
        assert llm.engine.info.chosen["moe"] == "cpu"
        assert "fp4" in llm.engine.info.chosen["quant"]
        (done,) = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, logprobs=1))
    wanted = reference_logits(reference, prompt)[-1].log_softmax(-1)
    assert wanted[done.token_ids[0]] > wanted.max() - 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "'swiglu_limit' is 5.0: gpt-oss is served with 7.0"),
        ({"intermediate_size": 128}, r"gate_up_proj_blocks is torch.uint8 of shape \(4, 192, 2, 16\), not .*256"),
    ],
)
def test_what_is_not_served_is_said(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_packed(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(FwkError, match=message):
        fwk.LLM(str(tmp_path), dtype="float32", max_total_tokens=512)
