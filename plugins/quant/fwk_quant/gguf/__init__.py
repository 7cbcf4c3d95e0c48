"""Block-quantised weights as GGUF files hold them."""

from dataclasses import dataclass
from pathlib import Path

import fwk_native as native
from fwk import QuantizerSpec, hookimpl
from fwk.config import Options
from fwk.interfaces.declaration import Facts
from fwk_quant._common.declaration import NativeOnCpuSpec
from fwk_quant._common.options import Activations, activations_option


class GGUFOptions(Options):
    """Options of ``quant.gguf``."""

    gguf_activations: Activations = activations_option()


SMALL = ("Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4")

_KERNELS = Path(__file__).parents[1] / "_linear_cpu"

LAYOUTS = tuple(f"gguf:{kind}" for kind in ("Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q4_0", "Q4_1", "Q5_0", "Q5_1", *SMALL))


@dataclass(frozen=True, kw_only=True)
class GGUFSpec(NativeOnCpuSpec):
    """Before numbers where it is faster with one token and with many, as measured (``docs/performance.md``)."""

    def auto_skip_reason(self, facts: Facts) -> str | None:
        if not set(facts.layouts) & set(self.exact):
            return super().auto_skip_reason(facts)
        less = "; --quantization gguf takes less memory"
        if not self.is_native(facts):
            return f"unpacks blocks for each product here: auto reads their numbers{less}"
        if native.has_tiles(native.isa()):
            return f"multiplies many tokens more slowly than AMX does with numbers: auto reads these{less}"
        return None


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    """Declare the quantiser."""
    return [
        GGUFSpec(
            name="gguf",
            load="fwk_quant.gguf.method:GGUFMethod",
            layouts=LAYOUTS,
            exact=LAYOUTS,
            api=2,
            rank=20,
            options=GGUFOptions,
            # With AMX auto reads numbers: a start has nothing to build ahead for blocks.
            kernels=() if "amx_tile" in native.cpu_flags() else (_KERNELS / "integers.cpp", _KERNELS / "packing.cpp"),
            summary="The blocks of a GGUF file, kept packed in memory and in the CPU's kernels.",
        )
    ]
