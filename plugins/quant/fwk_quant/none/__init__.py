"""Weights as the checkpoint has them."""

from pathlib import Path

from fwk import Needs, QuantizerSpec, hookimpl
from fwk.config import Options, option
from fwk.interfaces.declaration import Facts, InterpretedKernels
from fwk_quant._common.declaration import NativeOnCpuSpec

_KERNELS = Path(__file__).parents[1] / "_linear_cpu"


class PlainOptions(Options):
    """Options of ``quant.none``."""

    shorten_weights: bool = option(
        True,
        "Keep bfloat16 weights in 12 bits, without loss, on a CPU with bfloat16 instructions other than AMX's: linear "
        "layers of up to 8 tokens a step, which wait for memory, are 1.2 times as fast, those of many a little slower.",
    )
    screen_head: bool = option(
        True,
        "Keep the LM head a second time, in 8 bits, on a CPU: steps of up to 4 sequences that all decode greedily find "
        "out by it which tokens cannot be the most likely, and read only the other rows of the head. What comes out is "
        "the same to the bit.",
    )


class PlainSpec(InterpretedKernels, NativeOnCpuSpec):
    """Deterministic on devices that Triton compiles for, too: by a kernel of our own in place of torch's products."""

    on_device = Needs(device="cuda", compute_capability=(8, 0))
    interpreter = "TRITON_INTERPRET"

    def refusal(self, facts: Facts) -> str | None:
        if not facts.is_deterministic or facts.host.device == "cpu":
            return NativeOnCpuSpec.refusal(self, facts)
        why = self.why_no_kernels(facts.host) or Needs(packages=("triton>=3.4",)).refusal(facts.host)
        if why is not None:
            return f"is deterministic on a device by a Triton kernel, which {why} (--enable-deterministic-inference)"
        return QuantizerSpec.refusal(self, facts)

    def variance(self, facts: Facts) -> str | None:
        if facts.host.device == "cpu":
            return super().variance(facts)
        return "leaves products on a device to torch unless --enable-deterministic-inference is given"


@hookimpl
def quantizers() -> list[QuantizerSpec]:
    return [
        PlainSpec(
            name="none",
            load="fwk_quant.none.method:PlainMethod",
            layouts=("plain",),
            exact=("plain",),
            api=2,
            options=PlainOptions,
            native_dtypes=("float32", "bfloat16"),
            rank=10,
            kernels=tuple(_KERNELS / name for name in ("floats.cpp", "packing.cpp")),
            summary="Unquantised weights; on a CPU by C++ kernels (AVX2, AVX-512, AMX), built on first use.",
        )
    ]
