"""Mixture of experts in plain torch: runs anywhere, and is the reference for every other runner."""

from fwk import MoERunnerSpec, hookimpl
from fwk.interfaces.moe import EXPERT_PARALLEL


@hookimpl
def moe_runners() -> list[MoERunnerSpec]:
    return [
        MoERunnerSpec(
            name="torch",
            load="fwk_moe.torch_loop.runner:TorchRunner",
            offers=frozenset({EXPERT_PARALLEL}),
            summary="One expert after another, in any weight format; the reference.",
        )
    ]
