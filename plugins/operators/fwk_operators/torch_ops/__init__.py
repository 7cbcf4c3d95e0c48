"""Operators by torch: the reference, on every device."""

from fwk import OperatorsSpec, hookimpl


@hookimpl
def operators() -> list[OperatorsSpec]:
    return [
        OperatorsSpec(
            name="torch",
            load="fwk_operators._common.torch_operators:TorchOperators",
            summary="torch's own operators, on every device: the reference.",
        )
    ]
