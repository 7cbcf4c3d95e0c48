"""Whether this process may use AMX: besides the CPU, the system has to permit it and the compiler to know it."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import subprocess
import sys

CPU_FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8"})
FLAGS = ("-mamx-tile", "-mamx-bf16", "-mamx-int8")
"""The compiler's."""

PROBE = 'int main() { __asm__ volatile("tdpbf16ps %tmm6, %tmm4, %tmm0\\n tilerelease"); return __AMX_TILE__; }'

# Linux, asm/prctl.h and asm/unistd_64.h: tiles are 8 KiB of a thread's state, which a process has to ask for.
_SYS_ARCH_PRCTL = 158
_ARCH_REQ_XCOMP_PERM = 0x1023
_XFEATURE_XTILEDATA = 18


@functools.cache
def refused_by_system() -> str | None:
    """Request the tiles, once for all threads of the process; None when granted, otherwise why not."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 is asked for AMX"
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    numbers = (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)
    if syscall(*map(ctypes.c_long, numbers)) == 0:
        return None
    if ctypes.get_errno() == errno.ENOSPC:
        return "the system does not permit AMX, as a thread's stack for signals (sigaltstack) is too small for it"
    return f"the system does not permit AMX ({os.strerror(ctypes.get_errno())}): it takes Linux 5.16"


@functools.cache
def refused_by_compiler(compiler: tuple[str, ...]) -> str | None:
    """None when the compiler, a command, and its assembler know the instructions, otherwise why it does not."""
    command = [*compiler, *FLAGS, "-x", "c++", "-c", "-", "-o", os.devnull]
    try:
        done = subprocess.run(command, input=PROBE, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the compiler {compiler[0]} does not run: {error}"
    if done.returncode == 0:
        return None
    return f"the compiler {compiler[0]} does not know AMX: it takes g++ 11 or clang++ 12, and binutils 2.35"
