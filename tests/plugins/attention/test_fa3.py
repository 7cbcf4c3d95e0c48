"""The FA3 adapter over stand-ins for the packages that bring it, and its declaration."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.helpers import fake_fa3

from fwk.interfaces.attention import AttentionBackend, AttentionContext
from fwk.interfaces.declaration import Facts, Host
from fwk.plugins import Registered, discover, find
from fwk_attention.fa3.backend import FA3Backend
from fwk_attention.fa3.kernels import PROVIDERS
from fwk_kit.testing import AttentionSuite
from fwk_kit.testing import attention_cases as contract
from fwk_kit.testing.attention_cases import DTYPES, STEPS, Shape

FA3 = find(discover(), "attention", "fa3")
GPU = Host("cuda", (9, 0))
STAND_INS: dict[str, Callable[..., Any]] = {
    "flash_attn_interface": fake_fa3.flash_attn_3,
    "sgl_kernel": fake_fa3.sgl_kernel,
    "vllm_flash_attn": fake_fa3.vllm_flash_attn,
}


@pytest.fixture(params=STAND_INS)
def package(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Only this one can be imported."""
    for name, (module, function, _) in PROVIDERS.items():
        if name == request.param:
            found = ModuleType(module)
            setattr(found, function, STAND_INS[name])
            monkeypatch.setitem(sys.modules, module.partition(".")[0], found)
            monkeypatch.setitem(sys.modules, module, found)
        else:
            monkeypatch.setitem(sys.modules, module, None)

    def build(
        registered: Registered, shape: Shape, features: frozenset[str] = frozenset(), *, is_deterministic: bool = False
    ) -> AttentionBackend:
        dtype = DTYPES[shape.dtype]
        return FA3Backend(AttentionContext(torch.device("cpu"), dtype, shape.kv_dtype, shape.block_size))

    monkeypatch.setattr(contract, "build", build)
    fake_fa3.CALLS.clear()
    return request.param


@pytest.mark.gate(12)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("window", [None, 10])
def test_equals_the_reference(package: str, step: tuple[list[int], list[int]], window: int | None) -> None:
    contract.check(FA3, Shape(sliding_window=window, soft_cap=5.0 if window else None), *step)
    (called,) = set(fake_fa3.CALLS)
    assert called.replace("-", "_") in (package, "flash_attn_3")


@pytest.mark.gate(9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_heads_and_blocks(package: str, block_size: int, dtype: str) -> None:
    contract.check(FA3, Shape(9, 3, 64, block_size, dtype=dtype), [20, 31, 0, 17], [1, 1, 18, 20])


def test_the_rest_of_the_contract(package: str) -> None:
    suite = AttentionSuite()
    suite.test_a_block_used_before_is_as_good_as_new(FA3)
    suite.test_writes_only_its_slots(FA3)
    suite.test_layers_of_different_kinds_share_a_step(FA3)
    suite.test_two_backends_do_not_disturb_each_other(FA3)
    for own in (1, 40):
        suite.test_reads_blocks_filled_in_the_same_step(FA3, own)


@pytest.mark.parametrize("name", STAND_INS)
def test_the_stand_ins_have_the_packages_signatures(name: str) -> None:
    module, function, _ = PROVIDERS[name]
    try:
        real = getattr(importlib.import_module(module), function)
    except (ImportError, OSError):
        pytest.skip(f"{module} is not installed")
    taken = inspect.signature(real).parameters
    assert set(inspect.signature(STAND_INS[name]).parameters) <= set(taken)


def test_without_a_package_and_elsewhere_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = Facts(host=GPU, dtype="bfloat16", head_size=128)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = FA3.declaration.refusal(facts) or ""
    assert said == ("needs one of the packages flash-attn-3, sgl-kernel, vllm-flash-attn: pip install sgl-kernel")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "sgl_kernel" else None)
    assert FA3.declaration.refusal(facts) is None
    assert (FA3.declaration.auto_skip_reason(facts) or "").startswith("has not been run on a GPU yet")
    blackwell = Facts(host=Host("cuda", (10, 0)), dtype="bfloat16", head_size=128)
    assert FA3.declaration.refusal(blackwell) == "needs a device of compute capability 9, this one has 10.0"
    assert "needs a cuda device" in (FA3.declaration.refusal(Facts(dtype="bfloat16", head_size=128)) or "")


def test_no_package_that_can_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, _, _ in PROVIDERS.values():
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match="sgl_kernel"):
        FA3Backend(AttentionContext(torch.device("cpu"), torch.bfloat16, "auto", 16))
