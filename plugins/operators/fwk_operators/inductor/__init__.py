"""Operators compiled by torch.compile, one kernel each, for small steps."""

from __future__ import annotations

import os
import shlex
import shutil

from fwk import Needs, OperatorsSpec, Options, hookimpl, option
from fwk.interfaces.declaration import Facts


class InductorOptions(Options):
    """Options of ``operators.inductor``."""

    torch_compile_max_bs: int = option(
        32,
        "Rows (next tokens, drafts to be verified) of the largest step whose operators are those that torch.compile "
        "made; a larger one has torch's own.",
        stability="beta",
        ge=1,
    )


class InductorSpec(OperatorsSpec):
    """Needs a C++ compiler for a CPU, Triton for a CUDA device, and a model that generates."""

    def refusal(self, facts: Facts) -> str | None:
        return super().refusal(facts) or _refusal(facts)


def _refusal(facts: Facts) -> str | None:
    if facts.task not in ("", "generate"):
        return f"compiles what next tokens are computed with, and there are none in a run to {facts.task}"
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(name) == "1":
            return f"needs torch.compile, which {name}=1 switches off"
    if facts.host.device == "cuda":
        return Needs(packages=("triton>=3.4",)).refusal(facts.host)
    command = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    if shutil.which(command[0]) is None:
        return (
            f"needs a C++ compiler, and there is no {command[0]}: install one (apt-get install g++), or name it in CXX"
        )
    return None


@hookimpl
def operators() -> list[OperatorsSpec]:
    return [
        InductorSpec(
            name="inductor",
            load="fwk_operators.inductor.backend:InductorOperators",
            options=InductorOptions,
            switches=("enable-torch-compile",),
            rank=-20,  # only when asked for: no GPU has run it, and a CPU's own operators are faster
            summary="torch's operators, in small steps one compiled kernel each (torch.compile); not yet run on a GPU.",
        )
    ]
