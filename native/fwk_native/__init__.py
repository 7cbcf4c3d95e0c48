"""Native CPU code: what builds C++ kernels, runs them on threads, and gives them memory.

Here belong what builds libraries (``build``) and keeps them (``cache``), the system's ``compiler``, the CPU's
instruction sets (``cpu_features``, and ``amx``, which the system has to permit), the threads that run operators
(``thread_pool``), the operating system's memory (``memory``, ``huge_pages``) and the headers kernels include
(``include/``). Kernels belong to plugins, settings of the process to ``fwk_process``.
"""

from fwk_native.build import INCLUDE, build_library, load, refusal
from fwk_native.cpu_features import (
    EMULATED_AMX,
    ISA_FLAGS,
    ISA_NEEDS,
    ISA_VARIABLE,
    amx_refusal,
    cpu_flags,
    flags_of,
    has_pairs,
    has_tiles,
    isa,
    isas,
    testable_isas,
)

__all__ = [
    "EMULATED_AMX",
    "INCLUDE",
    "ISA_FLAGS",
    "ISA_NEEDS",
    "ISA_VARIABLE",
    "amx_refusal",
    "build_library",
    "cpu_flags",
    "flags_of",
    "has_pairs",
    "has_tiles",
    "isa",
    "isas",
    "load",
    "refusal",
    "testable_isas",
]
