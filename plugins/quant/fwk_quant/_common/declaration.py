"""Declarations of formats with kernels of our own on the CPU."""

from __future__ import annotations

from dataclasses import dataclass

import fwk_native as native
from fwk import QuantizerSpec
from fwk.interfaces.declaration import DETERMINISTIC, INVARIANT, Facts


@dataclass(frozen=True, kw_only=True)
class NativeOnCpuSpec(QuantizerSpec):
    """Deterministic where the native kernels compute: in ``native_dtypes`` on a CPU.

    Other products are torch's, whose order of additions depends on the number of tokens.
    """

    offers: frozenset[str] = frozenset({DETERMINISTIC, INVARIANT})
    native_dtypes: tuple[str, ...] = ("bfloat16",)

    def is_native(self, facts: Facts) -> bool:
        """Whether native kernels compute the run's products, unless an option says otherwise."""
        return facts.host.device == "cpu" and facts.dtype in self.native_dtypes and native.refusal() is None

    def refusal(self, facts: Facts) -> str | None:
        found = super().refusal(facts)
        if found is not None or not facts.is_deterministic:
            return found
        why = native.refusal() if facts.host.device == "cpu" else f"run on a CPU, not on {facts.host.device}"
        if why is None and facts.dtype not in self.native_dtypes:
            why = f"compute in {' and '.join(self.native_dtypes)}, not in {facts.dtype}"
        if why is None:
            return None
        return f"is deterministic by its native kernels only, which {why} (--enable-deterministic-inference)"
