"""Mixture of experts on a CPU: all experts of a layer by one native operator, on packed weights."""

from dataclasses import dataclass

import fwk_native as native
from fwk import MoERunnerSpec, Needs, hookimpl
from fwk.interfaces.declaration import DETERMINISTIC, INVARIANT, Facts
from fwk.interfaces.moe import EXPERT_PARALLEL


@dataclass(frozen=True, kw_only=True)
class CpuRunnerSpec(MoERunnerSpec):
    """Needs a compiler besides what the declaration says."""

    def refusal(self, facts: Facts) -> str | None:
        if facts.dtype not in ("float32", "bfloat16"):
            return f"computes in float32 and bfloat16, this run in {facts.dtype}"
        return super().refusal(facts) or native.refusal()


@hookimpl
def moe_runners() -> list[MoERunnerSpec]:
    return [
        CpuRunnerSpec(
            name="cpu",
            load="fwk_moe.cpu.runner:CpuRunner",
            needs=Needs(device="cpu"),
            offers=frozenset({DETERMINISTIC, INVARIANT, EXPERT_PARALLEL}),
            rank=10,
            summary="All experts of a layer by one C++ operator, which reads those that tokens chose, in any packed "
            "format.",
        )
    ]
