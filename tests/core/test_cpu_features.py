"""When kernels are built for AMX: the CPU has it, the system permits it, the compiler knows it."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fwk_native as native
from fwk.errors import ConfigError
from fwk_native import amx, cpu_features

ALL = frozenset[str]().union(*native.ISA_NEEDS.values())


@pytest.fixture
def has_amx(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU with all that kernels know, a system that permits it and a compiler that knows it."""
    monkeypatch.delenv(native.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: ALL)
    monkeypatch.setattr(amx, "refused_by_system", lambda: None)
    monkeypatch.setattr(amx, "refused_by_compiler", lambda _: None)
    native.amx_refusal.cache_clear()
    yield
    native.amx_refusal.cache_clear()


@pytest.mark.usefixtures("has_amx")
def test_it_is_the_most_a_machine_has_and_less_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.isas() == list(native.ISA_NEEDS)
    assert native.isa() == "amx"
    assert set(amx.FLAGS) < set(native.flags_of("amx"))
    assert native.has_pairs("amx")
    monkeypatch.setenv(native.ISA_VARIABLE, "avx512_bf16")
    assert native.isa() == "avx512_bf16"


@pytest.mark.usefixtures("has_amx")
@pytest.mark.parametrize("who", ["system", "compiler"])
def test_a_refusal_is_said_once_and_the_next_set_taken(
    who: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(amx, f"refused_by_{who}", lambda *_: f"the {who} does not let it")
    assert native.isa() == native.isas()[-1] == "avx512_bf16"
    assert capsys.readouterr().err == f"fwk: kernels are built without this CPU's AMX: the {who} does not let it\n"
    monkeypatch.setenv(native.ISA_VARIABLE, "amx")
    with pytest.raises(
        ConfigError, match=f"FWK_CPU_ISA=amx: this machine runs .*avx512_bf16; the {who} does not let it"
    ):
        native.isa()


@pytest.mark.usefixtures("has_amx")
@pytest.mark.parametrize("flag", sorted(amx.CPU_FLAGS))
def test_a_cpu_without_all_of_it_is_not_asked(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: ALL - {flag})
    monkeypatch.setattr(amx, "refused_by_system", lambda: pytest.fail("asked the system"))
    assert native.isa() == "avx512_bf16"
    monkeypatch.setenv(native.ISA_VARIABLE, "amx")
    with pytest.raises(ConfigError, match="this CPU has no AMX"):
        native.isa()


@pytest.mark.usefixtures("has_amx")
def test_the_emulation_is_for_those_who_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.EMULATED_AMX not in native.isas()
    assert not set(amx.FLAGS) & set(native.flags_of(native.EMULATED_AMX))
    monkeypatch.setenv(native.ISA_VARIABLE, native.EMULATED_AMX)
    assert native.isa() == native.EMULATED_AMX


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="asks Linux on x86-64")
def test_the_system_is_asked() -> None:
    """What it says it has given (ARCH_GET_XCOMP_PERM) is what was found."""
    given = ctypes.c_uint64(0)
    refused = amx.refused_by_system()
    syscall = ctypes.CDLL(None).syscall
    failed = syscall(ctypes.c_long(158), ctypes.c_long(0x1022), ctypes.byref(given)) != 0
    assert (refused is None) == (not failed and bool(given.value >> 18 & 1))


def test_compilers(tmp_path: Path) -> None:
    script = tmp_path / "old-compiler"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    assert "does not know AMX: it takes g++ 11" in (amx.refused_by_compiler((str(script),)) or "")
    script.write_text("#!/bin/sh\nexit 0\n")
    amx.refused_by_compiler.cache_clear()
    assert amx.refused_by_compiler((str(script),)) is None
    assert "does not run" in (amx.refused_by_compiler((str(tmp_path / "none"),)) or "")


@pytest.mark.parametrize(("compiler", "most"), [("true", "avx2_vnni"), ("false", "avx2")])
def test_avx_vnni_takes_a_compiler_that_knows_it(compiler: str, most: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_features, "cpu_flags", lambda: native.ISA_NEEDS["avx2_vnni"])
    monkeypatch.setattr(cpu_features.compiler, "find", lambda: (compiler,))
    assert native.isas()[-1] == most
