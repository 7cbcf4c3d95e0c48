"""LoRA in plain torch, on any device: the reference."""

from fwk import LoRABackendSpec, hookimpl


@hookimpl
def lora_backends() -> list[LoRABackendSpec]:
    return [
        LoRABackendSpec(
            name="torch",
            load="fwk_lora.torch_lora.backend:TorchLoRA",
            summary="two matrix products for each adapter of a step",
        )
    ]
