"""LoRA by kernels of our own in Triton: on CUDA devices, and anywhere in its interpreter, slowly."""

from __future__ import annotations

from fwk import LoRABackendSpec, Needs, hookimpl
from fwk.interfaces.declaration import InterpretedKernels


class TritonLoRASpec(InterpretedKernels, LoRABackendSpec):
    """Needs a device that Triton compiles for, or its interpreter."""

    on_device = Needs(device="cuda", compute_capability=(8, 0))
    interpreter = "TRITON_INTERPRET"


@hookimpl
def lora_backends() -> list[LoRABackendSpec]:
    return [
        TritonLoRASpec(
            name="triton",
            load="fwk_lora.triton_lora.backend:TritonLoRA",
            needs=Needs(packages=("triton>=3.4",)),
            rank=-10,  # below torch until a GPU has shown that the kernels are right
            summary="Two launches for each layer, whatever adapters a step mixes; so far run in Triton's interpreter "
            "only.",
        )
    ]
