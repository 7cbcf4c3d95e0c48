"""Native CPU code: what builds C++ kernels, runs them on threads, and gives them memory.

Here belong the compiler and its cache (``build``), the CPU's features (``cpu_features``), the threads that run
operators (``thread_pool``), the operating system's memory (``memory``, ``huge_pages``) and the headers kernels include
(``include/``). Kernels themselves belong to plugins, settings of the process to ``fwk.process``.
"""

from fwk.native.build import (
    EMULATED_AMX,
    INCLUDE,
    ISA_FLAGS,
    ISA_NEEDS,
    ISA_VARIABLE,
    amx_refusal,
    build_library,
    cpu_flags,
    flags_of,
    has_pairs,
    has_tiles,
    isa,
    isas,
    load,
    refusal,
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
