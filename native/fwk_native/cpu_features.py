"""What this machine's CPU can do, and the instruction sets that kernels are built for."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

from fwk_errors import ConfigError
from fwk_native import amx, compiler, prebuilt

ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
    "avx2_vnni": ("-mavx2", "-mfma", "-mf16c", "-mavxvnni"),
    "avx512": (
        *("-mavx2", "-mfma", "-mf16c", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
        "-mprefer-vector-width=512",
    ),
}
ISA_FLAGS["avx512_vnni"] = (*ISA_FLAGS["avx512"], "-mavx512vnni")
ISA_FLAGS["avx512_bf16"] = (*ISA_FLAGS["avx512_vnni"], "-mavx512bf16")
ISA_FLAGS["amx"] = (*ISA_FLAGS["avx512_bf16"], *amx.FLAGS)
"""Instruction sets a kernel may be built for, from the least to the most, and the compiler's flags for each."""

ISA_NEEDS: dict[str, frozenset[str]] = {
    "plain": frozenset(),
    "avx2": frozenset({"avx2", "fma", "f16c"}),
    "avx2_vnni": frozenset({"avx2", "fma", "f16c", "avx_vnni"}),
    "avx512": frozenset({"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"}),
}
ISA_NEEDS["avx512_vnni"] = ISA_NEEDS["avx512"] | {"avx512_vnni"}
ISA_NEEDS["avx512_bf16"] = ISA_NEEDS["avx512_vnni"] | {"avx512_bf16"}
ISA_NEEDS["amx"] = ISA_NEEDS["avx512_bf16"] | amx.CPU_FLAGS

EMULATED_AMX = "amx_emulated"
"""The kernels of ``amx`` with the instructions' work computed, on the most that this machine has besides: hundreds of
times as slow, for tests. Used only where it is named."""

ISA_VARIABLE = "FWK_CPU_ISA"
"""Environment variable that names a lesser instruction set than the machine has, or ``EMULATED_AMX``."""


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Instruction sets of this CPU, in Linux' names; empty where the system does not say."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


@functools.cache
def amx_refusal() -> str | None:
    """Why kernels do not use AMX; None when they may. Printed once where the CPU has it."""
    if not ISA_NEEDS["amx"] <= cpu_flags():
        return "this CPU has no AMX"
    why = amx.refused_by_system()
    command = compiler.find()
    if why is None and command is not None:
        why = amx.refused_by_compiler(command)
    if why is not None:
        print(f"fwk: kernels are built without this CPU's AMX: {why}", file=sys.stderr, flush=True)
    return why


@functools.cache
def _knows_avx_vnni(command: tuple[str, ...]) -> bool:
    """Whether a compiler and its assembler do: g++ 11 and binutils 2.36, or clang++ 12."""
    probe = 'void f() { asm("{vex} vpdpbusd %ymm0, %ymm0, %ymm0"); }'
    line = [*command, *ISA_FLAGS["avx2_vnni"], "-x", "c++", "-c", "-", "-o", os.devnull]
    try:
        return not subprocess.run(line, input=probe, capture_output=True, text=True, timeout=60, check=False).returncode
    except (OSError, subprocess.TimeoutExpired):
        return False


def isas() -> list[str]:
    """Instruction sets this machine can run, from the least to the most.

    Without a compiler only those that kernels came for, if any did.
    """
    flags = cpu_flags()
    possible = [name for name, needs in ISA_NEEDS.items() if needs <= flags]
    command = compiler.find()
    if command is None:
        brought = prebuilt.instruction_sets()
        possible = [name for name in possible if name in brought] or possible
    elif possible[-1] == "avx2_vnni" and not _knows_avx_vnni(command):
        possible.pop()
    return [name for name in possible if name != "amx" or amx_refusal() is None]


def testable_isas() -> list[str]:
    """What tests of kernels go through: ``isas()`` and the emulation."""
    return [*isas(), EMULATED_AMX]


def isa() -> str:
    """The instruction set kernels are built for: the machine's best, or what ``FWK_CPU_ISA`` names.

    Raises ``ConfigError`` when that is unknown, or more than the machine has.
    """
    possible = isas()
    wanted = os.environ.get(ISA_VARIABLE) or possible[-1]
    if wanted not in (*possible, EMULATED_AMX):
        why = f"; {amx_refusal()}" if wanted == "amx" else ""
        raise ConfigError(f"{ISA_VARIABLE}={wanted}: this machine runs {', '.join(possible)}{why}")
    return wanted


def flags_of(instructions: str) -> tuple[str, ...]:
    """The compiler's flags for an instruction set, one of ``testable_isas()``."""
    if instructions == EMULATED_AMX:
        most = next(name for name in reversed(isas()) if name != "amx")
        return (*ISA_FLAGS[most], "-DFWK_EMULATED_TILES", "-O1")  # built twice as fast, and slow in any case
    return ISA_FLAGS[instructions]


def has_pairs(instructions: str) -> bool:
    """Whether kernels multiply bfloat16 in pairs."""
    return "-mavx512bf16" in flags_of(instructions)


def has_tiles(instructions: str) -> bool:
    """Whether kernels multiply blocks by AMX or its emulation."""
    return instructions in ("amx", EMULATED_AMX)
