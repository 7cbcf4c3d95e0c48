"""The Triton runner's parts that the contract does not see, its numbers in half precision, and its machine code."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.machine_code import compiled
from torch import Tensor

import fwk
from fwk.errors import ModelLoadError, PluginError
from fwk.interfaces.declaration import Facts, Host
from fwk.interfaces.moe import MoEContext
from fwk.plugins import choose, discover, find
from fwk_kit.testing.moe import EXPERTS, HIDDEN, INNER, TOP_K, Experts, reference, routed
from fwk_moe.triton_fused import runner
from fwk_moe.triton_fused.runner import FEW_ROWS, MANY_ROWS, Tiling, TritonRunner, tiling

PLUGINS = discover()
TRITON = find(PLUGINS, "moe", "triton")
CPU = torch.device("cpu")

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="runs in Triton's interpreter")


def made(experts: Experts, dtype: torch.dtype = torch.float32, activation: str = "silu") -> TritonRunner:
    experts.gate_up, experts.down = experts.gate_up.to(dtype), experts.down.to(dtype)
    found = TritonRunner(MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, activation, dtype, CPU))
    found.load(experts)
    return found


def test_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    for facts in (Facts(), Facts(host=Host("cuda", (9, 0)))):
        chosen = choose(PLUGINS, "moe", "auto", facts).chosen
        assert chosen is not None
        assert chosen.name != "triton"
        assert TRITON.declaration.refusal(facts) is None
    assert "compute capability 8.0" in (TRITON.declaration.refusal(Facts(host=Host("cuda", (7, 5)))) or "")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(PluginError, match="needs a cuda device, or TRITON_INTERPRET=1 to run its kernels in"):
        choose(PLUGINS, "moe", "triton", Facts())


@interpreted
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
def test_half_precision(dtype: torch.dtype, num_tokens: int) -> None:
    experts = Experts()
    found = made(experts, dtype)
    x, ids, weights = routed(num_tokens)
    x = x.to(dtype)
    out = found.apply(x, ids, weights)
    assert out.dtype == dtype
    wanted = reference(experts, x, ids, weights)
    precision = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    # Rounded once before down, once after it and once when the experts are added.
    torch.testing.assert_close(out.double(), wanted, rtol=2 * precision, atol=2 * precision * float(wanted.abs().max()))


@interpreted
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_activations(activation: str) -> None:
    from fwk_moe._common.loop import LayerLoop

    experts = Experts()
    found = made(experts, activation=activation)
    x, ids, weights = routed(9)
    loop = LayerLoop(found.context, [experts.layers(index) for index in range(EXPERTS)])
    torch.testing.assert_close(found.apply(x * 4, ids, weights), loop.apply(x * 4, ids, weights), rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 3, 40, 700])
def test_pairs_are_sorted_by_expert_in_tiles(num_tokens: int, rows: int) -> None:
    """700 tokens are more than a program compares at once."""
    _, ids, _ = routed(num_tokens)
    ids = ids.where(ids != 3, 2)  # an expert that has none
    num_pairs = ids.numel()
    pairs, tiles = made(Experts())._sorted(ids, num_pairs, rows)
    assert torch.equal(pairs.long(), ids.flatten().argsort(stable=True))
    seen: list[int] = []
    used = tiles[tiles[:, 2] > 0].tolist()
    for expert, first, count, _ in used:
        mine = pairs[first : first + count].tolist()
        assert 0 < count <= rows
        assert ids.flatten()[mine].tolist() == [expert] * count
        seen += mine
    assert sorted(seen) == list(range(num_pairs))
    assert len(used) == sum(-(-n // rows) for n in ids.flatten().bincount().tolist())


@interpreted
def test_a_bound_on_tiles_that_is_reached() -> None:
    """Every expert has one pair more than fills its tiles."""
    ids = torch.arange(EXPERTS).repeat_interleave(17).view(-1, 1)
    _, tiles = made(Experts())._sorted(ids, len(ids), 16)
    assert int((tiles[:, 2] > 0).sum()) == len(tiles) == 2 * EXPERTS


@interpreted
def test_a_tokens_bits_do_not_depend_on_others_in_its_tile() -> None:
    found = made(Experts())
    x, ids, weights = routed(20)
    together = found.apply(x, ids, weights)
    for i in (0, 7, 19):
        one = slice(i, i + 1)
        assert torch.equal(found.apply(x[one], ids[one], weights[one]), together[one])


@interpreted
def test_tiles_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps over the inputs, several tiles of an expert, columns that no tile fills."""
    monkeypatch.setattr(runner, "tiling", lambda *_: Tiling(32, 32, 16, 4, 1))
    experts = Experts()
    x, ids, weights = routed(150)
    torch.testing.assert_close(
        made(experts).apply(x, ids, weights).double(), reference(experts, x, ids, weights), rtol=1e-4, atol=1e-4
    )


def test_rows_of_a_tile() -> None:
    assert tiling(8, 128, 2).rows == tiling(2048, 128, 2).rows == FEW_ROWS
    assert tiling(2049, 128, 2).rows == MANY_ROWS
    assert tiling(2049, 128, 4).rows == FEW_ROWS


@interpreted
def test_what_it_does_not_compute_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3_moe")
    for options, words in (
        ({"quantization": "int8"}, "computes with plain weights only: take --moe-runner-backend torch"),
        ({"quantization": "fp8"}, "computes with plain weights only: take --moe-runner-backend torch"),
    ):
        given: dict[str, Any] = options
        with pytest.raises(ModelLoadError, match=words):
            fwk.LLM(str(tmp_path), moe_runner_backend="triton", **given)
    context = MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, "clamped_swiglu", torch.float32, CPU)
    with pytest.raises(ModelLoadError, match=r"'clamped_swiglu' is not among those the triton.*backend torch"):
        TritonRunner(context)


@interpreted
def test_inputs_whose_rows_stand_apart() -> None:
    found = made(Experts())
    x, ids, weights = routed(6)
    wide: Tensor = torch.cat((x, torch.full_like(x, torch.nan)), 1)
    assert torch.equal(found.apply(wide[:, :HIDDEN], ids, weights), found.apply(x, ids, weights))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("cc", [80, 90, 100])
def test_machine_code(cc: int, dtype: str) -> None:
    """No numbers in local memory, matrices read 128 bits at a time and multiplied by tensor cores."""
    found = compiled(str(cc), dtype, "experts")
    products = [code for code in found if code["name"] in ("gate_up_tiles", "down_tiles")]
    assert len(products) == 4
    assert {code["name"] for code in found} == {
        *("count_pairs", "sort_pairs", "add_experts"),
        *(code["name"] for code in products),
    }
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["shared"] <= 100 * 1024, code
    for code in products:
        assert code["loads_of_128_bits"] > 0, code
        assert code["matrix_products"] > 0 or dtype == "fp32", code  # float32 is multiplied as it is
    if cc == 90 and dtype != "fp32":
        assert all(code["hopper_matrix_products"] > 0 for code in products[2:]), products  # tiles of many rows
