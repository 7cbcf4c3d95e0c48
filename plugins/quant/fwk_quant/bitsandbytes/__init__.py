"""Weights and kernels of the package bitsandbytes: NF4, FP4 and LLM.int8()."""

from typing import Literal

from fwk import Needs, QuantizerSpec, hookimpl
from fwk.config import Options, option


class BitsandbytesOptions(Options):
    """Options of ``quant.bitsandbytes``."""

    bitsandbytes_type: Literal["nf4", "fp4", "int8"] = option(
        "nf4",
        "What plain weights become while loading: 4-bit numbers with a scale for each 64, spaced as normal weights are "
        "(nf4) or floating-point (fp4), or int8 with a scale for each output.",
        stability="beta",
    )
    bitsandbytes_threshold: float = option(
        6.0,
        "Activations from this size on are kept out of the 8-bit products of int8 layers; 0: none is.",
        stability="beta",
        ge=0.0,
    )


LAYOUTS = ("bitsandbytes:nf4", "bitsandbytes:fp4", "bitsandbytes:int8")


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        QuantizerSpec(
            name="bitsandbytes",
            load="fwk_quant.bitsandbytes.method:BitsandbytesMethod",
            needs=Needs(packages=("bitsandbytes>=0.46",)),
            layouts=(*LAYOUTS, "plain"),
            exact=LAYOUTS,
            api=2,
            bits=4.5,
            options=BitsandbytesOptions,
            summary="NF4, FP4 and LLM.int8() by the package's kernels; from its checkpoints or made while loading.",
        )
    ]
