"""The Triton backend's parts that the contract does not see, half precision, a served model, and its machine code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.adapters import make_adapter, make_base
from tests.helpers.interpreted import check_never_chosen_by_itself, interpreted
from tests.helpers.machine_code import compiled

import fwk
from fwk import SamplingParams
from fwk.interfaces.lora import LoRAContext, LoRAMatrices, LoRAPart
from fwk.plugins import discover
from fwk_kit.testing.lora import batch_of
from fwk_lora.triton_lora import backend
from fwk_lora.triton_lora.backend import TritonLoRA

INPUTS, OUTPUTS = 200, (96, 70, 130)


def test_never_chosen_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check_never_chosen_by_itself(discover(), "lora", monkeypatch)


def matrices(seed: int, rank: int, parts: tuple[int, ...] = (0, 1, 2)) -> list[LoRAMatrices | None]:
    random = torch.Generator().manual_seed(seed)
    made = []
    for part, size in enumerate(OUTPUTS):
        a = torch.randn(rank, INPUTS, generator=random) / INPUTS**0.5
        own = LoRAMatrices(a, torch.randn(size, rank, generator=random) / rank**0.5, 0.5)
        made.append(own if part in parts else None)
    return made


@pytest.mark.gate(1)
@interpreted
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("max_rank", [5, 40])
def test_many_tiles_blocks_and_steps(dtype: torch.dtype, max_rank: int) -> None:
    """Two layers, of which one adapter changes one; rows of x and y that stand apart; tokens in any order."""
    lora = TritonLoRA(LoRAContext(torch.device("cpu"), dtype, 3, max_rank))
    parts = [LoRAPart(f"m.{i}", INPUTS, size, range(INPUTS), range(size)) for i, size in enumerate(OUTPUTS)]
    other = [LoRAPart("n", INPUTS, 16, range(INPUTS), range(16))]
    layer, second = lora.register(parts), lora.register(other)
    assert lora.register(parts) is layer
    held: dict[int, list[LoRAMatrices | None]] = {0: matrices(1, max_rank), 2: matrices(2, 3, (0, 2))}
    for slot, own in held.items():
        lora.load(slot, {layer.index: lora.pack(layer, own)})
    slots = np.random.default_rng(0).integers(-1, 3, 90)
    slots[slots == 1] = 0
    lora.plan(batch_of(slots.tolist(), 90))
    random = torch.Generator().manual_seed(4)
    x = torch.randn(90, INPUTS + 8, generator=random).to(dtype)[:, :INPUTS]
    y = torch.randn(90, sum(OUTPUTS), generator=random).to(dtype)
    wanted = y.double()
    for token, slot in enumerate(slots.tolist()):
        start = 0
        for size, own in zip(OUTPUTS, held.get(slot, [None] * 3), strict=True):
            if own is not None:
                added = own.b.double() @ (own.a.double() @ x[token].double())
                wanted[token, start : start + size] += own.scale * added
            start += size
    near = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    torch.testing.assert_close(
        lora.apply(y, x, layer).double(), wanted, rtol=near, atol=near * float(wanted.abs().max())
    )
    nothing = torch.zeros(90, 16, dtype=dtype)
    assert lora.apply(nothing, x, second) is nothing
    assert not nothing.any()


@interpreted
def test_two_launches_a_layer_however_many_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[str] = []
    real = backend._launch

    def launch(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.fn.__name__)
        real(kernel, *arguments, **constants)

    monkeypatch.setattr(backend, "_launch", launch)
    lora = TritonLoRA(LoRAContext(torch.device("cpu"), torch.float32, 3, 8))
    layer = lora.register([LoRAPart("m", INPUTS, 96, range(INPUTS), range(96))])
    for slot in range(3):
        lora.load(slot, {layer.index: lora.pack(layer, matrices(slot, 4)[:1])})
    lora.plan(batch_of([0, 1, 2, -1, 0], 5))
    lora.apply(torch.zeros(5, 96), torch.ones(5, INPUTS), layer)
    assert launched == ["shrink_tiles", "expand_tiles"]
    lora.plan(batch_of([-1, -1], 2))
    lora.apply(torch.zeros(2, 96), torch.ones(2, INPUTS), layer)
    assert len(launched) == 2


@pytest.mark.sweep
@interpreted
def test_a_model_is_served_as_by_torch(tmp_path: Path) -> None:
    """Prompts in chunks, adapters and none in one batch, an adapter that is unloaded and another in its slot."""
    base = tmp_path / "base"
    make_base(base, intermediate_size=128)
    adapters = [make_adapter(base, tmp_path / f"adapter{seed}", seed=seed) for seed in (1, 2)]
    asked = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    prompts = [[1, 7, 3, 9] * 5, list(range(40, 57)), [5, 5, 6], [8]]

    def said(name: str) -> list[list[int]]:
        options: dict[str, Any] = {"lora_backend": name, "enable_lora": True, "max_loras_per_batch": 1}
        sizes: dict[str, Any] = {"max_total_tokens": 512, "chunked_prefill_size": 16, "dtype": "float32"}
        found: list[list[int]] = []
        with fwk.LLM(str(base), **options, **sizes) as llm:
            for path in adapters:
                llm.load_adapter(path.name, str(path))
                done = llm.generate(prompts, asked, adapter=[path.name, "", path.name, ""])
                found += [one.token_ids for one in done]
        return found

    wanted = said("torch")
    assert said("triton") == wanted
    assert wanted[0] != wanted[4], "two adapters say the same"


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("target", ["80", "90", "100", "gfx942"])
def test_machine_code(target: str, dtype: str) -> None:
    """No numbers in local memory, matrices read 128 bits at a time and multiplied by matrix units."""
    found = compiled(target, dtype, "adapters")
    assert [code["name"] for code in found] == ["shrink_tiles", "expand_tiles"] * 2
    for code in found:
        assert code["local_loads"] == code["local_stores"] == 0, code
        assert code["shared"] <= (64 if target == "gfx942" else 100) * 1024, code
        assert code["loads_of_128_bits"] > 0 or target == "gfx942", code
        assert code["matrix_products"] > 0 or dtype == "fp32", code
