"""Experts divided between ranks: what the ranks compute adds up to the model, in every format and by every runner."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.architectures import ARCHITECTURES, close, write
from tests.helpers.checkpoints import make_checkpoint, reference_logits, token_ids
from tests.helpers.models import RunnableModel, make_quantised_context, on_ranks
from tests.helpers.mxfp4 import write_packed
from tests.helpers.quantised import gguf_of
from tests.helpers.ranks import Rank
from torch import Tensor

from fwk.interfaces.moe import MoEContext, MoERunner
from fwk.interfaces.parallel import ParallelGroup, SingleRank
from fwk.plugins import discover, find, load_object
from fwk_layers import MoE, Routing
from fwk_native.thread_pool import ThreadPool

MODELS = [
    "granitemoe", "mixtral", "qwen2_moe", "olmoe", "glm4_moe", "deepseek_v3", "gpt_oss", "jamba", "qwen3_next",
    "qwen3_5_moe", "granite hybrid with experts", "llama4",
]  # fmt: skip
ONE_BY_ONE = re.compile(r".*\.experts\.(\d+)\..*")


def made(name: str, folder: Path) -> Any:
    """A checkpoint, and transformers' model of it."""
    if name == "MXFP4":
        return write_packed(folder)
    return write(folder, *ARCHITECTURES[name]) if name in ARCHITECTURES else make_checkpoint(folder, name)


@pytest.mark.gate(2)
@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v2", "MXFP4", *MODELS])
def test_two_ranks_with_half_of_the_experts_each_are_the_model(name: str, tmp_path: Path) -> None:
    """Of transformers in float32; of experts that are stored one by one, each is read by one rank."""
    reference, prompt = made(name, tmp_path), token_ids(40)
    models: dict[int, RunnableModel] = {}

    def run(tp: ParallelGroup) -> Tensor:
        models[tp.rank] = RunnableModel(tmp_path, tp=tp, ep_size=2)
        return models[tp.rank].logits(prompt, [30, 1, 9])

    wanted = reference_logits(reference, prompt)
    for logits in on_ranks(2, run):
        close(logits, wanted)
    read = [{m[0]: int(m[1]) for n in models[rank].weights.asked if (m := ONE_BY_ONE.match(n))} for rank in (0, 1)]
    assert not set(read[0]) & set(read[1])
    assert len(read[0]) == len(read[1])
    assert max(read[0].values(), default=-1) < min(read[1].values(), default=0)
    for model in models.values():
        assert model.weights.asked | model.weights.skipped >= set(model.weights.names())


@pytest.mark.gate(1)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_two_groups_of_two_ranks_share_each_expert(name: str, tmp_path: Path) -> None:
    """Biases of gpt-oss are added once in a group."""
    reference, prompt = made(name, tmp_path), token_ids(20)
    wanted = reference_logits(reference, prompt)
    for logits in on_ranks(4, lambda tp: RunnableModel(tmp_path, tp=tp, ep_size=2).logits(prompt)):
        close(logits, wanted)


FORMATS: dict[str, dict[str, Any]] = {
    "plain": {"quantization": "none"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "fp8": {"quantization": "fp8"},
    "gguf": {"quantization": "gguf"},
    "gguf MXFP4": {"quantization": "gguf"},
}
CASES = [
    ("torch", "float32", ["plain", "int8", "int4", "fp8", "gguf", "gguf MXFP4"]),
    ("cpu", "float32", ["plain"]),
    ("cpu", "bfloat16", ["plain", "int8", "int4", "gguf", "gguf MXFP4", "fp8"]),
    ("triton", "float32", ["plain", "int8", "int4", "fp8"]),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("mixture")
    make_checkpoint(folder / "plain", "qwen3_moe", num_hidden_layers=1)
    files = {"gguf": gguf_of(folder / "plain", folder / "Q8_0").path}
    files["gguf MXFP4"] = gguf_of(folder / "plain", folder / "MXFP4", "MXFP4").path
    return {name: files.get(name, folder / "plain") for name in FORMATS}


@pytest.mark.gate(1)
@pytest.mark.parametrize(
    ("runner", "dtype", "name"), [(runner, dtype, name) for runner, dtype, names in CASES for name in names]
)
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_every_runner_and_format(runner: str, dtype: str, name: str, num_tokens: int, mixture: dict[str, Path]) -> None:
    """Against one rank with all experts in the same format: the weights are the same to the bit, sums are not."""
    if runner == "triton" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("runs in Triton's interpreter")
    kind = load_object(find(discover(), "moe", runner))

    def layer(tp: ParallelGroup, ep_size: int) -> MoE:
        def build(context: MoEContext) -> MoERunner:
            return kind(replace(context, threads=ThreadPool(2)))

        given = {"dtype": getattr(torch, dtype), "tp": tp, "ep_size": ep_size, **FORMATS[name]}
        context = make_quantised_context(mixture[name], **given)
        context.moe_runner = build
        with torch.inference_mode():
            return MoE(context, "model.layers.0.mlp", Routing(8, 3, normalises=True), intermediate_size=128)

    x = torch.randn(num_tokens, 128, generator=torch.Generator().manual_seed(5)).to(getattr(torch, dtype))
    near = 1e-5 if dtype == "float32" else 2.0**-7  # each rank rounds its part
    with torch.inference_mode():
        wanted = layer(SingleRank(), 1)(x).float()
        found = layer(Rank(0, 2), 2)(x).float() + layer(Rank(1, 2), 2)(x).float()
    torch.testing.assert_close(found, wanted, rtol=near, atol=near * float(wanted.abs().max()))
