"""Recipes of PyTorch's package torchao: weights rounded while they are loaded, and its own kernels for the products."""

from typing import Literal

from fwk import Needs, QuantizerSpec, hookimpl
from fwk.config import Options, option


class TorchaoOptions(Options):
    """Options of ``quant.torchao``."""

    torchao_config: Literal["int8wo", "int8dq", "fp8wo"] = option(
        "int8wo",
        "What torchao makes of plain weights while loading: int8 (int8wo), int8 multiplied with each token's "
        "activations rounded to int8 (int8dq), or e4m3 (fp8wo), with a scale for each output.",
        stability="beta",
    )


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        QuantizerSpec(
            name="torchao",
            load="fwk_quant.torchao.method:TorchaoMethod",
            needs=Needs(packages=("torchao>=0.18,<0.19",)),
            layouts=("plain",),
            api=2,
            bits=8,
            options=TorchaoOptions,
            summary="int8 and e4m3 weights by the recipes and kernels of torchao, made while loading.",
        )
    ]
