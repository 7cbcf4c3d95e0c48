"""The Triton runner's parts that the contract does not see, its numbers in half precision, and its machine code."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.interpreted import check_never_chosen_by_itself, interpreted
from tests.helpers.machine_code import compiled, is_triton_before
from tests.helpers.packed import packed_matrix
from torch import Tensor

import fwk
from fwk import SamplingParams
from fwk.errors import ModelLoadError
from fwk.interfaces.moe import MoEContext
from fwk.interfaces.quant import PackedNumbers
from fwk.plugins import find
from fwk_kit.testing.base import installed
from fwk_kit.testing.moe import EXPERTS, HIDDEN, INNER, TOP_K, Experts, reference, routed
from fwk_moe.triton_fused import runner
from fwk_moe.triton_fused.matrices import Matrices
from fwk_moe.triton_fused.runner import FEW_ROWS, MANY_ROWS, TritonRunner, tiling
from fwk_tiles.launches import Tile

PLUGINS = installed()
TRITON = find(PLUGINS, "moe", "triton")
CPU = torch.device("cpu")


def made(experts: Experts, dtype: torch.dtype = torch.float32, activation: str = "silu") -> TritonRunner:
    experts.gate_up, experts.down = experts.gate_up.to(dtype), experts.down.to(dtype)
    found = TritonRunner(MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, activation, dtype, CPU))
    found.load(experts)
    return found


def test_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_never_chosen_by_itself(PLUGINS, "moe", monkeypatch)


@pytest.mark.gate(1)
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


@pytest.mark.gate(2)
@interpreted
@pytest.mark.parametrize("activation", ["gelu", "gelu_pytorch_tanh", "relu", "relu2"])
def test_activations(activation: str) -> None:
    from fwk_moe._common.loop import LayerLoop

    experts = Experts()
    found = made(experts, activation=activation)
    x, ids, weights = routed(9)
    loop = LayerLoop(found.context, [experts.layers(index) for index in range(EXPERTS)])
    torch.testing.assert_close(found.apply(x * 4, ids, weights), loop.apply(x * 4, ids, weights), rtol=1e-4, atol=1e-4)


class PackedExperts(Experts):
    """Random numbers of one form, and what they mean."""

    is_plain = False

    def __init__(self, kind: str, groups: int, has_zeros: bool, row_block: int) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(3)
        self._form = kind, groups, has_zeros, row_block
        made = [[self._made(*matrix.shape[1:]) for _ in range(EXPERTS)] for matrix in (self.gate_up, self.down)]
        self._packed = [[packed for packed, _ in of] for of in made]
        self.gate_up, self.down = (torch.stack([plain for _, plain in of]) for of in made)

    def packed(self, expert: int) -> tuple[PackedNumbers, PackedNumbers]:
        return self._packed[0][expert], self._packed[1][expert]

    def _made(self, rows: int, columns: int) -> tuple[PackedNumbers, Tensor]:
        return packed_matrix(*self._form, rows, columns, self._random)


PACKED = [
    ("int8", 1, False, 1),
    ("int8", 2, True, 1),
    ("int8", 4, False, 1),
    ("int4", 1, False, 1),
    ("int4", 2, False, 1),
]
PACKED += [("int4", 4, True, 1), ("e4m3", 1, False, 1), ("e4m3", 2, False, 16)]


@pytest.mark.gate(1)
@interpreted
@pytest.mark.parametrize("step", [8, 32])  # of int4, the former divides half a row, the latter does not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", PACKED, ids=str)
def test_packed_experts(
    form: tuple[str, int, bool, int], dtype: torch.dtype, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "tiling", lambda *_: Tile(16, 32, step, 4, 1))
    experts = PackedExperts(*form)
    found = TritonRunner(MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, "silu", dtype, CPU))
    found.load(experts)
    x, ids, weights = routed(19)
    wanted = reference(experts, x.to(dtype), ids, weights)
    # As with plain weights, which are rounded once more where a row has several scales.
    near = 1e-5 if dtype == torch.float32 else 2.0**-6 * float(wanted.abs().max())
    torch.testing.assert_close(found.apply(x.to(dtype), ids, weights).double(), wanted, rtol=near, atol=near)


def rounded(x: Tensor, group: int) -> Tensor:
    """float64 numbers as e4m3 holds them, each group of a row scaled so that its largest is 448."""
    groups = x.float().unflatten(-1, (-1, group))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    return ((groups / scales).to(torch.float8_e4m3fn).float() * scales).flatten(-2).double()


@pytest.mark.sweep
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("groups", "row_block"), [(1, 1), (2, 16)])
def test_experts_whose_inputs_are_rounded(
    groups: int, row_block: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against every token and expert written out in float64; the products themselves are exact."""
    monkeypatch.setattr(runner, "tiling", lambda *_: Tile(16, 32, 8 // dtype.itemsize, 4, 1))
    experts = PackedExperts("e4m3", groups, False, row_block)
    experts._packed = [[replace(one, rounds_input=True) for one in of] for of in experts._packed]
    found = TritonRunner(MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, "silu", dtype, CPU))
    found.load(experts)
    x, ids, weights = routed(19)
    x = x.to(dtype)
    wanted = torch.zeros(x.shape, dtype=torch.float64)
    gate_up, down = experts.gate_up.double(), experts.down.double()
    for token, (chosen, shares) in enumerate(zip(ids.tolist(), weights.double(), strict=True)):
        given = rounded(x[token].double(), HIDDEN // groups)
        for expert, share in zip(chosen, shares, strict=True):
            gate, up = (gate_up[expert] @ given).chunk(2)
            gated = (torch.nn.functional.silu(gate) * up).to(dtype)
            wanted[token] += share * (down[expert] @ rounded(gated.double(), INNER // groups))
    out = found.apply(x, ids, weights).double()
    # A number on a border of two of e4m3 may fall on either side: a sixteenth of it, in one of 48.
    largest = float(wanted.abs().max())
    assert float((out - wanted).abs().max()) < 0.02 * largest
    assert float((out - wanted).abs().mean()) < (1e-3 if dtype == torch.float32 else 4e-3) * largest
    plain = reference(experts, x, ids, weights)
    assert float((plain - wanted).abs().mean()) > 4e-3 * largest, "rounding made no difference"


@pytest.mark.sweep
@interpreted
def test_inputs_are_rounded_as_torch_does() -> None:
    """Numbers of every size, below e4m3's normal ones too, halves between two, zeros, and what is no number."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(40, 96, generator=random) * 2.0 ** torch.randint(-14, 1, (40, 96), generator=random)
    x[0], x[1, 5], x[2, 7] = 0.0, torch.nan, -torch.inf
    x[3] = torch.arange(96) * 448 / 512  # its largest is no power of two's multiple
    x[4] = torch.tensor([448.0, 17.0, 19.0, -21.0, 2**-10, 3 * 2**-10] * 16)
    packed = PackedNumbers("e4m3", torch.zeros(8, 96, dtype=torch.float8_e4m3fn), torch.ones(8, 1), rounds_input=True)
    for group in (96, 32):
        form = replace(packed, scales=torch.ones(8, 96 // group), group_size=group)
        given, scales, _ = made(Experts())._inputs(x, Matrices.like(form, 2), Tile(16, 32, 8, 4, 1))
        groups = x.unflatten(1, (-1, group))
        largest = groups.abs().amax(-1)
        assert torch.equal(scales.isinf(), ~largest.isfinite())
        is_fine = largest.isfinite() & (largest > 0)
        assert torch.equal(scales[is_fine], largest[is_fine] / 448)
        wanted = (groups / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
        assert torch.equal(given.view_as(groups)[is_fine], wanted[is_fine])
        assert not given.view_as(groups)[largest == 0].any()


@interpreted
def test_experts_packed_in_another_form_are_refused() -> None:
    experts = PackedExperts("int8", 2, False, 1)
    experts._packed[1][3] = PackedExperts("int8", 4, False, 1)._packed[1][3]
    found = TritonRunner(MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, "silu", torch.float32, CPU))
    with pytest.raises(ModelLoadError, match="expert 3 is packed in another form than expert 0: take --moe-runner"):
        found.load(experts)


@pytest.mark.gate(4)
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
@pytest.mark.usefixtures("same_rows")
def test_a_tokens_bits_do_not_depend_on_others_in_its_tile() -> None:
    found = made(Experts())
    x, ids, weights = routed(20)
    together = found.apply(x, ids, weights)
    for i in (0, 7, 19):
        one = slice(i, i + 1)
        assert torch.equal(found.apply(x[one], ids[one], weights[one]), together[one])


@pytest.mark.sweep
@interpreted
def test_tiles_of_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps over the inputs, several tiles of an expert, columns that no tile fills."""
    monkeypatch.setattr(runner, "tiling", lambda *_: Tile(32, 32, 16, 4, 1))
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
    with pytest.raises(ModelLoadError, match=r"plain, or packed with scales .*backend torch"):
        fwk.LLM(str(tmp_path), moe_runner_backend="triton", quantization="bitsandbytes")
    context = MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, "clamped_swiglu", torch.float32, CPU)
    with pytest.raises(ModelLoadError, match=r"'clamped_swiglu' is not among those the triton.*backend torch"):
        TritonRunner(context)


@pytest.mark.sweep
@interpreted
def test_a_model_is_served_with_e4m3_activations(tmp_path: Path) -> None:
    """As the torch runner serves it, which multiplies by torch's scaled products."""
    make_checkpoint(tmp_path, "qwen3_moe")
    prompts = [[5 + i, 9, 11, 7 + i, 30] for i in range(6)]
    asked = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    said: dict[tuple[str, str], list[Any]] = {}
    for name, activations in (("torch", "8bit"), ("triton", "8bit"), ("triton", "full")):
        options: dict[str, Any] = {"quantization": "fp8", "fp8_activations": activations, "moe_runner_backend": name}
        with fwk.LLM(str(tmp_path), **options) as llm:
            said[name, activations] = llm.generate(prompts, asked)
    found, wanted, full = said["triton", "8bit"], said["torch", "8bit"], said["triton", "full"]
    assert [o.token_ids for o in found] == [o.token_ids for o in wanted]
    near = [abs(a - b) for a, b in zip(chosen(found), chosen(wanted), strict=True)]
    apart = [abs(a - b) for a, b in zip(chosen(found), chosen(full), strict=True)]
    assert max(near) < 0.2 * max(apart), "activations were not rounded"


def chosen(outputs: list[Any]) -> list[float]:
    """Log-probabilities of the first token of each."""
    return [output.logprobs[0].logprob for output in outputs]


@pytest.mark.gate(1)
@interpreted
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_one_tile_size_in_deterministic_runs(monkeypatch: pytest.MonkeyPatch, is_deterministic: bool) -> None:
    """And the same bits for a token alone; the interpreter adds up tiles of two sizes alike, matrix units do not."""
    seen: set[int] = set()
    real = runner._launch

    def watched(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        seen.add(constants.get("ROWS", 0))
        real(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(runner, "_launch", watched)
    experts = Experts()
    experts.gate_up, experts.down = experts.gate_up.bfloat16(), experts.down.bfloat16()
    context = MoEContext(EXPERTS, TOP_K, HIDDEN, INNER, "silu", torch.bfloat16, CPU, is_deterministic=is_deterministic)
    found = TritonRunner(context)
    found.load(experts)
    x, ids, weights = routed(90)
    together = found.apply(x.bfloat16(), ids, weights)
    for row in (0, 50, 89):
        one = slice(row, row + 1)
        assert torch.equal(found.apply(x[one].bfloat16(), ids[one], weights[one]), together[one])
    assert seen - {0} == ({FEW_ROWS} if is_deterministic else {FEW_ROWS, MANY_ROWS})


@interpreted
def test_inputs_whose_rows_stand_apart() -> None:
    found = made(Experts())
    x, ids, weights = routed(6)
    wide: Tensor = torch.cat((x, torch.full_like(x, torch.nan)), 1)
    assert torch.equal(found.apply(wide[:, :HIDDEN], ids, weights), found.apply(x, ids, weights))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_machine_code(target: str, dtype: str) -> None:
    """No numbers in local memory, matrices read 128 bits at a time and multiplied by tensor cores."""
    found = compiled(target, dtype, "experts")
    products = [code for code in found if code["name"] in ("gate_up_tiles", "down_tiles")]
    assert len(products) == 16
    assert {code["name"] for code in found} == {
        *("count_pairs", "sort_pairs", "add_experts"),
        *(code["name"] for code in products),
    }
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["shared"] <= (64 if target == "gfx942" else 100) * 1024, code
    for code in products:
        # On AMD, 32 bytes of a row of the packed are read by more threads than two; by Triton 3.6 in other types, too.
        is_narrow = target == "gfx942" and (dtype == "fp32" or is_triton_before("3.9"))
        assert code["loads_of_128_bits"] > 0 or is_narrow, code
        assert code["matrix_products"] > 0 or dtype == "fp32", code  # float32 is multiplied as it is
    if target == "90" and dtype != "fp32":
        assert all(code["hopper_matrix_products"] > 0 for code in products[8:]), products  # tiles of many rows


@pytest.mark.sweep
@pytest.mark.parametrize("target", ["90", "100"])
def test_machine_code_of_products_of_rounded_inputs(target: str) -> None:
    """Matrix units multiply e4m3 numbers as they are; in tiles of few rows, which wait for memory, as float16."""
    found = compiled(target, "bf16", "rounded-experts")
    assert [code["name"] for code in found] == ["round_rows"] * 2 + ["gate_up_tiles", "down_tiles"] * 4
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["shared"] <= 100 * 1024, code
    for code in found[2:]:
        assert code["loads_of_128_bits"] > 0, code
    for code in found[2:6]:
        assert code["e4m3_products"] + code["matrix_products"] > 0, code
    for code in found[6:]:
        assert code["e4m3_products"] > 0, code
        assert code["matrix_products"] == 0, code
