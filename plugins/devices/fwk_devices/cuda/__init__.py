"""NVIDIA GPUs."""

from fwk import DeviceSpec, hookimpl


@hookimpl
def devices() -> list[DeviceSpec]:
    return [
        DeviceSpec(
            name="cuda",
            load="fwk_devices.cuda.device:Cuda",
            rank=20,
            summary="an NVIDIA GPU for each worker; not yet run on one",
        )
    ]
