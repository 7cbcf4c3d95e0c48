"""Mixture of experts in plain torch: runs anywhere, and is the reference for every other runner."""

from fwk import MoERunnerSpec, hookimpl


@hookimpl
def moe_runners() -> list[MoERunnerSpec]:
    return [
        MoERunnerSpec(
            name="torch",
            load="fwk_moe.torch_loop.runner:TorchRunner",
            summary="One expert after another, in any weight format; the reference.",
        )
    ]
